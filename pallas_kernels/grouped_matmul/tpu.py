"""grouped_matmul for TPUs: the grid is a list of the (block of rows, group) pairs that meet.

Rows are sorted by group, so a block of them meets a few groups that follow one another, and a group a few blocks. The
list has each such pair once, in order: a group's matrix is fetched once for all its blocks where a block of it holds
all inputs, a block of results stays in VMEM until its last group, and a group without rows costs nothing. The pipeline
fetches the next pair's matrix while this one is multiplied.
"""

import dataclasses
import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.chips import local_chip
from pallas_kernels.grouped_matmul.pairs import group_starts, pairs
from pallas_kernels.grouped_matmul.reference import quantise_rows
from pallas_kernels.tiling import LANES, SUBLANES, up
from pallas_kernels.tuning import tuned

ROWS = (128, 64, 32)  # of a block, best first: more would mostly multiply rows of other groups
OUTPUTS = (512, 256, 128)  # columns of a block, best first: a fetch of a megabyte or more


@dataclasses.dataclass(frozen=True, slots=True)
class Blocks:
    """rows of x, outputs and inputs of a group's matrix that one step multiplies.

    outputs: a multiple of 128 or all of them. inputs: all, or a divisor that is a multiple of 128.
    """

    rows: int
    outputs: int
    inputs: int

    def vmem(self, itemsize: int) -> int:
        """Bytes: windows twice (the pipeline has two buffers), the product, and float32 operands split in three."""
        rows, outputs, inputs = up(self.rows, 32), up(self.outputs, LANES), up(self.inputs, LANES)
        operands = inputs * (rows + outputs)
        windows = itemsize * operands + 4 * (rows * outputs + rows * LANES + SUBLANES * outputs)
        return 2 * windows + 8 * rows * outputs + (6 * operands if itemsize == 4 else 0)


def blocks_for(rows: int, outputs: int, inputs: int, itemsize: int) -> Blocks:
    """All inputs at once if they fit the local chip, since a group's matrix is then fetched once; wide blocks.

    Args:
      rows: T. outputs: O. inputs: I. itemsize: bytes of a weight.

    Raises:
      ValueError: nothing fits.
    """
    parts = [inputs // n for n in range(1, inputs + 1)
             if n == 1 or (inputs % n == 0 and inputs // n % LANES == 0)]
    heights = [min(up(rows, 32), most) for most in ROWS]
    fitting = [blocks for blocks in (Blocks(height, min(width, outputs), part)
                                     for height, part, width in itertools.product(heights, parts, OUTPUTS))
               if blocks.vmem(itemsize) <= local_chip().vmem // 2]
    entry = tuned(__file__, f"{rows} {outputs} {inputs} {8 * itemsize}")
    if entry and Blocks(**entry).vmem(itemsize) <= local_chip().vmem // 2:
        return Blocks(**entry)
    if not fitting:
        raise ValueError(f"grouped_matmul cannot plan {inputs} inputs on this chip: no multiple of 128 divides them")
    return fitting[0]


def grouped_matmul(x: jax.Array, weights: jax.Array, group_sizes: jax.Array, *, scales: jax.Array | None,
                   inputs_first: bool, blocks: Blocks | None = None, interpret: Any = False) -> jax.Array:
    """See api.grouped_matmul.

    Args:
      blocks: the sizes to use in place of those of the estimate. interpret: as in `pallas_call`.
    """
    tokens, inputs = x.shape
    outputs = weights.shape[2 if inputs_first else 1]
    if blocks is None:
        blocks = blocks_for(tokens, outputs, inputs, weights.dtype.itemsize)
    padded = up(tokens, blocks.rows)
    x = jnp.pad(x, ((0, padded - tokens), (0, 0)))
    x, x_scales = (x.astype(weights.dtype), None) if scales is None else quantise_rows(x)
    starts = group_starts(group_sizes)
    group, block, count = pairs(starts, blocks.rows, padded // blocks.rows)

    turns = inputs // blocks.inputs
    matrix = (blocks.inputs, blocks.outputs) if inputs_first else (blocks.outputs, blocks.inputs)
    operands = [x, weights]
    in_specs = [
        pl.BlockSpec((blocks.rows, blocks.inputs), lambda column, pair, turn, group, block, _: (block[pair], turn)),
        pl.BlockSpec((None, *matrix), lambda column, pair, turn, group, block, _:
                     (group[pair], turn, column) if inputs_first else (group[pair], column, turn)),
    ]
    if x_scales is not None and scales is not None:
        operands += [x_scales[:, None], scales[:, None]]
        in_specs += [
            pl.BlockSpec((blocks.rows, 1), lambda column, pair, turn, group, block, _: (block[pair], 0)),
            pl.BlockSpec((None, 1, blocks.outputs),
                         lambda column, pair, turn, group, block, _: (group[pair], 0, column))]
    out = pl.pallas_call(
        functools.partial(_kernel, rows=blocks.rows, turns=turns, inputs_first=inputs_first),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3, grid=(pl.cdiv(outputs, blocks.outputs), count, turns), in_specs=in_specs,
            out_specs=pl.BlockSpec((blocks.rows, blocks.outputs),
                                   lambda column, pair, turn, group, block, _: (block[pair], column))),
        out_shape=jax.ShapeDtypeStruct((padded, outputs), jnp.float32),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary", "arbitrary"), vmem_limit_bytes=local_chip().vmem * 3 // 4),
        interpret=interpret, name="grouped_matmul",
    )(group, block, starts, *operands)
    return out[:tokens]


def _kernel(group: Any, block: Any, starts: Any, x: Any, matrix: Any, *rest: Any, rows: int, turns: int,
            inputs_first: bool) -> None:
    """Adds one pair's product to the rows they share.

    Windows: x [rows, inputs], matrix [outputs, inputs] or [inputs, outputs], of int8 the scales [rows, 1] and
    [1, outputs], out [rows, outputs] float32.
    """
    *scales, out = rest
    pair, turn = pl.program_id(1), pl.program_id(2)
    # float32 products in full; the others are exact as they are.
    y = jax.lax.dot_general(
        x[...], matrix[...], (((1,), (0 if inputs_first else 1,)), ((), ())),
        preferred_element_type=jnp.int32 if scales else jnp.float32,
        precision=jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else jax.lax.Precision.DEFAULT)
    if scales:
        y = y.astype(jnp.float32) * scales[0][...] * scales[1][...]
    row = block[pair] * rows + jax.lax.broadcasted_iota(jnp.int32, y.shape, 0)
    own = (row >= starts[group[pair]]) & (row < starts[group[pair] + 1])
    if turns > 1:
        y = jnp.where(turn == 0, y, out[...] + y)
    out[...] = jnp.where(own, y, out[...])  # rows of other groups are theirs, before or after
