"""One projection of all experts of a layer."""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jinfer.models.expert_parameters import stacked, stacked_kernels
from jinfer.models.parameter import Parameter, Precision
from jinfer.sharding import Layout
from pallas_kernels import grouped_matmul
from pallas_kernels.tiling import LANES, up


class Stack(NamedTuple):
    """Kernel [E, out, in] or, with inputs first, [E, in, out], scale [E, out] of int8, bias [E, out]; or something
    about each of them.
    """

    kernel: Any
    scale: Any = None
    bias: Any = None


class ExpertLinear(nnx.Module):
    """y[r, out] = x[r, in] . kernel[e, out, in] + bias[e, out], e the expert of row r. Precisions as of Linear."""

    def __init__(self, weights: Sequence[Parameter], biases: Sequence[Parameter] | None, layout: Layout,
                 precision: Precision):
        """weights, biases: of each expert, [out, in] and [out]."""
        if layout.platform == "tpu" and precision.weight_dtype != np.int8:  # which has one order only
            precision = dataclasses.replace(precision, inputs_first=_fills_lanes_better(weights[0], layout))
        self.inputs_first = precision.inputs_first
        kernel, scale = stacked_kernels(weights, precision)
        bias = None if biases is None else stacked(biases)
        self.kernel = nnx.Param(kernel)
        self.scale = None if scale is None else nnx.Param(scale)
        self.bias = None if bias is None else nnx.Param(bias)
        self.axes = Stack(*(None if p is None else p.axes for p in (kernel, scale, bias)))

    def arrays(self) -> Stack:
        """What `multiply` takes, in a shard_map whose specs are `specs`."""
        return Stack(*(None if p is None else p[...] for p in (self.kernel, self.scale, self.bias)))

    def specs(self, layout: Layout) -> Stack:
        return Stack(*(None if axes is None else layout.spec(*axes) for axes in self.axes))

    def multiply(self, x: jax.Array, arrays: Stack, experts: jax.Array, sizes: jax.Array) -> jax.Array:
        """x [R, in], rows sorted by expert; experts [R] int32 of each row; sizes [E] int32 -> [R, out] float32."""
        y = grouped_matmul(x, arrays.kernel, sizes, scales=arrays.scale, inputs_first=self.inputs_first)
        if arrays.bias is None:
            return y
        return y + arrays.bias.astype(jnp.float32).at[experts].get(mode="promise_in_bounds")


def _fills_lanes_better(weight: Parameter, layout: Layout) -> bool:
    """Of a device's part of a matrix [out, in]: its outputs fill whole lanes better than its inputs.

    XLA:TPU lays an array out along the axis that does, whatever the order of its axes, and would copy all experts of a
    layer in every call for a kernel that wants the other one (gpt-oss 20b: 1 GB; `scripts/aot_steps.py`).
    """
    outputs, inputs = (size // (layout.degree(axis) if axis else 1)
                       for size, axis in zip(weight.shape, weight.axes, strict=True))
    return up(outputs, LANES) * inputs < up(inputs, LANES) * outputs
