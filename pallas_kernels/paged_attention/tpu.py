"""paged_attention for TPUs: the layout of its arguments and the call; walk.py has the kernel."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.chips import local_chip
from pallas_kernels.paged_attention.blocks import Sizes, choose
from pallas_kernels.paged_attention.tiles import Walk, chunk_tiles, decode_tiles
from pallas_kernels.paged_attention.walk import Options, walk_blocks
from pallas_kernels.pages import Pages, check_tiling
from pallas_kernels.tiling import LANES, up
from pallas_kernels.tuning import tuned

LOG2E = float(np.log2(np.e))


def paged_attention(q, k_pages: Pages, v_pages: Pages | None, page_table, query_starts, kv_lengths, *, scale, window,
                    soft_cap, sinks, first_page, decode, value_lanes=None, interpret: Any = False):
    """See api.paged_attention; without v_pages the result may have more lanes than value_lanes.

    Args:
      interpret: True or pltpu.InterpretParams to run on a CPU.

    Raises:
      ValueError: pools that do not lie in whole tiles, a page table that does not fit the scalar memory.
    """
    tokens, heads, width = q.shape
    check_tiling("k_pages", k_pages)
    if v_pages is not None:
        check_tiling("v_pages", v_pages)
    chip = local_chip()
    entries = page_table.size + (0 if decode else 7 * tokens // 16) + 8 * page_table.shape[0]
    if 4 * entries > chip.smem * 7 // 8:
        raise ValueError(f"page_table: {page_table.shape} entries do not fit the {chip.smem} bytes of scalar memory; "
                         "fewer rows or larger pages do")
    s, compute = _sizes(q, k_pages, v_pages, value_lanes, page_table.shape, chip, decode)
    walk = Walk(s.page_size, s.pages, s.splits, window)
    # Scores in base 2, whose exponential the chip has; those that are capped, in caps.
    unit = scale * LOG2E if soft_cap is None else scale / soft_cap
    dtype, q = q.dtype, q.astype(jnp.float32) * unit
    if decode:
        tiles = decode_tiles(kv_lengths, walk)
        real = kv_lengths > 0
        rows = q.reshape(tokens, s.groups, -1, width)
        rows = jnp.pad(rows, ((0, 0), (0, 0), (0, s.group - rows.shape[2]), (0, 0)))  # [T, groups, G, H]
    else:
        tiles = chunk_tiles(query_starts, kv_lengths, tokens, s.queries, walk)
        real = jnp.arange(tokens, dtype=jnp.int32) < query_starts[-1]
        rows = jnp.pad(q, ((0, -tokens % s.queries), (0, 0), (0, 0))).reshape(-1, s.groups, s.group, width)
        rows = rows.transpose(1, 2, 0, 3)  # [groups, G, T, H]
    if sinks is not None:
        sinks = sinks.reshape(s.groups, -1) * LOG2E
        sinks = (jnp.pad(sinks, ((0, 0), (0, s.rows - sinks.shape[1]))) if decode
                 else jnp.repeat(sinks, s.queries, axis=1))
        sinks = jnp.broadcast_to(sinks[..., None], (s.groups, s.rows, LANES))
    first_page = jnp.zeros(1, jnp.int32) if first_page is None else first_page.reshape(1)
    options = Options(window, None if soft_cap is None else soft_cap * LOG2E, compute, page_table.shape[1])
    scalars = (*tiles, page_table.reshape(-1), first_page)
    out = _call(s, options, chip.vmem * 9 // 10, scalars, rows.astype(compute), sinks,
                k_pages, v_pages, interpret)
    out = out[:, :, : heads // s.groups] if decode else out.transpose(2, 0, 1, 3)[:tokens]
    # What no tile wrote is uninitialised.
    return jnp.where(real[:, None, None], out.reshape(tokens, heads, s.value_dim), 0).astype(dtype)


def _sizes(q, k_pages: Pages, v_pages: Pages | None, value_lanes: int | None, table: tuple[int, int], chip,
           decode: bool) -> tuple[Sizes, Any]:
    """Block sizes, and the dtype of the products."""
    tokens, heads, width = q.shape
    _, kv_heads, page_size, _ = k_pages.data.shape
    dtypes = q.dtype, k_pages.data.dtype, *(() if v_pages is None else (v_pages.data.dtype,))
    exact = any(x in (jnp.float32, jnp.float16) for x in dtypes)
    compute = jnp.dtype(jnp.float32 if exact else jnp.bfloat16)
    key = (f"{'decode' if decode else 'chunk'} {' '.join(map(str, dtypes))} heads={heads}/{kv_heads} "
           f"head_dim={width} page={page_size}" + ("" if value_lanes is None else f" values={value_lanes}"))
    sizes = choose(
        heads=heads, kv_heads=kv_heads, head_dim=width, page_size=page_size, table_width=table[1],
        value_dim=width if value_lanes is None else up(value_lanes, LANES),
        chunk=None if decode else (tokens, table[0]), chip=chip, tuned=tuned(__file__, key),
        bytes_each=(compute.itemsize, dtypes[1].itemsize, 0 if v_pages is None else v_pages.data.dtype.itemsize))
    return sizes, compute


def _call(s: Sizes, options: Options, vmem_limit: int, scalars, q, sinks, k_pages: Pages,
          v_pages: Pages | None, interpret):
    """q in the kernel's layout -> the results in the same, normalised."""
    dtype = q.dtype if s.splits == 1 else jnp.float32
    state = (s.groups, s.rows, LANES)
    scratch: dict[str, Any] = {
        "q": pltpu.VMEM((s.depth, *s.tile, s.head_dim), q.dtype),
        "out": pltpu.VMEM((2, *s.tile, s.value_dim), dtype),
        "top": pltpu.VMEM(state, jnp.float32),
        "total": pltpu.VMEM(state, jnp.float32),
        "acc": pltpu.VMEM((s.groups, s.rows, s.value_dim), jnp.float32),
        "fetched": pltpu.SemaphoreType.DMA((2, s.depth)),
        "written": pltpu.SemaphoreType.DMA((2,)),
    }
    outputs = {"out": jax.ShapeDtypeStruct((s.splits, *q.shape[:-1], s.value_dim), dtype)}
    if s.splits > 1:
        scratch["log"] = pltpu.VMEM((2, *s.tile, LANES), jnp.float32)
        outputs["log"] = jax.ShapeDtypeStruct((s.splits, *q.shape[:-1], LANES), jnp.float32)
    kinds = {"k": k_pages.data, "k_scales": k_pages.scales}
    if v_pages is not None:
        kinds |= {"v": v_pages.data, "v_scales": v_pages.scales}
    pools = {name: pool for name, pool in kinds.items() if pool is not None}
    for name, pool in pools.items():
        scratch[name] = pltpu.VMEM((s.depth, s.pages, *pool.shape[1:]), pool.dtype)
    anywhere, whole = pl.BlockSpec(memory_space=pl.ANY), pl.BlockSpec(memory_space=pltpu.VMEM)
    result = pl.pallas_call(
        functools.partial(walk_blocks, s, options),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars), grid=(s.splits,),
            in_specs=[anywhere, None if sinks is None else whole, dict.fromkeys(pools, anywhere)],
            out_specs=dict.fromkeys(outputs, anywhere), scratch_shapes=[scratch]),
        out_shape=outputs, interpret=interpret, name="paged_decode" if s.decode else "paged_chunks",
        # Page numbers are the host's, checked where they are handed out; a check of each fetch costs more than it.
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",), vmem_limit_bytes=vmem_limit,
                                             disable_bounds_checks=True),
    )(*scalars, q, sinks, pools)
    if s.splits == 1:
        return result["out"][0]
    weights = jnp.exp2(result["log"][..., :1] - result["log"][..., :1].max(0))
    return jnp.sum(result["out"] * weights, axis=0) / jnp.sum(weights, axis=0)
