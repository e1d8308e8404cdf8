"""kv_update for GPUs: a program a token puts its heads' vectors into their pages, in place, quantised on the way."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from pallas_kernels.gpu import flat, supported
from pallas_kernels.gpu_blocks import power_of_two
from pallas_kernels.kv_update import reference
from pallas_kernels.pages import LARGEST, Pages

PROGRAM_ELEMENTS = 4096  # most elements a program moves at a time


class _Inputs(NamedTuple):
    row: Any  # [T], of the page table; None where it is the token's own number
    held: Any  # [T], positions its sequence holds up to the token; none of padding
    page_table: Any  # [Q * M]
    first_page: Any  # [1] or None
    new: tuple[Any, ...]  # [T * K, H], of keys and perhaps values
    pools: tuple[Any, ...]  # Pages of [P * K * S, H], scales [P * K * S]; the outputs are these buffers


def kv_update(k_pages: Pages, v_pages: Pages | None, k: jax.Array, v: jax.Array | None, page_table: jax.Array,
              query_starts: jax.Array, kv_lengths: jax.Array, *, first_page: jax.Array | None, decode: bool,
              interpret: bool = False) -> tuple[Pages, Pages | None]:
    """See api.kv_update; padding goes to the null page; interpret runs it on any device."""
    pools, new = ((k_pages,), (k,)) if v_pages is None or v is None else ((k_pages, v_pages), (k, v))
    if not supported(*pools, interpret=interpret):
        return reference.kv_update(k_pages, v_pages, k, v, page_table, query_starts, kv_lengths, first_page=first_page,
                                   decode=decode)
    tokens, kv_heads, width = k.shape
    page_size = k_pages.data.shape[2]
    if decode:
        row, held = None, kv_lengths
    else:
        index = np.arange(tokens, dtype=np.int32)
        # A sum, since searchsorted is a loop of many launches.
        row = jnp.sum(query_starts[1:] <= index[:, None], axis=1, dtype=jnp.int32)
        row = jnp.minimum(row, kv_lengths.shape[0] - 1)
        held = jnp.where(index < query_starts[-1], kv_lengths[row] - query_starts[row + 1] + index + 1, 0)
    inputs = _Inputs(row, held, page_table.reshape(-1), None if first_page is None else first_page.reshape(1),
                     tuple(x.reshape(-1, width) for x in new), tuple(map(flat, pools)))
    lanes = power_of_two(width)
    heads = min(power_of_two(kv_heads), max(1, PROGRAM_ELEMENTS // lanes))
    before = len(jax.tree.leaves(inputs[:-1]))
    kernel = functools.partial(
        _kernel, kv_heads=kv_heads, row_pages=page_table.shape[1], page_size=page_size, heads=heads, lanes=lanes,
        scale_size=next((p.scales.shape[2] for p in pools if p.scales is not None), page_size))
    out = pl.pallas_call(
        kernel, out_shape=jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), inputs.pools),
        grid=(tokens, pl.cdiv(kv_heads, heads)),
        input_output_aliases={before + i: i for i in range(len(jax.tree.leaves(pools)))},
        compiler_params=triton.CompilerParams(num_warps=4, num_stages=1), name="kv_update", interpret=interpret,
    )(inputs)
    k_out, *v_out = jax.tree.map(lambda x, old: x.reshape(old.shape), out, pools)
    return k_out, v_out[0] if v_out else None


def _kernel(refs: _Inputs, *pools: Any, kv_heads: int, row_pages: int, page_size: int, scale_size: int, heads: int,
            lanes: int) -> None:
    token = pl.program_id(0)
    held = refs.held[token]
    position = jnp.maximum(held - 1, 0)
    row = token if refs.row is None else refs.row[token]
    page = refs.page_table[row * row_pages + jax.lax.div(position, page_size)]
    page, offset = jnp.where(held > 0, page, 0), jax.lax.rem(position, page_size)
    if refs.first_page is not None:
        page += refs.first_page[0]
    head = pl.program_id(1) * heads + jnp.arange(heads, dtype=jnp.int32)
    real = head < kv_heads
    source = jnp.where(real, token * kv_heads + head, 0)
    block = page * kv_heads + head
    lane = jnp.arange(lanes, dtype=jnp.int32)
    for new, pool in zip(refs.new, pools, strict=True):
        rows, width = pool.data.shape
        mask = real[:, None] & (lane < width)
        data = triton.load(new.at[source[:, None], lane[None]], mask=mask, other=0.0)
        # What is not real points past the end, so that no two vectors share an address.
        to = jnp.where(real, block * page_size + offset, rows)
        if pool.scales is not None:
            data, scales = _quantize(data.astype(jnp.float32), pool.data.dtype)
            scale_to = jnp.where(real, block * scale_size + offset, pool.scales.shape[0])
            triton.store(pool.scales.at[scale_to], scales, mask=real)
        triton.store(pool.data.at[to[:, None], lane[None]], data.astype(pool.data.dtype), mask=mask)


def _quantize(x: jax.Array, dtype: jax.typing.DTypeLike) -> tuple[jax.Array, jax.Array]:
    """`pages.quantize` in what the backend has: x [K, H] float32 -> (to be converted [K, H], scales [K])."""
    scales = jnp.max(jnp.abs(x), axis=1) / LARGEST[jnp.dtype(dtype).name]
    # The backend's maximum passes over NaN, and no integer is one: the scale has to tell.
    broken = jnp.max(jnp.where(x == x, 0.0, 1.0), axis=1) > 0
    scaled = x * jnp.where(scales > 0, 1.0 / scales, 0.0)[:, None]
    if jnp.dtype(dtype) == jnp.int8:
        scaled = _round(scaled)
    return scaled, jnp.where(broken, jnp.nan, scales)


def _round(x: jax.Array) -> jax.Array:
    """To the nearest integer, halves to the even one (adding and taking away 1.5 * 2**23 may be optimised away)."""
    up = jnp.floor(x + 0.5)
    odd = up - 2.0 * jnp.floor(up * 0.5) == 1.0
    return jnp.where((up - x > 0.5) | ((up - x == 0.5) & odd), up - 1.0, up)
