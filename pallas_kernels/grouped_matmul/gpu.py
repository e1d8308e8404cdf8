"""grouped_matmul for GPUs: XLA's ragged dot, which it hands to its own grouped kernels where it has some."""

import jax
import jax.numpy as jnp

from pallas_kernels.grouped_matmul.reference import quantise_rows


def grouped_matmul(x, weights, group_sizes, *, scales, inputs_first):
    """See api.grouped_matmul."""
    dims = jax.lax.RaggedDotDimensionNumbers(
        dot_dimension_numbers=(((1,), (1 if inputs_first else 2,)), ((), ())),
        lhs_ragged_dimensions=(0,), rhs_group_dimensions=(0,))
    if scales is None:
        return jax.lax.ragged_dot_general(x.astype(weights.dtype), weights, group_sizes, dims,
                                          preferred_element_type=jnp.float32)
    x, x_scales = quantise_rows(x)
    y = jax.lax.ragged_dot_general(x, weights, group_sizes, dims, preferred_element_type=jnp.int32)
    ends = jnp.cumsum(group_sizes)
    group = jnp.searchsorted(ends, jnp.arange(x.shape[0], dtype=jnp.int32), side="right")
    return y.astype(jnp.float32) * x_scales[:, None] * scales.at[group].get(mode="clip")
