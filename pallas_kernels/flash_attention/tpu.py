"""flash_attention for TPUs: the grid is a list of what is visible, and a step works on two of its entries.

A step takes the softmax and the second product of a pair of query tile and key block, and the first product of the
pair after it: the matrix units have work while the vector units are busy, which the compiler finds inside a step
only.

Scores are kept transposed, keys on sublanes and queries on lanes: maxima and sums over keys are plain vector
operations, a query's maximum is a row that broadcasts for nothing, and the second product fills a 256-wide matrix
unit also where head_dim is 128. Queries and results are turned in here, once a tile: outside they are heads first,
[N, T, H], a layout in which XLA can make queries and use results without copies. Online softmax after arXiv
2205.14135 and 2307.08691, in base 2.
"""

import dataclasses
import functools
import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.chips import local_chip
from pallas_kernels.flash_attention.reference import first_visible
from pallas_kernels.options import MASKED
from pallas_kernels.tiling import LANES, up
from pallas_kernels.tuning import tuned

PIECE = 512  # rows whose probabilities exist at a time
LARGEST = 2**20  # scores a step: four times as many need 5% fewer cycles and three times as long to compile
LOG2E = math.log2(math.e)
# Where a maximum starts: far below any score, and so far above MASKED that exp2(MASKED - LOWEST) is 0: a masked
# probability is 0 without a second mask, also for queries that have seen nothing yet.
LOWEST = 0.5 * MASKED
# A pair as one int32: tile << 17 | block << 3 | FIRST | LAST | WHOLE: of its tile, and whether all of it is visible.
FIRST, LAST, WHOLE = 1, 2, 4
TILE_SHIFT, BLOCK_SHIFT, BLOCK_MASK = 17, 3, 2**14 - 1


@dataclasses.dataclass(frozen=True, slots=True)
class Blocks:
    """How the work is cut: pairs of a tile of queries and a block of keys.

    Attributes:
      heads: query heads of a kv head that share a tile, a divisor of N // K.
      queries: tokens of a tile, a multiple of 128; a tile has heads * queries rows.
      keys: kv tokens of a block, a multiple of 128.
    """

    heads: int
    queries: int
    keys: int

    @property
    def rows(self) -> int:
        return self.heads * self.queries

    def vmem(self, width: int, itemsize: int) -> int:
        """Bytes: windows twice (the pipeline has two buffers), scratch, and what the compiler keeps of a piece."""
        windows = itemsize * (up(width, LANES) * (2 * self.rows + self.keys) + width * self.keys)
        windows += 4 * 8 * (self.rows + self.queries)  # sinks and bounds
        scratch = 4 * self.rows * (self.keys + width + 3 * 8) + itemsize * self.rows * width
        pieces = (4 if itemsize == 2 else 8) * 4 * min(PIECE, self.rows) * self.keys
        if itemsize == 4:  # operands split into three bfloat16 ones
            pieces += 6 * width * (self.rows + 2 * self.keys)
        return 2 * windows + scratch + pieces

    def cycles(self, pairs: int, width: int, itemsize: int) -> float:
        """Of `pairs` steps, roughly: the compiler's schedules for v6e, or the time to fetch keys and values."""
        score = 1.5e-3 if itemsize == 2 else 1e-2  # a float32 product is six of bfloat16
        compute = 280 + self.rows * (score * self.keys + 5e-4 * width)
        fetch = 2 * self.keys * width * itemsize / (local_chip().bandwidth / 1.6e9)
        return pairs * max(compute, fetch)


def blocks_for(tokens: int, group: int, kv_heads: int, width: int, itemsize: int, window: int | None) -> Blocks:
    """The blocks that promise the fewest cycles for one sequence, among those that fit the local chip.

    Args:
      tokens: T. group: N // K. kv_heads: K. width: H. itemsize: bytes of an element.

    Raises:
      ValueError: the list of pairs of so many tokens does not fit the chip's scalar memory.
    """
    chip = local_chip()
    longest = max(LANES, 1 << (tokens - 1).bit_length())
    sizes = [size for size in (128, 256, 512, 1024, 2048) if size <= longest]
    # A device of two TensorCores splits the heads.
    shared = [heads for heads in range(1, group + 1)
              if group % heads == 0 and (heads == 1 or kv_heads * group // heads >= chip.cores)]
    fitting = [blocks for blocks in (Blocks(*sizes) for sizes in itertools.product(shared, sizes, sizes))
               if blocks.rows * blocks.keys <= LARGEST and blocks.vmem(width, itemsize) <= chip.vmem // 2
               and 4 * pairs_at_most(tokens, blocks, window) <= chip.smem * 3 // 4]
    entry = tuned(__file__, f"{tokens} {group} {width} {8 * itemsize}")
    if entry and Blocks(**entry) in fitting:
        return Blocks(**entry)
    if not fitting:
        raise ValueError(f"flash_attention cannot plan {tokens} tokens of head_dim {width} on this chip")
    return min(fitting, key=lambda blocks: group // blocks.heads * blocks.cycles(
        1 + pairs_at_most(tokens, blocks, window), width, itemsize))


def pairs_at_most(tokens: int, blocks: Blocks, window: int | None) -> int:
    """How many pairs the worst packing has: one sequence."""
    tiles = up(tokens, blocks.queries) // blocks.queries
    ends = [up((tile + 1) * blocks.queries, blocks.keys) // blocks.keys for tile in range(tiles)]
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
    if dtype == jnp.float16:  # no type of a TPU's vector units
        q, k, v = (x.astype(jnp.float32) for x in (q, k, v))
    if blocks is None:
        blocks = blocks_for(tokens, heads // kv_heads, kv_heads, width, q.dtype.itemsize, window)
    parts, share = heads // blocks.heads, heads // kv_heads // blocks.heads
    padded = up(tokens, max(blocks.queries, blocks.keys))
    tiles, rows = padded // blocks.queries, blocks.rows

    first = first_visible(starts, padded, window)
    pairs, count = _pairs(first, starts[-1], blocks, pairs_at_most(padded, blocks, window))
    bounds = jnp.stack([first, jnp.arange(padded, dtype=jnp.int32)]).reshape(2, tiles, blocks.queries).swapaxes(0, 1)

    q, k, v = (jnp.pad(x, ((0, padded - tokens), (0, 0), (0, 0))) for x in (q, k, v))

    def tile(pair: Any) -> Any:
        return pair >> TILE_SHIFT

    def now(step: Any, pairs: Any) -> Any:
        return pairs[jnp.maximum(step - 1, 0)]

    operands = [q.transpose(1, 0, 2), _without_padding(k.transpose(1, 0, 2), starts[-1], blocks.keys, 1),
                _without_padding(v.transpose(1, 2, 0), starts[-1], blocks.keys, 2), bounds]
    in_specs = [
        pl.BlockSpec((blocks.heads, blocks.queries, width), lambda part, step, pairs: (part, tile(pairs[step]), 0)),
        pl.BlockSpec((None, blocks.keys, width), lambda part, step, pairs: (part // share, _block(pairs[step]), 0)),
        pl.BlockSpec((None, width, blocks.keys),
                     lambda part, step, pairs: (part // share, 0, _block(now(step, pairs)))),
        pl.BlockSpec((None, 2, blocks.queries), lambda part, step, pairs: (tile(pairs[step]), 0, 0)),
    ]
    if sinks is not None:
        operands.append(jnp.repeat(sinks * LOG2E, blocks.queries).reshape(parts, 1, rows))
        in_specs.append(pl.BlockSpec((None, 1, rows), lambda part, *_: (part, 0, 0)))
    row = pltpu.VMEM((1, rows), jnp.float32)
    out = pl.pallas_call(
        functools.partial(_kernel, blocks=blocks, scale=scale, soft_cap=soft_cap, has_sinks=sinks is not None),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1, grid=(parts, count + 1), in_specs=in_specs,
            out_specs=pl.BlockSpec((blocks.heads, blocks.queries, width),
                                   lambda part, step, pairs: (part, tile(now(step, pairs)), 0)),
            scratch_shapes=[pltpu.VMEM((width, rows), q.dtype), pltpu.VMEM((blocks.keys, rows), jnp.float32),
                            row, row, row, pltpu.VMEM((width, rows), jnp.float32)]),
        out_shape=jax.ShapeDtypeStruct(operands[0].shape, q.dtype),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=local_chip().vmem * 3 // 4),
        # Tiles of padding are not written: they hold what is unspecified, but no NaN that was not in q.
        input_output_aliases={1: 0}, interpret=interpret, name="flash_attention",
    )(pairs, *operands)
    return out.transpose(1, 0, 2)[:tokens].astype(dtype)


def _without_padding(x: jax.Array, used: jax.Array, keys: int, axis: int) -> jax.Array:
    """Zeros for what follows token `used` - 1 in its block of an axis of tokens; no later block is read.

    Padding may be NaN, and 0 * NaN is.
    """
    begin = jnp.maximum(used - 1, 0) // keys * keys
    block = jax.lax.dynamic_slice_in_dim(x, begin, keys, axis)
    token = begin + jax.lax.broadcasted_iota(jnp.int32, block.shape, axis)
    return jax.lax.dynamic_update_slice_in_dim(x, jnp.where(token < used, block, 0), begin, axis)


def _pairs(first: jax.Array, used: jax.Array, blocks: Blocks, most: int) -> tuple[jax.Array, jax.Array]:
    """The pairs that see each other, tile by tile; tiles of padding have none.

    Args:
      first: [T] int32, the first token each sees, non-decreasing. used: int32, tokens that are no padding.

    Returns:
      [most + 1] int32, the pairs, and the last of them, as if whole, to the end; int32, how many there are.
    """
    begin = jnp.arange(0, first.shape[0], blocks.queries, dtype=jnp.int32)
    low = first[::blocks.queries] // blocks.keys
    high = (jnp.minimum(begin + blocks.queries, used) - 1) // blocks.keys
    ends = jnp.cumsum(jnp.where(begin < used, high - low + 1, 0), dtype=jnp.int32)
    order = jnp.arange(most + 1, dtype=jnp.int32)
    index = jnp.minimum(order, jnp.maximum(ends[-1] - 1, 0))
    tile = jnp.minimum(jnp.searchsorted(ends, index, side="right").astype(jnp.int32), begin.shape[0] - 1)
    block = jnp.maximum(high[tile] - (ends[tile] - 1 - index), 0)
    whole = (block * blocks.keys >= first[blocks.queries - 1::blocks.queries][tile]) & (
        (block + 1) * blocks.keys <= begin[tile] + 1)
    flags = (block == low[tile]) * FIRST + (block == high[tile]) * LAST + whole * WHOLE
    flags = jnp.where(order < ends[-1], flags, WHOLE)  # the last step's first product is for nothing: the cheap one
    return (tile << TILE_SHIFT | block << BLOCK_SHIFT | flags).astype(jnp.int32), ends[-1]


def _block(pair: Any) -> Any:
    return (pair >> BLOCK_SHIFT) & BLOCK_MASK


def _kernel(pairs: Any, q: Any, k: Any, v: Any, bounds: Any, *rest: Any, blocks: Blocks, scale: float,
            soft_cap: float | None, has_sinks: bool) -> None:
    """The softmax and second product of the pair before pairs[step], and the first product of pairs[step].

    Windows, R rows and C keys: q [heads, R / heads, H], k [C, H] and bounds [2, R / heads] of the pair to come;
    v [H, C], sinks [1, R] and out [heads, R / heads, H] of the present one. Scratch: turned [H, R], the queries of the
    pair to come; scores [C, R] and their maxima highest [1, R]; of the softmax so far the maxima top [1, R] and the
    sums total [1, R]; the sum of values acc [H, R].
    """
    sinks, (out, turned, scores, highest, top, total, acc) = (rest[0], rest[1:]) if has_sinks else (None, rest)
    step = pl.program_id(1)
    now, following = pairs[jnp.maximum(step - 1, 0)], pairs[step]
    heads = [(head, slice(head * blocks.queries, (head + 1) * blocks.queries)) for head in range(blocks.heads)]
    # float32 products in full; bfloat16 ones are exact as they are.
    dot = functools.partial(
        jnp.dot, preferred_element_type=jnp.float32,
        precision=jax.lax.Precision.HIGHEST if q.dtype == jnp.float32 else jax.lax.Precision.DEFAULT)

    def score(piece: slice, bias: jax.Array | None) -> None:
        # Scaling q instead saves 6% of the cycles and rounds it once more: three times the error where scores are
        # large.
        s = dot(k[...], turned[:, piece])
        s = s * (scale * LOG2E) if soft_cap is None else jnp.tanh(s * (scale / soft_cap)) * (soft_cap * LOG2E)
        if bias is not None:
            s = jnp.where(bias == 0.0, s, MASKED)  # not a sum: another sequence's key may be NaN
        scores[:, piece] = s
        highest[:, piece] = s.max(0, keepdims=True)

    def soften(piece: slice) -> tuple[slice, jax.Array, jax.Array]:
        before = top[:, piece]
        top[:, piece] = after = jnp.maximum(before, highest[:, piece])
        probs, fade = jnp.exp2(scores[:, piece] - after), jnp.exp2(before - after)
        total[:, piece] = total[:, piece] * fade + probs.sum(0, keepdims=True)
        return piece, fade, probs.astype(v.dtype)

    def accumulate(piece: slice, fade: jax.Array, probs: jax.Array) -> None:
        acc[:, piece] = acc[:, piece] * fade + dot(v[...], probs)

    def advance(biases: list[tuple[slice, jax.Array | None]]) -> None:
        # The second product of a piece comes after the softmax of the next one, which hides its latency.
        waiting: list[tuple[slice, jax.Array, jax.Array]] = []
        for piece, bias in biases:
            waiting.append(soften(piece))
            score(piece, bias)
            if len(waiting) > 1:
                accumulate(*waiting.pop(0))
        accumulate(*waiting.pop())

    @pl.when((step > 0) & (now & FIRST != 0))
    def _() -> None:
        top[...] = jnp.full_like(top, LOWEST) if sinks is None else jnp.maximum(sinks[...], LOWEST)
        total[...] = jnp.zeros_like(total) if sinks is None else jnp.exp2(sinks[...] - top[...])
        acc[...] = jnp.zeros_like(acc)

    @pl.when((step == 0) | (following & FIRST != 0))
    def _() -> None:
        for head, rows in heads:
            turned[:, rows] = q[head].T

    @pl.when(step == 0)
    def _() -> None:
        out[...] = jnp.zeros_like(out)  # which nothing else writes if all is padding
        for piece, bias in _biases(bounds, following, blocks, masked=True):
            score(piece, bias)

    @pl.when((step > 0) & (following & WHOLE != 0))
    def _() -> None:
        advance(_biases(bounds, following, blocks, masked=False))

    @pl.when((step > 0) & (following & WHOLE == 0))
    def _() -> None:
        advance(_biases(bounds, following, blocks, masked=True))

    @pl.when((step > 0) & (now & LAST != 0))
    def _() -> None:
        for head, rows in heads:
            sums = total[:, rows]
            out[head] = (acc[:, rows] / jnp.where(sums == 0.0, 1.0, sums)).astype(out.dtype).T


def _biases(bounds: Any, pair: Any, blocks: Blocks, masked: bool) -> list[tuple[slice, jax.Array | None]]:
    """The pieces of a tile's rows, and a mask of their scores: 0, or MASKED where a query does not see a key."""
    if blocks.queries >= PIECE:
        width, together = PIECE, 1
    else:
        width, together = blocks.queries, min(blocks.heads, PIECE // blocks.queries)
    pieces: list[tuple[slice, jax.Array | None]] = []
    for start in range(0, blocks.queries, width):
        bias = None
        if masked:
            key = jax.lax.broadcasted_iota(jnp.int32, (blocks.keys, width), 0)
            low, high = (bounds[i:i + 1, start:start + width] - _block(pair) * blocks.keys for i in range(2))
            bias = jnp.where((key >= low) & (key <= high), 0.0, MASKED)
            bias = jnp.concatenate([bias] * together, axis=1)
        for head in range(0, blocks.heads, together):
            here = min(together, blocks.heads - head)
            piece = slice(head * blocks.queries + start, head * blocks.queries + start + here * width)
            pieces.append((piece, None if bias is None else bias[:, :here * width]))
    return pieces
