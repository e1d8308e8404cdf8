"""grouped_matmul for GPUs: a program a (block of rows, group) pair that meets and a block of columns.

A Pallas kernel for the Triton backend, as those of attention (pallas_kernels/gpu.py). `jax.lax.ragged_dot` is no
alternative: XLA multiplies every row by every group's matrix and masks, E times the work.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from pallas_kernels.gpu import supported
from pallas_kernels.gpu_blocks import LEAST_ROWS, ROWS, power_of_two
from pallas_kernels.grouped_matmul import reference
from pallas_kernels.grouped_matmul.pairs import group_starts, pairs
from pallas_kernels.pages import Pages
from pallas_kernels.tuning import tuned

BLOCKS = {"inputs": 64, "warps": 4, "stages": 3}  # of a turn of a program's loop
COLUMNS_BYTES = 256  # of a block of columns


class _Inputs(NamedTuple):
    x: Any  # [T, I]
    weights: Any  # [E * O, I] or [E * I, O]
    x_scales: Any  # [T] float32, or None
    scales: Any  # [E * O] float32, or None
    group: Any  # [pairs]
    block: Any  # [pairs]
    count: Any  # [1], pairs in use
    starts: Any  # [E + 1]


def grouped_matmul(x: jax.Array, weights: jax.Array, group_sizes: jax.Array, *, scales: jax.Array | None,
                   inputs_first: bool, interpret: bool = False) -> jax.Array:
    """See api.grouped_matmul; interpret runs it on any device."""
    if not supported(Pages(weights), interpret=interpret):
        return reference.grouped_matmul(x, weights, group_sizes, scales=scales, inputs_first=inputs_first)
    groups, outputs = weights.shape[0], weights.shape[2 if inputs_first else 1]
    tokens, inputs = x.shape
    x, x_scales = (x.astype(weights.dtype), None) if scales is None else reference.quantise_rows(x)
    rows = min(max(power_of_two(2 * tokens // groups), LEAST_ROWS), ROWS)
    columns = min(COLUMNS_BYTES // weights.dtype.itemsize, ROWS)
    entry = tuned(__file__, f"{weights.dtype} T{tokens} E{groups} O{outputs} I{inputs}")
    blocks = {"rows": rows, "columns": columns} | BLOCKS | entry
    starts = group_starts(group_sizes)
    group, block, count = pairs(starts, blocks["rows"], pl.cdiv(tokens, blocks["rows"]))
    kernel = functools.partial(
        _kernel, rows=blocks["rows"], columns=blocks["columns"], step=blocks["inputs"], outputs=outputs,
        inputs=inputs, inputs_first=inputs_first)
    return pl.pallas_call(
        kernel, out_shape=jax.ShapeDtypeStruct((tokens, outputs), jnp.float32),
        grid=(group.shape[0], pl.cdiv(outputs, blocks["columns"])), name="grouped_matmul", interpret=interpret,
        compiler_params=triton.CompilerParams(num_warps=blocks["warps"], num_stages=blocks["stages"]),
    )(_Inputs(x, weights.reshape(-1, weights.shape[2]), x_scales, None if scales is None else scales.reshape(-1), group,
              block, count.reshape(1), starts))


def _kernel(refs: _Inputs, out: Any, *, rows: int, columns: int, step: int, outputs: int, inputs: int,
            inputs_first: bool) -> None:
    pair = pl.program_id(0)
    group, first = refs.group[pair], refs.block[pair] * rows
    row = first + jnp.arange(rows, dtype=jnp.int32)
    used = pair < refs.count[0]
    own = (row >= refs.starts[group]) & (row < refs.starts[group + 1]) & used
    column = pl.program_id(1) * columns + jnp.arange(columns, dtype=jnp.int32)
    inside = column < outputs
    integers = refs.x_scales is not None
    zero = np.zeros((), refs.weights.dtype)[()]

    def turn(index: jax.Array, acc: jax.Array) -> jax.Array:
        lane = index * step + jnp.arange(step, dtype=jnp.int32)
        held = lane < inputs
        x = triton.load(refs.x.at[row[:, None], lane[None]], mask=own[:, None] & held[None], other=zero)
        if inputs_first:
            matrix = triton.load(refs.weights.at[(group * inputs + lane)[:, None], column[None]],
                                 mask=held[:, None] & inside[None], other=zero)
        else:
            matrix = triton.load(refs.weights.at[(group * outputs + column)[:, None], lane[None]],
                                 mask=inside[:, None] & held[None], other=zero)
        return acc + jax.lax.dot_general(
            x, matrix, (((1,), (0 if inputs_first else 1,)), ((), ())), preferred_element_type=acc.dtype,
            precision=jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None)

    turns = jnp.where(used, jnp.int32(pl.cdiv(inputs, step)), jnp.int32(0))
    acc = jax.lax.fori_loop(0, turns, turn, jnp.zeros((rows, columns), jnp.int32 if integers else jnp.float32))
    if integers:
        row_scale = triton.load(refs.x_scales.at[row], mask=own, other=0.0)
        scale = triton.load(refs.scales.at[group * outputs + column], mask=inside, other=0.0)
        acc = acc.astype(jnp.float32) * row_scale[:, None] * scale[None]
    triton.store(out.at[row[:, None], column[None]], acc, mask=own[:, None] & inside[None])
