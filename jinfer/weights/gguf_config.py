"""Metadata and tensor table of a llama-architecture GGUF file -> ModelConfig.

Key names: docs/gguf.md of the ggml project. Keys that would change the maths and are not known are refused.
"""

import dataclasses
import math
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from jinfer.config.model import LayerConfig, ModelConfig, RopeConfig
from jinfer.errors import CheckpointError, ConfigError
from jinfer.weights.gguf_meta import GgufHead
from jinfer.weights.hf_config import context_length

_REFUSED = (
    "expert_count", "logit_scale", "residual_scale", "embedding_scale", "attn_logit_softcapping",
    "final_logit_softcapping", "use_parallel_residual", "attention.clamp_kqv", "attention.max_alibi_bias",
    "attention.scale", "attention.sliding_window_pattern", "attention.temperature_scale",
    "rope.dimension_sections",
)
_SCALING = ("type", "factor", "attn_factor", "original_context_length", "finetuned", "yarn_beta_fast",
            "yarn_beta_slow", "yarn_attn_factor", "yarn_ext_factor", "yarn_log_multiplier", "alpha")


def read_gguf_config(path: Path, head: GgufHead, rope_factors: np.ndarray | None) -> ModelConfig:
    """ModelConfig of a GGUF file.

    Args:
      path: for messages.
      head: its metadata and tensor table.
      rope_factors: the stored rope factors [R/2], if any: Llama 3.1's scaling is in the file as these only.

    Raises ConfigError naming the key, CheckpointError naming a missing tensor.
    """
    keys = _Keys(path, head.metadata)
    architecture = head.metadata.get("general.architecture")
    if architecture != "llama":
        raise ConfigError(f"{path}: general.architecture {architecture!r} is not supported; supported: llama")
    for name in _REFUSED:
        value = keys.get(name)
        if value not in (None, False, 0) and not (name.endswith("_scale") and value == 1.0):
            keys.fail(name, f"{value!r} is not supported")
    if "token_embd.weight" not in head.tensors:
        raise CheckpointError(f"{path}: tensor token_embd.weight is missing")
    heads, hidden = keys.integer("attention.head_count"), keys.integer("embedding_length")
    head_dim = keys.integer("attention.key_length", hidden // heads)
    if keys.integer("attention.value_length", head_dim) != head_dim:
        keys.fail("attention.value_length", f"must equal the key length {head_dim}")
    if keys.integer("rope.dimension_count", head_dim) != head_dim:
        keys.fail("rope.dimension_count", f"must equal the head size {head_dim}")
    context = keys.integer("context_length")
    rope = _rope(keys, context)
    if rope_factors is not None:
        rope = _llama3_from_factors(keys, rope, rope_factors, head_dim)
    return ModelConfig(
        family="llama",
        vocab_size=head.tensors["token_embd.weight"].shape[0],
        hidden_size=hidden,
        intermediate_size=keys.integer("feed_forward_length"),
        num_layers=keys.integer("block_count"),
        num_heads=heads,
        num_kv_heads=keys.integer("attention.head_count_kv", heads),
        head_dim=head_dim,
        max_context=context_length(rope, context),
        norm_eps=keys.number("attention.layer_norm_rms_epsilon"),
        tie_embeddings="output.weight" not in head.tensors,
        qkv_bias="blk.0.attn_q.bias" in head.tensors,
        o_bias="blk.0.attn_output.bias" in head.tensors,
        mlp_bias="blk.0.ffn_down.bias" in head.tensors,
        layers=(LayerConfig(window=keys.integer("attention.sliding_window", 0) or None),),
        rope=rope,
        bos_id=head.metadata.get("tokenizer.ggml.bos_token_id"),
        eos_ids=tuple(dict.fromkeys(
            head.metadata[key] for kind in ("eos", "eot", "eom")
            if (key := f"tokenizer.ggml.{kind}_token_id") in head.metadata)),
    )


class _Keys:
    """Typed access to the `llama.` metadata; every complaint names the file and the key."""

    def __init__(self, path: Path, metadata: dict[str, Any]):
        self.path, self.metadata = path, metadata

    def fail(self, name: str, message: str) -> NoReturn:
        raise ConfigError(f"{self.path}: llama.{name}: {message}")

    def get(self, name: str) -> Any:
        return self.metadata.get(f"llama.{name}")

    def integer(self, name: str, default: int | None = None) -> int:
        return self._typed(name, default, int, "a whole number")

    def number(self, name: str, default: float | None = None) -> float:
        return float(self._typed(name, default, int | float, "a number"))

    def _typed(self, name: str, default: Any, kind: Any, what: str) -> Any:
        value = self.get(name)
        if isinstance(value, list) and value and len(set(value)) == 1:
            value = value[0]  # a value a layer, all the same
        if value is None:
            if default is None:
                self.fail(name, "is missing")
            return default
        if not isinstance(value, kind) or isinstance(value, bool) or value < 0:
            self.fail(name, f"must be {what}, got {value!r}")
        return value


def _rope(keys: _Keys, context: int) -> RopeConfig:
    prefix = "llama.rope.scaling."
    for key in keys.metadata:
        if key.startswith(prefix) and key.removeprefix(prefix) not in _SCALING:
            keys.fail(f"rope.scaling.{key.removeprefix(prefix)}", "is not a known parameter")
    theta = keys.number("rope.freq_base", 10_000.0)
    original = keys.integer("rope.scaling.original_context_length", context)
    old_scale = keys.number("rope.scale_linear", 1.0)  # the key before rope.scaling.* existed
    kind = keys.get("rope.scaling.type") or ("linear" if old_scale != 1.0 else "none")
    factor = keys.number("rope.scaling.factor", old_scale) or 1.0
    if kind == "none":
        return RopeConfig(theta=theta, original_context=original)
    if kind == "linear":
        return RopeConfig(theta=theta, kind="linear", factor=factor, original_context=original)
    if kind != "yarn":
        keys.fail("rope.scaling.type", f"{kind!r} is not supported; supported: none, linear, yarn")
    for name in ("alpha", "yarn_log_multiplier", "yarn_ext_factor"):
        if keys.number(f"rope.scaling.{name}", 0.0) not in (0.0, 1.0 if name == "yarn_ext_factor" else 0.0):
            keys.fail(f"rope.scaling.{name}", "is not supported")
    # llama.cpp multiplies yarn's own attention scale by this one
    extra = keys.number("rope.scaling.attn_factor", 1.0) * keys.number("rope.scaling.yarn_attn_factor", 1.0)
    scale = 1.0 if factor <= 1.0 else 0.1 * math.log(factor) + 1.0
    return RopeConfig(
        theta=theta, kind="yarn", factor=factor, original_context=original,
        attention_factor=None if extra == 1.0 else extra * scale,
        beta_fast=keys.number("rope.scaling.yarn_beta_fast", 32.0),
        beta_slow=keys.number("rope.scaling.yarn_beta_slow", 1.0))


def _llama3_from_factors(keys: _Keys, rope: RopeConfig, factors: np.ndarray, head_dim: int) -> RopeConfig:
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
