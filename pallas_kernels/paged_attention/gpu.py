"""paged_attention for GPUs: the page table leads from positions to rows (pallas_kernels/gpu.py has the maths)."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.pallas import triton

from pallas_kernels.chips import local_chip
from pallas_kernels.gpu import attend, decode_tiles, ragged_tiles, reachable
from pallas_kernels.gpu_blocks import estimate
from pallas_kernels.paged_attention import reference
from pallas_kernels.pages import Pages
from pallas_kernels.tuning import tuned


class _Places(NamedTuple):
    page_table: Any  # [Q * M]
    first_page: Any  # [1] or None


def paged_attention(q: jax.Array, k_pages: Pages, v_pages: Pages, page_table: jax.Array, query_starts: jax.Array,
                    kv_lengths: jax.Array, *, scale: float, window: int | None, soft_cap: float | None,
                    sinks: jax.Array | None, first_page: jax.Array | None, decode: bool,
                    interpret: bool = False) -> jax.Array:
    """See api.paged_attention; interpret runs it on any device."""
    if not reachable(k_pages, v_pages):
        options = {"scale": scale, "window": window, "soft_cap": soft_cap, "sinks": sinks, "first_page": first_page}
        if decode:
            return reference.decode_attention(q, k_pages, v_pages, page_table, kv_lengths, **options)
        return reference.chunk_attention(q, k_pages, v_pages, page_table, query_starts, kv_lengths, **options)
    tokens, heads, width = q.shape
    _, kv_heads, page_size, _ = k_pages.data.shape
    sequences, row_pages = page_table.shape
    formats = k_pages.data.dtype, v_pages.data.dtype
    key = f"{'decode' if decode else 'chunks'} {q.dtype} {formats[0]} {formats[1]}"
    key += f" N{heads} K{kv_heads} H{width} S{page_size}"
    blocks = estimate(local_chip(), tuned(__file__, key), tokens=tokens, sequences=sequences, decode=decode,
                      longest=row_pages * page_size, group=heads // kv_heads, kv_heads=kv_heads, head_dim=width,
                      dtype=q.dtype, formats=formats)
    tiles = decode_tiles(kv_lengths) if decode else ragged_tiles(query_starts, kv_lengths, tokens, blocks.queries)

    def address(places, sequence, kv_head):
        first = jnp.int32(0) if places.first_page is None else places.first_page[0]

        def find(position, held):
            entry = sequence * row_pages + jax.lax.div(position, page_size)
            page = first + triton.load(places.page_table.at[entry], mask=held, other=0)
            return (page * kv_heads + kv_head) * page_size + jax.lax.rem(position, page_size)

        return find

    places = _Places(page_table.reshape(-1), None if first_page is None else first_page.reshape(1))
    return attend(q, k_pages, v_pages, tiles, places, address, blocks=blocks, kv_heads=kv_heads, scale=scale,
                  window=window, soft_cap=soft_cap, sinks=sinks, name="paged_attention", interpret=interpret)
