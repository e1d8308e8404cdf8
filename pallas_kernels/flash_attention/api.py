"""flash_attention: the one public function."""

from typing import Any

import jax

from pallas_kernels.flash_attention import reference, tpu
from pallas_kernels.options import check_options
from pallas_kernels.platform import Implementation, choose


def flash_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    starts: jax.Array,
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: jax.Array | None = None,
    implementation: Implementation | None = None,
) -> jax.Array:
    """Causal attention of packed whole sequences over themselves (prefill without a cache).

    A NaN among a sequence's values may reach others packed beside it (0 * NaN); paged_attention keeps them apart.

    Args:
      q: [T, N, H] float; sequence i owns the tokens starts[i]:starts[i+1]; tokens past starts[Q] are padding and
        give unspecified rows (NaN only where they hold NaN), and no other token sees them.
      k, v: [T, K, H] in q's dtype; N is a multiple of K.
      starts: [Q + 1] int32, non-decreasing, the first is 0: cumulative lengths.
      scale: multiplies the scores.
      window: queries see themselves and window - 1 positions before; None sees all.
      soft_cap: scores become soft_cap * tanh(scores / soft_cap).
      sinks: [N] float32, a logit a head that takes part in the softmax and has no value.
      implementation: tpu, gpu or reference; None takes the one of the mesh's platform.

    Returns:
      [T, N, H] in q's dtype. Scores, softmax and accumulation are float32 (arXiv 2205.14135).

    Raises:
      ValueError: shapes, dtypes or options do not fit together.
    """
    if q.ndim != 3 or k.ndim != 3 or q.shape[1] % k.shape[1] or k.shape != (q.shape[0], k.shape[1], q.shape[2]):
        raise ValueError(f"q {q.shape} does not fit k {k.shape}; want [T, N, H] and [T, K, H], N a multiple of K")
    for name, array in (("k", k), ("v", v)):
        if array.shape != k.shape or array.dtype != q.dtype:
            raise ValueError(f"{name} must be {q.dtype} {list(k.shape)}, got {array.dtype} {array.shape}")
    if starts.ndim != 1 or starts.shape[0] < 2 or starts.dtype != "int32":
        raise ValueError(f"starts must be int32 [Q + 1], got {starts.dtype} {starts.shape}")
    check_options(q, window=window, soft_cap=soft_cap, sinks=sinks)
    options: dict[str, Any] = {"scale": scale, "window": window, "soft_cap": soft_cap, "sinks": sinks}
    match choose(implementation):
        case "tpu":
            return tpu.flash_attention(q, k, v, starts, **options)
        case "gpu":
            from pallas_kernels.flash_attention import gpu  # here: not every jaxlib has Triton

            return gpu.flash_attention(q, k, v, starts, **options)
        case _:
            return reference.flash_attention(q, k, v, starts, **options)
