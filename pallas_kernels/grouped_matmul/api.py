"""grouped_matmul: the one public function."""

from typing import Any

import jax

from pallas_kernels.grouped_matmul import reference, tpu
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
      x: [T, I] float, rows sorted by group; converted to the type of float weights. Rows past the sum of group_sizes
        are padding: they may hold anything and give unspecified rows.
      weights: [E, O, I], or [E, I, O] with inputs_first; float32, bfloat16, or int8 with scales.
      group_sizes: [E] int32, none negative, the sum at most T.
      scales: [E, O] float32 of int8 weights, w = weights * scales. Rows of x are then quantised too, each by its
        largest magnitude, and multiplied in int32 (W8A8, arXiv 2208.07339 without the outlier path).
      inputs_first: which of the two orders weights have.
      implementation: tpu, gpu or reference; None takes the one of the mesh's platform.

    Returns:
      [T, O] float32, which products are accumulated in.

    Raises:
      ValueError: shapes or dtypes do not fit together.
    """
    _check(x, weights, group_sizes, scales, inputs_first)
    options: Any = {"scales": scales, "inputs_first": inputs_first}
    match choose(implementation):
        case "tpu":
            return tpu.grouped_matmul(x, weights, group_sizes, **options)
        case "gpu":
            from pallas_kernels.grouped_matmul import gpu  # here: not every jaxlib has Triton

            return gpu.grouped_matmul(x, weights, group_sizes, **options)
        case _:
            return reference.grouped_matmul(x, weights, group_sizes, **options)


def _check(x: jax.Array, weights: jax.Array, group_sizes: jax.Array, scales: jax.Array | None,
           inputs_first: bool) -> None:
    order = "[E, I, O]" if inputs_first else "[E, O, I]"
    if x.ndim != 2 or weights.ndim != 3 or weights.shape[1 if inputs_first else 2] != x.shape[1]:
        raise ValueError(f"x {x.shape} does not fit weights {weights.shape}; want [T, I] and {order}")
    if x.shape[0] == 0:
        raise ValueError(f"x must hold a row at least, got {x.shape}")
    floats = ("float32", "bfloat16")
    if x.dtype.name not in floats:
        raise ValueError(f"x must be float32 or bfloat16, got {x.dtype}")
    if weights.dtype.name not in (*floats, "int8"):
        raise ValueError(f"weights must be float32, bfloat16 or int8, got {weights.dtype}")
    groups, outputs = weights.shape[0], weights.shape[2 if inputs_first else 1]
    if group_sizes.shape != (groups,) or group_sizes.dtype != "int32":
        raise ValueError(f"group_sizes must be int32 [{groups}], got {group_sizes.dtype} {group_sizes.shape}")
    if (scales is None) != (weights.dtype != "int8"):
        raise ValueError(f"scales must come with int8 weights and only with them; weights are {weights.dtype}")
    if scales is not None and (scales.shape != (groups, outputs) or scales.dtype != "float32"):
        raise ValueError(f"scales must be float32 [{groups}, {outputs}], got {scales.dtype} {scales.shape}")
