"""What attention operations have in common: the options, their check, the mask value."""

import jax
import jax.numpy as jnp

MASKED = -0.7 * float(jnp.finfo(jnp.float32).max)  # finite, so that a fully masked block gives no NaN


def check_options(q: jax.Array, *, window: int | None, soft_cap: float | None, sinks: jax.Array | None) -> None:
    """Raises ValueError, naming the field, if q [T, N, H] or an option cannot be."""
    if q.dtype.name not in ("float32", "bfloat16", "float16"):
        raise ValueError(f"q must be float32, bfloat16 or float16, got {q.dtype}")
    if q.shape[0] == 0:
        raise ValueError(f"q must hold a token at least, got {q.shape}")
    if window is not None and window < 1:
        raise ValueError(f"window must be at least 1, got {window}")
    if soft_cap is not None and not soft_cap > 0:
        raise ValueError(f"soft_cap must be positive, got {soft_cap}")
    if sinks is not None and (sinks.shape != (q.shape[1],) or sinks.dtype != "float32"):
        raise ValueError(f"sinks must be float32 [{q.shape[1]}], got {sinks.dtype} {sinks.shape}")


def capped(scores: jax.Array, soft_cap: float | None) -> jax.Array:
    """float32 scores of any shape, bounded smoothly by soft_cap (Gemma 2, arXiv 2408.00118)."""
    return scores if soft_cap is None else soft_cap * jnp.tanh(scores / soft_cap)
