"""Attention of tiles of queries over rows of keys and values on GPUs: what paged and flash attention share.

A Pallas kernel for the Triton backend, which its compiler parameters select: loads go through computed addresses, so
a page table costs nothing extra; what is not held is masked away in the load itself; and the compiler pipelines the
loop's loads through shared memory, so there are no barriers or asynchronous copies of our own to get wrong. JAX says
the backend will go in some later version; docs/decisions.md has why it is used all the same.
"""

import functools
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from pallas_kernels.gpu_blocks import Blocks
from pallas_kernels.options import MASKED, capped
from pallas_kernels.pages import Pages

# (refs of the places, sequence, kv head) -> (positions [C] int32, which of them are held [C] bool)
#   -> (rows of data [C] int32, rows of scales [C] int32)
Address = Callable[[Any, jax.Array, jax.Array], Callable[[jax.Array, jax.Array], tuple[jax.Array, jax.Array]]]


class Tiles(NamedTuple):
    """What each of W tiles holds, [W] int32 each: up to `Blocks.queries` consecutive queries of one sequence.

    sequence; begin: its first query's token; queries: how many, 0 for none; end: the position after its last query's.
    Tokens of no sequence are in tiles as well: their ends are not positive, so they see nothing. Where every sequence
    has one query (decode), tile i is sequence i and token i, and all but the ends are None.
    """

    sequence: jax.Array | None
    begin: jax.Array | None
    queries: jax.Array | None
    end: jax.Array


class _Inputs(NamedTuple):
    q: Any  # [T * N, H]
    k: Any  # Pages of [rows, H], scales [rows]
    v: Any  # None where the first lanes of k are the values
    tiles: Any  # Tiles
    places: Any  # arrays that `address` reads
    sinks: Any  # [N] or None


def ragged_tiles(starts: jax.Array, lengths: jax.Array, tokens: int, size: int) -> Tiles:
    """Tiles of up to `size` queries that cover T = tokens; starts: [Q + 1], lengths: [Q] positions held, int32."""
    sequences = lengths.shape[0]
    begins, ends = starts, jnp.append(starts[1:], tokens)
    counts = ends - begins
    lengths = jnp.append(lengths, 0)  # the padding
    tile_ends = jnp.cumsum((counts + size - 1) // size)
    tile = jnp.arange((tokens + (sequences + 1) * (size - 1)) // size, dtype=jnp.int32)
    row = jnp.minimum(jnp.sum(tile_ends <= tile[:, None], axis=1, dtype=jnp.int32), sequences)
    offset = (tile - (tile_ends - (counts + size - 1) // size)[row]) * size
    queries = jnp.where(tile < tile_ends[-1], jnp.clip(counts[row] - offset, 0, size), 0)
    end = lengths[row] - counts[row] + offset + queries
    return Tiles(jnp.minimum(row, sequences - 1), begins[row] + offset, queries, end)


def attend(q: jax.Array, k: Pages, v: Pages | None, tiles: Tiles, places: Any, address: Address, *, blocks: Blocks,
           kv_heads: int, scale: float, window: int | None, soft_cap: float | None, sinks: jax.Array | None,
           name: str, value_lanes: int | None = None, interpret: bool = False) -> jax.Array:
    """Softmax attention of every tile's queries over the positions they see.

    Args:
      q: [T, N, H]. k, v: data [.., H] and scales [..], seen as rows of one head and position each. v None: the first
        value_lanes of k.
      tiles: [W] each; every token is in one tile. address: finds a position's row, with `places`' arrays in hand.
      kv_heads: K. sinks: [N] float32 or None.

    Returns:
      [T, N, H or value_lanes] in q's dtype; zeros for tokens that see nothing.
    """
    tokens, heads, width = q.shape
    rows, out_width = tokens * heads, width if value_lanes is None else value_lanes
    inputs = _Inputs(q.reshape(rows, width), flat(k), None if v is None else flat(v), tiles, places, sinks)
    if blocks.splits == 1:
        outputs: Any = jax.ShapeDtypeStruct((rows, out_width), q.dtype)
    else:
        parts = jax.ShapeDtypeStruct((blocks.splits * rows,), jnp.float32)
        outputs = (parts, parts, jax.ShapeDtypeStruct((blocks.splits * rows, out_width), jnp.float32))
    kernel = functools.partial(
        _kernel, address=address, blocks=blocks, heads=heads, kv_heads=kv_heads, width=width, out_width=out_width,
        rows=rows, scale=scale, window=window, soft_cap=soft_cap)
    out = pl.pallas_call(
        kernel, out_shape=outputs, grid=(tiles.end.shape[0], kv_heads * blocks.parts, blocks.splits), name=name,
        interpret=interpret, compiler_params=triton.CompilerParams(num_warps=blocks.warps, num_stages=blocks.stages),
    )(inputs)
    if blocks.splits > 1:
        out = _merge(*(x.reshape(blocks.splits, rows, *x.shape[1:]) for x in out))
    return out.reshape(tokens, heads, out_width).astype(q.dtype)


def flat(pages: Pages) -> Pages:
    """Pages of any shape [.., H] as rows: data [R, H], scales [R]."""
    return Pages(pages.data.reshape(-1, pages.data.shape[-1]),
                 None if pages.scales is None else pages.scales.reshape(-1))


def supported(*pools: Pages, interpret: bool) -> bool:
    """Whether kernels can address these pools and convert their numbers; says so in a warning where not.

    The backend computes signed 32-bit offsets for arrays of up to 4 GiB and 64-bit ones above (jax 0.11.2 to 0.12.0),
    so that one-byte elements past the 2**31st would be read from before the array. It knows float8_e4m3fn from
    compute capability 8.9 on.
    """
    for data in (pool.data for pool in pools):
        if data.dtype.itemsize == 1 and 2**31 < data.size <= 2**32:
            reason = f"a {data.dtype} pool of {data.size} bytes lies between 2 and 4 GiB"
        elif (not interpret and data.dtype == jnp.float8_e4m3fn
              and triton.get_gpu_info().compute_capability < 89):
            reason = f"{data.dtype} needs compute capability 8.9"
        else:
            continue
        warnings.warn(f"{reason}: the slow reference runs instead of the GPU kernel", RuntimeWarning, stacklevel=2)
        return False
    return True


def _merge(top: jax.Array, total: jax.Array, acc: jax.Array) -> jax.Array:
    """Parts of softmaxes, top and total [splits, R], acc [splits, R, H] -> [R, H] (arXiv 2311.01282)."""
    weights = jnp.exp(top - top.max(0))
    total = (weights * total).sum(0)[:, None]
    return (weights[..., None] * acc).sum(0) / jnp.where(total == 0.0, 1.0, total)


def _kernel(refs: _Inputs, *outputs: Any, address: Address, blocks: Blocks, heads: int, kv_heads: int, width: int,
            out_width: int, rows: int, scale: float, window: int | None, soft_cap: float | None) -> None:
    """One program: a tile's queries, the heads (or a part) of one kv head folded into its rows, over one split's
    positions."""
    # The last tiles of a sequence see the most: started first, they do not run alone at the end.
    tile, kv_head, split = pl.num_programs(0) - 1 - pl.program_id(0), pl.program_id(1), pl.program_id(2)
    part = jnp.int32(0)
    if blocks.parts > 1:
        kv_head, part = jax.lax.div(kv_head, blocks.parts), jax.lax.rem(kv_head, blocks.parts)
    sequence, begin, queries = (tile, tile, 1) if refs.tiles.begin is None else (ref[tile] for ref in refs.tiles[:3])
    end = refs.tiles.end[tile]
    start = end - queries  # the first query's position
    group = heads // kv_heads
    index = jnp.arange(blocks.rows, dtype=jnp.int32)
    query, head = jax.lax.div(index, blocks.group), jax.lax.rem(index, blocks.group)
    head += part * blocks.group
    real = (query < queries) & (head < group)
    head = kv_head * group + head
    # Rows that are not real point past the end, so that no two rows share an address.
    row = jnp.where(real, (begin + query) * heads + head, rows)
    lane = jnp.arange(blocks.width, dtype=jnp.int32)

    def block_mask(mask: jax.Array) -> jax.Array:
        return mask[:, None] if out_width == blocks.width else mask[:, None] & (lane < out_width)

    rest = out_width + jnp.arange(blocks.rest, dtype=jnp.int32)

    def rest_mask(mask: jax.Array) -> jax.Array:
        return mask[:, None] & (rest < width)

    # Two products where keys are wider than values: together their lanes may be no power of two.
    areas = [(lane, block_mask)] + ([(rest, rest_mask)] if blocks.rest else [])
    q = [triton.load(refs.q.at[row[:, None], lanes[None]], mask=mask(real), other=0.0) for lanes, mask in areas]
    last = jnp.where(real, start + query, -1)
    end = jnp.where(queries > 0, end, 0)
    low = jnp.int32(0) if window is None else jnp.maximum(start - window + 1, 0)

    top = jnp.full((blocks.rows,), MASKED, jnp.float32)
    total = jnp.zeros((blocks.rows,), jnp.float32)
    if refs.sinks is not None:
        sink = triton.load(refs.sinks.at[jnp.where(real, head, 0)], mask=real, other=MASKED)
        top, total = jnp.where(split == 0, sink, top), jnp.where(real & (split == 0), 1.0, total)
    acc = jnp.zeros((blocks.rows, blocks.width), jnp.float32)
    find = address(refs.places, sequence, kv_head)

    def turn(index: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        position = low + index * blocks.positions + jnp.arange(blocks.positions, dtype=jnp.int32)
        held = position < end  # past it lie others' leftovers, NaN perhaps: they are read as zeros
        places = find(position, held)
        seen = position[None] <= last[:, None]
        if window is not None:
            seen &= position[None] > last[:, None] - window
        k = [_load(refs.k, places, lanes, held, mask, refs.q.dtype) for lanes, mask in areas]
        k_scales = _load_scales(refs.k, places, held)
        v, v_scales = k[0], k_scales
        if refs.v is not None:
            v = _load(refs.v, places, lane, held, block_mask, refs.q.dtype)
            v_scales = _load_scales(refs.v, places, held)
        return step(carry, q, k, v, k_scales, v_scales, seen, scale, soft_cap)

    turns = jax.lax.div(jnp.maximum(end - low, 0) + blocks.positions - 1, blocks.positions)
    share = jax.lax.div(turns + blocks.splits - 1, blocks.splits)
    first = split * share
    top, total, acc = jax.lax.fori_loop(first, jnp.minimum(first + share, turns), turn, (top, total, acc))

    if blocks.splits == 1:
        out = acc / jnp.where(total == 0.0, 1.0, total)[:, None]
        triton.store(outputs[0].at[row[:, None], lane[None]], out.astype(refs.q.dtype), mask=block_mask(real))
        return
    top_ref, total_ref, acc_ref = outputs
    row = jnp.where(real, split * rows + row, blocks.splits * rows)
    triton.store(top_ref.at[row], top, mask=real)
    triton.store(total_ref.at[row], total, mask=real)
    triton.store(acc_ref.at[row[:, None], lane[None]], acc, mask=block_mask(real))


def step(carry: tuple[jax.Array, ...], q: list[jax.Array], k: list[jax.Array], v: jax.Array, k_scales: jax.Array | None,
         v_scales: jax.Array | None, seen: jax.Array, scale: float, soft_cap: float | None) -> tuple[jax.Array, ...]:
    """One turn of the online softmax (arXiv 1805.02867): carry is top [R], total [R], acc [R, H], float32.

    q [R, ..] and k [C, ..]: some of the lanes each; v [C, H], all of one dtype; scales [C] float32 or None,
    seen [R, C].
    """
    top, total, acc = carry
    scores = functools.reduce(jnp.add, [_dot(a, b, transposed=True) for a, b in zip(q, k, strict=True)]) * scale
    if k_scales is not None:
        scores = scores * k_scales[None]
    scores = jnp.where(seen, capped(scores, soft_cap), MASKED)
    new_top = jnp.maximum(top, jnp.max(scores, axis=1))
    probs = jnp.where(seen, jnp.exp(scores - new_top[:, None]), 0.0)
    keep = jnp.exp(top - new_top)
    total = total * keep + jnp.sum(probs, axis=1)
    weights = probs if v_scales is None else jnp.where(seen, probs * v_scales[None], 0.0)
    return new_top, total, acc * keep[:, None] + _dot(weights.astype(v.dtype), v)


def _load(pages: Any, places: tuple[jax.Array, jax.Array], lane: jax.Array, held: jax.Array,
          block_mask: Callable[[jax.Array], jax.Array], dtype: jax.typing.DTypeLike) -> jax.Array:
    """Rows of keys or values [C, lanes] in `dtype`; zeros where not held."""
    rows, _ = places
    zero = np.zeros((), pages.data.dtype)[()]  # of the pool's own type: the backend casts no integer to float8
    data = triton.load(pages.data.at[rows[:, None], lane[None]], mask=block_mask(held), other=zero)
    return data.astype(dtype)


def _load_scales(pages: Any, places: tuple[jax.Array, jax.Array], held: jax.Array) -> jax.Array | None:
    """Scales [C] of rows of keys or values."""
    return None if pages.scales is None else triton.load(pages.scales.at[places[1]], mask=held, other=0.0)


def _dot(a: jax.Array, b: jax.Array, *, transposed: bool = False) -> jax.Array:
    """a @ b (or its transpose), float32; float32 operands in full precision."""
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return jax.lax.dot_general(a, b, (((1,), (1 if transposed else 0,)), ((), ())), precision=precision,
                               preferred_element_type=jnp.float32)
