"""Layers shared by all families: Linear, Embedding, RMSNorm. Flax NNX modules over flat activations [T, ...].

A module is built from `Parameter`s, which sit where the arrays will be until the loader replaces them.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jinfer.models.parameter import Index, Parameter, Precision, Reader, shifted
from jinfer.quant.int8 import quantised_rows
from jinfer.sharding import Layout
from pallas_kernels.grouped_matmul.reference import quantise_rows


class Linear(nnx.Module):
    """y[T, *out] = x[T, in] . kernel[*out, in] + bias[*out]; x may come as [T, ...], its axes then are one.

    int8 kernels hold one float32 scale per output channel; activations are then quantised per token and the
    product is an int32 dot (W8A8, arXiv 2208.07339 without the outlier path). float32 kernels lie [in, *out],
    the others [*out, in]: each is what XLA:CPU multiplies fastest (docs/performance.md).
    """

    def __init__(self, weight: Parameter, precision: Precision, *, bias: Parameter | None = None,
                 layout: Layout | None = None):
        """layout: of a weight whose inputs may be cut; the devices' partial sums then meet in x's dtype."""
        kernel, scale = kernel_parameters(weight, precision)
        self.kernel = nnx.Param(kernel)
        self.scale = None if scale is None else nnx.Param(scale)
        self.bias = None if bias is None else nnx.Param(bias)
        self.inputs_first = precision.inputs_first
        self.inputs = weight.axes[-1]
        cut = layout is not None and self.inputs is not None and layout.degree(self.inputs) > 1
        self.layout = layout if cut and scale is None else None

    def __call__(self, x: jax.Array) -> jax.Array:
        """x: [T, in] -> [T, *out] in x's dtype."""
        if self.layout is None:
            return self.project(x).astype(x.dtype)
        return self._meet(x.reshape(x.shape[0], -1), self.layout)

    def project(self, x: jax.Array) -> jax.Array:
        """Like calling it, but keeps the float32 accumulator: [T, *out] float32."""
        kernel = self.kernel[...]
        outputs = kernel.shape[1:] if self.inputs_first else kernel.shape[:-1]
        # As plain matrices: XLA:CPU has no fast int8 path for products over several axes.
        kernel = kernel.reshape(kernel.shape[0], -1) if self.inputs_first else kernel.reshape(-1, kernel.shape[-1])
        x = x.reshape(x.shape[0], -1)
        if self.scale is None:
            y = self._multiply(x.astype(kernel.dtype), kernel, jnp.float32)
        else:
            quantised, scale = quantise_rows(x)
            y = self._multiply(quantised, kernel, jnp.int32)
            y = y.astype(jnp.float32) * scale[:, None] * self.scale[...].reshape(-1)
        y = y.reshape(-1, *outputs)
        return y if self.bias is None else y + self.bias[...].astype(jnp.float32)

    def _meet(self, x: jax.Array, layout: Layout) -> jax.Array:
        """x [T, in] cut on its inputs -> [T, out]. Left to the compiler, the sums may travel as float32."""
        axis = layout.mesh_axis(self.inputs)

        def local(x: jax.Array, kernel: jax.Array) -> jax.Array:
            return jax.lax.psum(self._multiply(x.astype(kernel.dtype), kernel, jnp.float32).astype(x.dtype), axis)

        cut = layout.spec(None, self.inputs)
        kernel = layout.spec(self.inputs, None) if self.inputs_first else cut
        y = jax.shard_map(local, mesh=layout.mesh, in_specs=(cut, kernel), out_specs=layout.spec(),
                          check_vma=False)(x, self.kernel[...])
        return y if self.bias is None else (y.astype(jnp.float32) + self.bias[...].astype(jnp.float32)).astype(x.dtype)

    def _multiply(self, x: jax.Array, kernel: jax.Array, accumulator: jax.typing.DTypeLike) -> jax.Array:
        """[T, in] . [out, in] or [in, out] -> [T, out] in the accumulator's dtype."""
        dims = (((1,), (0 if self.inputs_first else 1,)), ((), ()))
        return jax.lax.dot_general(x, kernel, dims, preferred_element_type=accumulator)


class Embedding(nnx.Module):
    """The token table [V, D], which may also be the output head."""

    def __init__(self, weight: Parameter, precision: Precision):
        # [V, D] in every precision: a lookup reads whole rows.
        self.table = Linear(weight, precision.rows_first())
        self.dtype = precision.activation_dtype

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """tokens: [T] int32 -> [T, D]."""
        rows = self.table.kernel[...].at[tokens].get(mode="promise_in_bounds")
        if self.table.scale is not None:
            scale = self.table.scale[...].at[tokens].get(mode="promise_in_bounds")
            rows = rows.astype(jnp.float32) * scale[:, None]
        return rows.astype(self.dtype)

    def attend(self, x: jax.Array) -> jax.Array:
        """Logits of a tied head: x [T, D] -> [T, V] float32."""
        return self.table.project(x)


class RMSNorm(nnx.Module):
    """x / rms(x) * weight, in float32 (arXiv 1910.07467)."""

    def __init__(self, weight: Parameter, eps: float, offset: float = 0.0):
        """offset: added to the stored weight."""
        self.weight = nnx.Param(shifted(weight, offset) if offset else weight)
        self.eps = eps

    def __call__(self, x: jax.Array, axes: tuple[int, ...] = (-1,)) -> jax.Array:
        """x: [T, ...], any float dtype; the mean is taken over `axes`, and the weight has the last ones' shape."""
        wide = x.astype(jnp.float32)
        inverse = jax.lax.rsqrt(jnp.mean(wide * wide, axis=axes, keepdims=True) + self.eps)
        return (wide * inverse * self.weight[...].astype(jnp.float32)).astype(x.dtype)


def kernel_parameters(weight: Parameter, precision: Precision) -> tuple[Parameter, Parameter | None]:
    """The kernel a matrix multiplication uses, and the scale of its output channels where it is quantised."""
    if precision.weight_dtype == np.int8:
        return quantised_rows(weight)
    kernel = dataclasses.replace(weight, dtype=precision.weight_dtype)
    if not precision.inputs_first:
        return kernel, None

    def inputs_last(values: tuple) -> tuple:
        return (*values[1:], values[0])

    def read(reader: Reader, index: Index) -> np.ndarray:
        return np.moveaxis(weight.read(reader, inputs_last(index)), -1, 0)

    def inputs_first(values: tuple) -> tuple:
        return (values[-1], *values[:-1])

    return dataclasses.replace(
        kernel, shape=inputs_first(weight.shape), axes=inputs_first(weight.axes), read=read), None
