"""kv_update in plain jnp: a scatter of [H] rows, which XLA does in place on a donated pool."""

import jax
import jax.numpy as jnp

from pallas_kernels.pages import Pages, quantize


def kv_update(k_pages, v_pages, k, v, page_table, query_starts, kv_lengths, *, first_page, decode):
    """See api.kv_update. Padding goes to the null page."""
    pages, offsets = places(page_table, query_starts, kv_lengths, k.shape[0], k_pages.data.shape[2], decode=decode)
    if first_page is not None:
        pages = pages + first_page
    return _write(k_pages, k, pages, offsets), None if v_pages is None else _write(v_pages, v, pages, offsets)


def places(page_table: jax.Array, query_starts: jax.Array, kv_lengths: jax.Array, tokens: int, page_size: int, *,
           decode: bool) -> tuple[jax.Array, jax.Array]:
    """Page (0 for padding) and offset of each of T tokens: two [T] int32."""
    index = jnp.arange(tokens, dtype=jnp.int32)
    if decode:
        row, position, valid = index, jnp.maximum(kv_lengths - 1, 0), kv_lengths > 0
    else:
        row = jnp.searchsorted(query_starts[1:], index, side="right").astype(jnp.int32)
        valid = index < query_starts[-1]
        row = jnp.minimum(row, kv_lengths.shape[0] - 1)
        position = jnp.where(valid, kv_lengths[row] - query_starts[row + 1] + index, 0)
    pages = page_table.at[row, position // page_size].get(mode="clip")
    return jnp.where(valid, pages, 0), jnp.where(valid, position % page_size, 0)


def _write(pages: Pages, new: jax.Array, page: jax.Array, offset: jax.Array) -> Pages:
    data, scales = quantize(new, pages.data.dtype)
    if scales is None:
        return Pages(pages.data.at[page, :, offset].set(data))
    assert pages.scales is not None
    return Pages(pages.data.at[page, :, offset].set(data), pages.scales.at[page, :, offset].set(scales))
