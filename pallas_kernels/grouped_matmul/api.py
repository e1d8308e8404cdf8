"""grouped_matmul: the one public function."""

import jax

from pallas_kernels.grouped_matmul import reference
from pallas_kernels.platform import Implementation, choose


def grouped_matmul(
    x: jax.Array,
    weights: jax.Array,
    group_sizes: jax.Array,
    *,
    scales: jax.Array | None = None,
    inputs_first: bool = False,
    implementation: Implementation | None = None,
) -> jax.Array:
    """Multiplies each row by the matrix of its group: rows of group 0 come first, then those of group 1, and so on.

    A row's result depends on that row and its group's matrix only. Cost follows the rows and the groups that have
    some, not E.

    Args:
      x: [T, I] float, rows sorted by group; converted to the dtype of float weights. Rows past the sum of group_sizes
        are padding and give unspecified finite rows.
      weights: [E, O, I], or [E, I, O] with inputs_first; float32, bfloat16, or int8 with scales.
      group_sizes: [E] int32, the sum at most T; 0 for a group without rows.
      scales: [E, O] float32 of int8 weights, w = weights * scales. Rows of x are then quantised too, each by its
        largest magnitude, and multiplied in int32 (W8A8).
      inputs_first: which of the two orders weights have.
      implementation: tpu, gpu or reference; None takes the one of the mesh's platform.

    Returns:
      [T, O] float32, what the products are accumulated in.

    Raises:
      ValueError: shapes or dtypes do not fit together.
    """
    choose(implementation)
    return reference.grouped_matmul(x, weights, group_sizes, scales=scales, inputs_first=inputs_first)
