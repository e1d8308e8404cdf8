"""The gate of a feed-forward network: how its two halves become one."""

from typing import assert_never

import jax
import jax.numpy as jnp

from jinfer.config import ModelConfig

SWIGLU_ALPHA = 1.702  # gpt-oss: the sigmoid's slope, which makes x * sigmoid(alpha * x) close to gelu


def gate(gate: jax.Array, up: jax.Array, config: ModelConfig) -> jax.Array:
    """activation(gate) * up, elementwise, in their dtype.

    silu: SwiGLU, gelu_tanh: GEGLU in its tanh form (both arXiv 2002.05202). clamped_swiglu (gpt-oss, arXiv
    2508.10925): gate at most swiglu_limit, up within +-swiglu_limit, (up + 1) * gate * sigmoid(1.702 * gate).
    """
    match config.activation:
        case "silu":
            return jax.nn.silu(gate) * up
        case "gelu_tanh":
            return jax.nn.gelu(gate, approximate=True) * up
        case "clamped_swiglu":
            gate = jnp.minimum(gate, config.swiglu_limit)
            up = jnp.clip(up, -config.swiglu_limit, config.swiglu_limit)
            return (up + 1.0) * (gate * jax.nn.sigmoid(SWIGLU_ALPHA * gate))
        case unknown:
            assert_never(unknown)
