"""Rotary metadata and factor tensors of a GGUF file -> RopeConfig."""

import dataclasses
import math
from collections.abc import Mapping

import numpy as np

from jinfer.config.model import RopeConfig
from jinfer.errors import CheckpointError
from jinfer.weights.gguf_keys import Keys, as_written

_SCALING = ("type", "factor", "attn_factor", "original_context_length", "finetuned", "yarn_beta_fast",
            "yarn_beta_slow", "yarn_attn_factor", "yarn_ext_factor", "yarn_log_multiplier", "alpha")
ROPE_KEYS = ("rope.dimension_count", "rope.freq_base", "rope.scale_linear", *(f"rope.scaling.{n}" for n in _SCALING))


def read_rope(keys: Keys, context: int, head_dim: int, factors: Mapping[str, np.ndarray], *,
              truncate: bool = True) -> RopeConfig:
    """The rotation of a model.

    Args:
      keys: its metadata.
      context: its context length, in positions.
      head_dim: H.
      factors: stored divisors of the frequencies, [R/2] each: `all` (Llama 3.1), `short` and `long` (longrope).
      truncate: of yarn, which the format has no key for.

    Raises ConfigError naming the key, CheckpointError naming a tensor of factors.
    """
    lanes = keys.integer("rope.dimension_count", head_dim)
    if not 2 <= lanes <= head_dim or lanes % 2:
        keys.fail("rope.dimension_count", f"must be an even number up to the head size {head_dim}, got {lanes}")
    scaled = _scaled(keys, context, bool(factors.get("long") is not None), truncate)
    rope = dataclasses.replace(scaled, partial=lanes / head_dim)
    if rope.kind == "longrope":
        return _longrope(keys, rope, context, lanes, factors)
    if "all" in factors:
        return _llama3_from_factors(keys, rope, factors["all"], head_dim)
    return rope


def _scaled(keys: Keys, context: int, long: bool, truncate: bool) -> RopeConfig:
    theta = keys.number("rope.freq_base", 10_000.0)
    original = keys.integer("rope.scaling.original_context_length", context)
    old_scale = keys.number("rope.scale_linear", 1.0)  # the key before rope.scaling.* existed
    kind = keys.get("rope.scaling.type") or ("linear" if old_scale != 1.0 else "none")
    factor = keys.number("rope.scaling.factor", old_scale) or 1.0
    for name in ("alpha", "yarn_log_multiplier", "yarn_ext_factor"):
        if keys.number(f"rope.scaling.{name}", 0.0) not in (0.0, 1.0 if name == "yarn_ext_factor" else 0.0):
            keys.fail(f"rope.scaling.{name}", "is not supported")
    # llama.cpp multiplies yarn's own attention scale by this one
    extra = keys.number("rope.scaling.attn_factor", 1.0) * keys.number("rope.scaling.yarn_attn_factor", 1.0)
    if long:
        if kind not in ("none", "longrope", "yarn"):
            keys.fail("rope.scaling.type", f"{kind!r} does not go with stored long and short factors")
        return RopeConfig(theta=theta, kind="longrope", original_context=original, attention_factor=extra)
    if kind in ("none", "linear"):
        if extra != 1.0:
            keys.fail("rope.scaling.attn_factor", f"{extra} is not supported without yarn or longrope")
        if kind == "none":
            return RopeConfig(theta=theta, original_context=original)
        return RopeConfig(theta=theta, kind="linear", factor=factor, original_context=original)
    if kind != "yarn":
        keys.fail("rope.scaling.type", f"{kind!r} is not supported; supported: none, linear, yarn, and longrope "
                                       "with its factors")
    scale = 1.0 if factor <= 1.0 else 0.1 * math.log(factor) + 1.0
    return RopeConfig(
        theta=theta, kind="yarn", factor=factor, original_context=original, truncate=truncate,
        attention_factor=None if extra == 1.0 else extra * scale,
        beta_fast=keys.number("rope.scaling.yarn_beta_fast", 32.0),
        beta_slow=keys.number("rope.scaling.yarn_beta_slow", 1.0))


def _longrope(keys: Keys, rope: RopeConfig, context: int, lanes: int,
              factors: Mapping[str, np.ndarray]) -> RopeConfig:
    for name in ("short", "long"):
        if name not in factors:
            raise CheckpointError(f"{keys.path}: tensor rope_factors_{name}.weight is missing")
        if factors[name].size != lanes // 2:
            raise CheckpointError(f"{keys.path}: tensor rope_factors_{name}.weight holds {factors[name].size} numbers "
                                  f"for {lanes // 2} frequencies")
    factor = context / rope.original_context
    derived = 1.0 if factor <= 1.0 else math.sqrt(1.0 + math.log(factor) / math.log(rope.original_context))
    stored = rope.attention_factor
    # float32 in the file: what the context lengths tell is the exact one
    same = stored is None or math.isclose(stored, derived, rel_tol=1e-6)
    short, long = (tuple(as_written(float(x)) for x in factors[name].reshape(-1)) for name in ("short", "long"))
    return dataclasses.replace(rope, factor=factor, attention_factor=None if same else stored,
                               short_factors=short, long_factors=long)


def _llama3_from_factors(keys: Keys, rope: RopeConfig, factors: np.ndarray, head_dim: int) -> RopeConfig:
    """Recovers Llama 3.1's parameters from the divisors its converter stored, and proves them lane by lane.

    Lanes of the lowest band are divided by `factor`; a lane of the middle band tells the original context.
    The bounds of the band are those of every published Llama (1 and 4).
    """
    from jinfer.models.rope import inverse_frequencies  # imports JAX, which other files do not need here

    factors = factors.astype(np.float64).reshape(-1)
    if np.all(factors == 1.0):
        return rope
    plain = rope.theta ** -(np.arange(0, head_dim, 2) / head_dim)
    factor = float(factors.max())
    if rope.kind == "default" and factors.shape == plain.shape and factor > 1.0 and factors.min() >= 1.0:
        keep = (1 / factors - 1 / factor) / (1 - 1 / factor)  # 1: untouched, 0: divided by factor
        middle = np.flatnonzero((keep > 0.01) & (keep < 0.99))
        original = 8192
        if middle.size:
            lane = middle[0]
            original = round(float((1 + 3 * keep[lane]) * 2 * math.pi / plain[lane]))
        fitted = dataclasses.replace(rope, kind="llama3", factor=factor, original_context=original)
        if np.allclose(inverse_frequencies(fitted, head_dim)[0] * factors, plain, rtol=1e-4, atol=0.0):
            return fitted
    raise CheckpointError(f"{keys.path}: tensor rope_freqs.weight is not the llama3 scaling; "
                          "other stored rope factors are not supported")
