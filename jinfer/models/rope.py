"""Rotary position embedding: inverse frequencies of every scaling kind, cos and sin tables, the rotation.

Half-split lanes (Hugging Face): lane i of the first half pairs with lane i of the second half. R is the
number of lanes that rotate, an even number <= H. Everything is float32 (frequencies float64 until the end).
"""

import math

import jax
import jax.numpy as jnp
import numpy as np

from jinfer.config.model import RopeConfig


def rotated_lanes(rope: RopeConfig, head_dim: int) -> int:
    """R: how many of the H lanes of a head rotate."""
    return int(head_dim * rope.partial)


def inverse_frequencies(rope: RopeConfig, head_dim: int, *, longer: bool = False) -> tuple[np.ndarray, float]:
    """Angles per position and the factor on cos and sin.

    For `dynamic` and `longrope` these are the frequencies up to the original context; beyond it they depend on the
    length (`dynamic_theta`, `longer`: those of longer sequences).

    Returns:
      float32 [R/2], and attention_factor (1 but for `yarn` and `longrope`).
    """
    lanes = rotated_lanes(rope, head_dim)
    plain = rope.theta ** -(np.arange(0, lanes, 2, dtype=np.float64) / lanes)
    factor = 1.0
    match rope.kind:
        case "linear":
            plain = plain / rope.factor
        case "llama3":
            plain = _llama3(plain, rope)
        case "yarn":
            plain, factor = _yarn(plain, rope, lanes), _yarn_attention_factor(rope)
        case "longrope":
            plain = plain / np.asarray(rope.long_factors if longer else rope.short_factors)
            factor = _longrope_attention_factor(rope)
    return plain.astype(np.float32), factor


def dynamic_theta(rope: RopeConfig, head_dim: int, length: jax.typing.ArrayLike) -> jax.Array:
    """Base of `dynamic` (NTK-aware) scaling for sequences of `length` tokens: float32, same shape.

    theta * (factor * len / orig - (factor - 1)) ** (R / (R - 2)) with len = max(length, orig).
    """
    lanes = rotated_lanes(rope, head_dim)
    original = float(rope.original_context)
    length = jnp.maximum(jnp.asarray(length, jnp.float32), original)
    stretch = rope.factor * length / original - (rope.factor - 1.0)
    return jnp.float32(rope.theta) * stretch ** (lanes / (lanes - 2))


def prompt_regime(rope: RopeConfig, prompt_length: int) -> int:
    """What a prompt's length changes in the rotation of its own positions: KV is alike only where this is equal.

    `dynamic` rotates a prompt beyond the original context for its length, `longrope` with other frequencies.
    """
    if rope.kind not in ("dynamic", "longrope") or prompt_length <= rope.original_context:
        return 0
    return prompt_length if rope.kind == "dynamic" else 1


def cos_sin(rope: RopeConfig, head_dim: int, positions: jax.Array,
            prompt_lengths: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Tables for T tokens; the attention factor is already in them.

    Args:
      positions: [T] int32, position of each token in its sequence.
      prompt_lengths: [T] int32, prompt length of each token's sequence. Read by `dynamic` and `longrope` only,
        where the token at position p is rotated for a sequence of max(prompt length, p + 1): a prompt is seen at
        full length however it is cut into chunks, and decode sees the sequence as it grows.

    Returns:
      cos, sin: [T, R/2] float32.
    """
    inverse, factor = inverse_frequencies(rope, head_dim)
    steps = positions.astype(jnp.float32)[:, None]
    if rope.kind == "dynamic":
        theta = dynamic_theta(rope, head_dim, jnp.maximum(prompt_lengths, positions + 1))
        lanes = rotated_lanes(rope, head_dim)
        exponents = jnp.asarray(-np.arange(0, lanes, 2) / lanes, jnp.float32)
        angles = steps * theta[:, None] ** exponents
    elif rope.kind == "longrope":
        long, _ = inverse_frequencies(rope, head_dim, longer=True)
        longer = jnp.maximum(prompt_lengths, positions + 1) > rope.original_context
        angles = steps * jnp.where(longer[:, None], jnp.asarray(long), jnp.asarray(inverse))
    else:
        angles = steps * jnp.asarray(inverse)
    return jnp.cos(angles) * jnp.float32(factor), jnp.sin(angles) * jnp.float32(factor)


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotates the first R lanes of x, computed in float32; the other lanes pass.

    Args:
      x: [T, ..., H], any float dtype.
      cos, sin: [T, R/2] float32.

    Returns:
      Same shape and dtype as x.
    """
    half = cos.shape[-1]
    table = (cos.shape[0], *(1,) * (x.ndim - 2), half)
    cos, sin = cos.reshape(table), sin.reshape(table)
    low, high, rest = jnp.split(x, (half, 2 * half), axis=-1)
    low, high = low.astype(jnp.float32), high.astype(jnp.float32)
    turned = jnp.concatenate([low * cos - high * sin, high * cos + low * sin], axis=-1)
    return jnp.concatenate([turned.astype(x.dtype), rest], axis=-1)


def _llama3(plain: np.ndarray, rope: RopeConfig) -> np.ndarray:
    """Llama 3.1: long wavelengths divided by factor, short ones kept, a linear blend between the bands."""
    turns = rope.original_context * plain / (2 * math.pi)  # full turns within the original context
    keep = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    keep = np.clip(keep, 0.0, 1.0)
    return (1 - keep) * plain / rope.factor + keep * plain


def _yarn(plain: np.ndarray, rope: RopeConfig, lanes: int) -> np.ndarray:
    """YaRN (arXiv 2309.00071, section 3.2): a ramp over lanes between kept and interpolated frequencies."""

    def lane_of(turns: float) -> float:
        return lanes * math.log(rope.original_context / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = lane_of(rope.beta_fast), lane_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, lanes - 1)
    if low == high:
        high += 0.001  # a step, not a division by zero
    interpolate = np.clip((np.arange(lanes // 2) - low) / (high - low), 0.0, 1.0)
    return plain / rope.factor * interpolate + plain * (1 - interpolate)


def _longrope_attention_factor(rope: RopeConfig) -> float:
    """LongRoPE (arXiv 2402.13753): sqrt(1 + ln(factor) / ln(original context)) unless given."""
    if rope.attention_factor is not None:
        return rope.attention_factor
    return 1.0 if rope.factor <= 1 else math.sqrt(1 + math.log(rope.factor) / math.log(rope.original_context))


def _yarn_attention_factor(rope: RopeConfig) -> float:
    """Factor on cos and sin: explicit, else from DeepSeek's mscale pair, else 0.1 ln(factor) + 1."""
    if rope.attention_factor is not None:
        return rope.attention_factor

    def scale(multiplier: float) -> float:
        return 1.0 if rope.factor <= 1 else 0.1 * multiplier * math.log(rope.factor) + 1.0

    if rope.mscale and rope.mscale_all_dim:
        return scale(rope.mscale) / scale(rope.mscale_all_dim)
    return scale(1.0)
