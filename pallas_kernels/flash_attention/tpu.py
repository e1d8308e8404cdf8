"""flash_attention for TPUs: scores are kept transposed, a list of what is visible is the grid.

Keys lie on sublanes and queries on lanes: maxima and sums over keys are then plain vector operations, a query's
maximum is a row that broadcasts for nothing, and the second product keeps a 256-wide matrix unit full where
head_dim is 128. Online softmax after arXiv 2205.14135 and 2307.08691, in base 2.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.chips import local_chip
from pallas_kernels.flash_attention.reference import first_visible
from pallas_kernels.options import MASKED
from pallas_kernels.tuning import tuned

LANES = 128
LOG2E = math.log2(math.e)
# Where a maximum starts: far below any score, and so far above MASKED that exp2(MASKED - LOWEST) is 0: a masked
# probability is 0 without a second mask, also for queries that have seen nothing yet.
LOWEST = 0.5 * MASKED
# A step of the grid, as one int32: tile << 17 | block << 3 | FIRST | LAST | WHOLE.
FIRST, LAST, WHOLE = 1, 2, 4
BLOCK_BITS = 14


@dataclasses.dataclass(frozen=True, slots=True)
class Blocks:
    """How the work is cut.

    Attributes:
      heads: query heads of a kv head that share a step, a divisor of N // K.
      queries: tokens a tile; a tile has heads * queries rows. keys: kv tokens a step.
      rows, chunk: a step's scores exist in pieces of [chunk, rows].
    """

    heads: int
    queries: int
    keys: int
    rows: int
    chunk: int

    def vmem(self, width: int, itemsize: int) -> int:
        """Bytes, windows twice (the pipeline's two buffers) and some pieces of scores."""
        rows = self.heads * self.queries
        windows = 2 * itemsize * (2 * width * rows + width * self.keys + _up(width, LANES) * self.keys)
        windows += 2 * 4 * 8 * 2 * rows  # bounds and sinks
        # What the compiler keeps of the pieces in flight; float32 ones also split in three.
        pieces = (4 if itemsize == 2 else 10) * 4 * min(self.rows, rows) * min(self.chunk, self.keys)
        return windows + 4 * rows * (width + 2 * 8) + pieces


def blocks_for(tokens: int, group: int, kv_heads: int, width: int, itemsize: int, window: int | None) -> Blocks:
    """Blocks that fit the local chip: 1024 rows and 1024 keys a step, or as near to it as memory and T allow.

    Args:
      tokens: T. group: N // K. kv_heads: K. width: H. itemsize: bytes of an element.

    Raises:
      ValueError: the list of steps of so many tokens fits in no chip's scalar memory.
    """
    chip = local_chip()
    longest = max(LANES, 1 << (tokens - 1).bit_length())
    sizes = [size for size in (128, 256, 512, 1024, 2048, 4096) if size <= longest]
    best = tuned(__file__, f"{group} {width} {8 * itemsize}")
    if best and best["queries"] <= longest and best["keys"] <= longest:
        return Blocks(**best)
    # A device of two TensorCores splits the heads.
    shared = [heads for heads in range(1, group + 1)
              if group % heads == 0 and (heads == 1 or kv_heads * group // heads >= chip.cores)]
    piece = 512 if itemsize == 2 else 256
    fitting = [blocks for blocks in (Blocks(heads, queries, keys, piece, piece)
                                     for heads in shared for queries in sizes for keys in sizes)
               if blocks.vmem(width, itemsize) <= chip.vmem // 2
               and 4 * steps_at_most(tokens, blocks, window) <= chip.smem // 2]
    if not fitting:
        raise ValueError(f"flash_attention cannot plan {tokens} tokens of head_dim {width} on this chip")
    return max(fitting, key=lambda blocks: (min(blocks.heads * blocks.queries, 1024) * min(blocks.keys, 1024),
                                            blocks.heads, -blocks.vmem(width, itemsize)))


def steps_at_most(tokens: int, blocks: Blocks, window: int | None) -> int:
    """Length of the list of steps of the worst packing: one sequence."""
    padded = _up(tokens, max(blocks.queries, blocks.keys))
    ends = [(end - 1) // blocks.keys + 1 for end in range(blocks.queries, padded + 1, blocks.queries)]
    if window is not None:
        most = (window + blocks.queries - 2) // blocks.keys + 2
        ends = [min(end, most) for end in ends]
    return sum(ends)


def flash_attention(q: jax.Array, k: jax.Array, v: jax.Array, starts: jax.Array, *, scale: float,
                    window: int | None, soft_cap: float | None, sinks: jax.Array | None, blocks: Blocks | None = None,
                    interpret: Any = False) -> jax.Array:
    """See api.flash_attention.

    Args:
      blocks: the sizes to use in place of those of the estimate. interpret: as in `pallas_call`.
    """
    tokens, heads, width = q.shape
    kv_heads = k.shape[1]
    dtype = q.dtype
    if dtype == jnp.float16:  # no such type in a TPU's vector units
        q, k, v = (x.astype(jnp.float32) for x in (q, k, v))
    if blocks is None:
        blocks = blocks_for(tokens, heads // kv_heads, kv_heads, width, q.dtype.itemsize, window)
    parts, share = heads // blocks.heads, heads // kv_heads // blocks.heads
    padded = _up(tokens, max(blocks.queries, blocks.keys))
    tiles, rows = padded // blocks.queries, blocks.heads * blocks.queries

    used = starts[-1]
    first = jnp.minimum(first_visible(starts, padded, window), jnp.arange(padded, dtype=jnp.int32))
    first = jnp.where(jnp.arange(padded) < used, first, jnp.arange(padded, dtype=jnp.int32))
    work, low, high, steps = _steps(first, used, blocks, steps_at_most(tokens, blocks, window))
    bounds = jnp.stack([first, jnp.arange(padded, dtype=jnp.int32)]).reshape(2, tiles, 1, blocks.queries)
    bounds = jnp.broadcast_to(bounds, (2, tiles, blocks.heads, blocks.queries)).transpose(1, 0, 2, 3)
    bounds = bounds.reshape(tiles, 2, rows)

    # The scale is put on q, which has the fewest elements: the scores come out of the product in the softmax's base.
    factor = scale * LOG2E if soft_cap is None else scale / soft_cap
    q = (q.astype(jnp.float32) * factor).astype(q.dtype)
    q, k, v = (jnp.pad(x, ((0, padded - tokens), (0, 0), (0, 0))) for x in (q, k, v))
    q = q.reshape(tiles, blocks.queries, parts, blocks.heads, width).transpose(2, 0, 4, 3, 1)
    q = q.reshape(parts, tiles, width, rows)
    v = jnp.where((jnp.arange(padded) < used)[:, None, None], v, 0)  # 0 * NaN is NaN

    def tile(part: Any, step: Any, work: Any, *_: Any) -> tuple[Any, ...]:
        return part, work[step] >> (BLOCK_BITS + 3), 0, 0

    def block(step: Any, work: Any) -> Any:
        return (work[step] >> 3) & (2**BLOCK_BITS - 1)

    operands = [q, k.transpose(1, 0, 2), v.transpose(1, 2, 0), bounds]
    in_specs = [
        pl.BlockSpec((None, None, width, rows), tile),
        pl.BlockSpec((None, blocks.keys, width), lambda part, step, work, *_: (part // share, block(step, work), 0)),
        pl.BlockSpec((None, width, blocks.keys), lambda part, step, work, *_: (part // share, 0, block(step, work))),
        pl.BlockSpec((None, 2, rows), lambda part, step, work, *_: (work[step] >> (BLOCK_BITS + 3), 0, 0)),
    ]
    if sinks is not None:
        operands.append(jnp.repeat(sinks * LOG2E, blocks.queries).reshape(parts, 1, rows))
        in_specs.append(pl.BlockSpec((None, 1, rows), lambda part, *_: (part, 0, 0)))
    cap = None if soft_cap is None else soft_cap * LOG2E
    out = pl.pallas_call(
        functools.partial(_kernel, blocks=blocks, cap=cap, has_sinks=sinks is not None),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3, grid=(parts, steps), in_specs=in_specs,
            out_specs=pl.BlockSpec((None, None, width, rows), tile),
            scratch_shapes=[pltpu.VMEM((1, rows), jnp.float32), pltpu.VMEM((1, rows), jnp.float32),
                            pltpu.VMEM((width, rows), jnp.float32)]),
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=local_chip().vmem * 3 // 4),
        interpret=interpret, name="flash_attention",
    )(work, low, high, *operands)
    out = out.reshape(parts, tiles, width, blocks.heads, blocks.queries).transpose(1, 4, 0, 3, 2)
    return out.reshape(padded, heads, width)[:tokens].astype(dtype)


def _steps(first: jax.Array, used: jax.Array, blocks: Blocks,
           most: int) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """The pairs of a tile of queries and a block of keys that see each other.

    Args:
      first: [T] int32, the first token each sees. used: int32, tokens that are no padding. most: of steps.

    Returns:
      work [most] int32, steps as FIRST says; low, high [tiles] int32, the tokens a tile sees, high excluded;
      int32, how many of `most` there are. A tile of padding has one step and sees nothing.
    """
    begin = jnp.arange(0, first.shape[0], blocks.queries, dtype=jnp.int32)
    end = begin + blocks.queries
    low, high = first[::blocks.queries], jnp.minimum(end, jnp.maximum(used, begin))
    first_block = low // blocks.keys
    last_block = jnp.maximum(high - 1, low) // blocks.keys
    ends = jnp.cumsum(last_block - first_block + 1, dtype=jnp.int32)
    step = jnp.arange(most, dtype=jnp.int32)
    tile = jnp.minimum(jnp.searchsorted(ends, step, side="right").astype(jnp.int32), begin.shape[0] - 1)
    block = jnp.minimum(last_block[tile] - (ends[tile] - 1 - step), last_block[tile])
    whole = (block * blocks.keys >= first[blocks.queries - 1::blocks.queries][tile]) & (
        (block + 1) * blocks.keys - 1 <= begin[tile])
    flags = ((block == first_block[tile]) * FIRST + (block == last_block[tile]) * LAST + whole * WHOLE)
    return (tile << (BLOCK_BITS + 3) | block << 3 | flags).astype(jnp.int32), low, high, ends[-1]


def _kernel(work: Any, low: Any, high: Any, q: Any, k: Any, v: Any, bounds: Any, *rest: Any, blocks: Blocks,
            cap: float | None, has_sinks: bool) -> None:
    """One step: q [H, R], k [C, H], v [H, C], bounds [2, R], sinks [1, R]; out [H, R].

    Scratch: top, total [1, R], acc [H, R]: the softmax's maximum and sum so far, and the values' sum.
    """
    sinks, (out, top, total, acc) = (rest[0], rest[1:]) if has_sinks else (None, rest)
    item = work[pl.program_id(1)]
    tile, base = item >> (BLOCK_BITS + 3), ((item >> 3) & (2**BLOCK_BITS - 1)) * blocks.keys

    @pl.when(item & FIRST != 0)
    def _() -> None:
        top[...] = jnp.full_like(top, LOWEST) if sinks is None else jnp.maximum(sinks[...], LOWEST)
        total[...] = jnp.zeros_like(total) if sinks is None else jnp.exp2(sinks[...] - top[...])
        acc[...] = jnp.zeros_like(acc)

    def attend(keys: range, masked: bool) -> None:
        _attend(q, k, v, bounds, top, total, acc, keys=keys, base=base if masked else None, blocks=blocks, cap=cap)

    @pl.when(item & WHOLE != 0)
    def _() -> None:
        attend(range(blocks.keys), masked=False)

    @pl.when(item & WHOLE == 0)
    def _() -> None:
        for start in range(0, blocks.keys, blocks.chunk):
            stop = min(start + blocks.chunk, blocks.keys)

            @pl.when((base + start < high[tile]) & (base + stop > low[tile]))
            def _(start: int = start, stop: int = stop) -> None:
                attend(range(start, stop), masked=True)

    @pl.when(item & LAST != 0)
    def _() -> None:
        out[...] = (acc[...] / jnp.where(total[...] == 0.0, 1.0, total[...])).astype(out.dtype)


def _attend(q: Any, k: Any, v: Any, bounds: Any, top: Any, total: Any, acc: Any, *, keys: range, base: Any,
            blocks: Blocks, cap: float | None) -> None:
    """Adds what the tile sees of `keys` of the block.

    Pieces are independent but for their running maxima. A piece's first product is written before the softmax of the
    piece before it, and its second product after the softmax of the piece after it: so the compiler has work for the
    matrix units while the vector units are busy, which it would not find for itself.
    """
    rows = q.shape[1]
    pieces = [(slice(c, min(c + blocks.chunk, keys.stop)), slice(r, min(r + blocks.rows, rows)))
              for c in range(keys.start, keys.stop, blocks.chunk) for r in range(0, rows, blocks.rows)]
    # float32 products in full; bfloat16 ones are exact as they are.
    dot = functools.partial(
        jnp.dot, preferred_element_type=jnp.float32,
        precision=jax.lax.Precision.HIGHEST if q.dtype == jnp.float32 else jax.lax.Precision.DEFAULT)

    def scores(c: slice, r: slice) -> jax.Array:
        return dot(k[c], q[:, r])

    def accumulate(c: slice, r: slice, fade: jax.Array, probs: jax.Array) -> None:
        acc[:, r] = acc[:, r] * fade + dot(v[:, c], probs)

    following, waiting = scores(*pieces[0]), None
    for i, (c, r) in enumerate(pieces):
        s = following
        if i + 1 < len(pieces):
            following = scores(*pieces[i + 1])
        if cap is not None:
            s = jnp.tanh(s) * cap
        if base is not None:
            key = jax.lax.broadcasted_iota(jnp.int32, s.shape, 0)
            seen = (key >= bounds[0:1, r] - (base + c.start)) & (key <= bounds[1:2, r] - (base + c.start))
            s = jnp.where(seen, s, MASKED)
        before = top[:, r]
        now = jnp.maximum(before, s.max(0, keepdims=True))
        probs, fade = jnp.exp2(s - now), jnp.exp2(before - now)
        top[:, r] = now
        total[:, r] = total[:, r] * fade + probs.sum(0, keepdims=True)
        if waiting is not None:
            accumulate(*waiting)
        waiting = c, r, fade, probs.astype(v.dtype)
    if waiting is not None:
        accumulate(*waiting)


def _up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
