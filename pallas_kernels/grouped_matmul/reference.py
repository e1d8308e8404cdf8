"""grouped_matmul in plain jnp: the truth in tests and the path CPUs run.

A loop over the groups that have rows, and in it one over blocks of their rows, both with dynamic trip counts. XLA:CPU
copies a group's matrix out of the stack before it multiplies, once a group; that and a product of few rows take about
the time of a product that reads the matrix in place (docs/performance.md has what lost).
"""

import jax
import jax.numpy as jnp

SMALLEST = 1e-30  # keeps the scale of an all-zero row from being zero


def grouped_matmul(x, weights, group_sizes, *, scales, inputs_first):
    """See api.grouped_matmul."""
    if scales is None:
        x, x_scales = x.astype(weights.dtype), None
    else:
        x, x_scales = quantise_rows(x)
    rows, groups, outputs = x.shape[0], weights.shape[0], weights.shape[2 if inputs_first else 1]
    size = block_rows(rows, groups, quantised=scales is not None)
    # A group's last block reaches into the rows of the next, which are written later, or past the end.
    x = jnp.pad(x, ((0, size), (0, 0)))
    starts = jnp.cumsum(group_sizes) - group_sizes
    used = jnp.argsort(group_sizes == 0, stable=True).astype(jnp.int32)
    dims = (((1,), (0 if inputs_first else 1,)), ((), ()))
    accumulator = jnp.float32 if scales is None else jnp.int32

    def group(turn, out):
        index = used[turn]
        matrix = jax.lax.dynamic_index_in_dim(weights, index, keepdims=False)

        def block(turn, out):
            first = starts[index] + turn * size
            y = jax.lax.dot_general(jax.lax.dynamic_slice_in_dim(x, first, size), matrix, dims,
                                    preferred_element_type=accumulator)
            if x_scales is not None:
                y = (y.astype(jnp.float32) * jax.lax.dynamic_slice_in_dim(x_scales, first, size)[:, None]
                     * jax.lax.dynamic_index_in_dim(scales, index))
            return jax.lax.dynamic_update_slice_in_dim(out, y, first, 0)

        return jax.lax.fori_loop(0, -(-group_sizes[index] // size), block, out)

    if x_scales is not None:
        x_scales = jnp.pad(x_scales, (0, size))
    out = jnp.zeros((rows + size, outputs), jnp.float32)
    return jax.lax.fori_loop(0, jnp.sum(group_sizes > 0, dtype=jnp.int32), group, out)[:rows]


def block_rows(rows: int, groups: int, *, quantised: bool) -> int:
    """Rows of a block: about twice a group's mean, so that most groups are one block, and no more than help."""
    mean = rows // groups
    if mean < 2:  # most groups have one row, where float products are matrix by vector
        return 4 if quantised else 1 if mean == 0 else 2
    return min(2 * (1 << mean.bit_length() - 1), 32 if mean < 64 else 64)


def quantise_rows(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Symmetric int8 a row: x [T, I] -> (int8 [T, I], scale [T] float32 with x = q * scale)."""
    wide = x.astype(jnp.float32)
    scale = jnp.maximum(jnp.max(jnp.abs(wide), axis=1), SMALLEST) / 127.0
    return jnp.round(wide * (1.0 / scale)[:, None]).astype(jnp.int8), scale
