"""One projection of all experts of a layer."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from jinfer.models.expert_parameters import stacked, stacked_kernels
from jinfer.models.parameter import Parameter, Precision
from jinfer.sharding import Layout
from pallas_kernels import grouped_matmul


class Stack(NamedTuple):
    """Kernel [E, out, in] or [E, in, out], scale [E, out] of int8, bias [E, out]; or something about each of them."""

    kernel: Any
    scale: Any = None
    bias: Any = None


class ExpertLinear(nnx.Module):
    """y[r, out] = x[r, in] . kernel[e, out, in] + bias[e, out], e the expert of row r. Precisions as of Linear."""

    def __init__(self, weights: Sequence[Parameter], biases: Sequence[Parameter] | None, precision: Precision):
        """weights, biases: of each expert, [out, in] and [out]."""
        kernel, scale = stacked_kernels(weights, precision)
        bias = None if biases is None else stacked(biases)
        self.kernel = nnx.Param(kernel)
        self.scale = None if scale is None else nnx.Param(scale)
        self.bias = None if bias is None else nnx.Param(bias)
        self.axes = Stack(*(None if p is None else p.axes for p in (kernel, scale, bias)))

    def arrays(self) -> Stack:
        """What `multiply` takes; arguments of a shard_map whose specs are `specs`."""
        return Stack(*(None if p is None else p[...] for p in (self.kernel, self.scale, self.bias)))

    def specs(self, layout: Layout) -> Stack:
        return Stack(*(None if axes is None else layout.spec(*axes) for axes in self.axes))


def multiply(x: jax.Array, arrays: Stack, experts: jax.Array, sizes: jax.Array, *, inputs_first: bool) -> jax.Array:
    """x [R, in], rows sorted by expert; experts [R] int32 of each row; sizes [E] int32 -> [R, out] float32."""
    y = grouped_matmul(x, arrays.kernel, sizes, scales=arrays.scale, inputs_first=inputs_first)
    if arrays.bias is None:
        return y
    return y + arrays.bias.astype(jnp.float32).at[experts].get(mode="promise_in_bounds")
