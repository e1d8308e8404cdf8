"""kv_update for GPUs: a program a token copies its heads' vectors into their pages, in place."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from pallas_kernels.gpu import flat, reachable
from pallas_kernels.gpu_blocks import power_of_two
from pallas_kernels.kv_update import reference
from pallas_kernels.pages import Pages, quantize

PROGRAM_ELEMENTS = 4096  # most elements a program moves at a time


class _Inputs(NamedTuple):
    page: Any  # [T]
    offset: Any  # [T]
    new: tuple[Any, Any]  # Pages of [T * K, H], scales [T * K]
    pools: tuple[Any, Any]  # Pages of [P * K * S, H], scales [P * K * S]; the outputs are these buffers


def kv_update(k_pages: Pages, v_pages: Pages, k: jax.Array, v: jax.Array, page_table: jax.Array,
              query_starts: jax.Array, kv_lengths: jax.Array, *, first_page: jax.Array | None, decode: bool,
              interpret: bool = False) -> tuple[Pages, Pages]:
    """See api.kv_update; padding goes to the null page; interpret runs it on any device."""
    if not reachable(k_pages, v_pages):
        return reference.kv_update(k_pages, v_pages, k, v, page_table, query_starts, kv_lengths,
                                   first_page=first_page, decode=decode)
    tokens, kv_heads, width = k.shape
    page_size = k_pages.data.shape[2]
    page, offset = reference.places(page_table, query_starts, kv_lengths, tokens, page_size, decode=decode)
    if first_page is not None:
        page = page + first_page
    pools = k_pages, v_pages
    # Quantised by XLA, which fuses it with whatever made the vectors: one arithmetic on every platform.
    new = [Pages(*quantize(x, pool.data.dtype)) for x, pool in zip((k, v), pools, strict=True)]
    inputs = _Inputs(page, offset, (flat(new[0]), flat(new[1])), (flat(k_pages), flat(v_pages)))
    lanes = power_of_two(width)
    heads = min(power_of_two(kv_heads), max(1, PROGRAM_ELEMENTS // lanes))
    before = len(jax.tree.leaves(inputs[:-1]))
    out = pl.pallas_call(
        functools.partial(_kernel, kv_heads=kv_heads, page_size=page_size, heads=heads, lanes=lanes),
        out_shape=jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), inputs.pools),
        grid=(tokens, pl.cdiv(kv_heads, heads)),
        input_output_aliases={before + i: i for i in range(len(jax.tree.leaves(pools)))},
        compiler_params=triton.CompilerParams(num_warps=4, num_stages=1), name="kv_update", interpret=interpret,
    )(inputs)
    k_out, v_out = jax.tree.map(lambda x, old: x.reshape(old.shape), out, pools)
    return k_out, v_out


def _kernel(refs: _Inputs, *pools: Any, kv_heads: int, page_size: int, heads: int, lanes: int) -> None:
    token = pl.program_id(0)
    head = pl.program_id(1) * heads + jnp.arange(heads, dtype=jnp.int32)
    real = head < kv_heads
    source = jnp.where(real, token * kv_heads + head, 0)
    target = (refs.page[token] * kv_heads + head) * page_size + refs.offset[token]
    for new, pool in zip(refs.new, pools, strict=True):
        rows, width = pool.data.shape
        # What is not real points past the end, so that no two vectors share an address.
        to = jnp.where(real, target, rows)
        lane = jnp.arange(lanes, dtype=jnp.int32)
        mask = real[:, None] & (lane < width)
        vectors = triton.load(new.data.at[source[:, None], lane[None]], mask=mask)
        triton.store(pool.data.at[to[:, None], lane[None]], vectors, mask=mask)
        if pool.scales is not None:
            triton.store(pool.scales.at[to], triton.load(new.scales.at[source], mask=real), mask=real)
