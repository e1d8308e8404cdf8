"""Metadata and tensor table of a GGUF file -> ModelConfig.

Key names: docs/gguf.md of the ggml project and gguf-py's constants.py. What the format leaves out (soft caps and
patterns of windows that are the same in every published model) is as llama.cpp fills it in. Keys that would change
the maths and are not known are refused.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jinfer.config.model import ExpertsConfig, LayerConfig, ModelConfig, RopeConfig, layer_runs
from jinfer.errors import CheckpointError, ConfigError
from jinfer.weights.gguf_keys import Keys
from jinfer.weights.gguf_meta import GgufHead
from jinfer.weights.gguf_rope import ROPE_KEYS, read_rope
from jinfer.weights.hf_rope import context_length

Fields = dict[str, Any]
_COMMON = (
    "block_count", "context_length", "embedding_length", "feed_forward_length", "vocab_size", "tensor_data_layout",
    "attention.causal", "attention.head_count", "attention.head_count_kv", "attention.key_length",
    "attention.value_length", "attention.layer_norm_rms_epsilon", *ROPE_KEYS)
_EXPERTS = ("expert_count", "expert_used_count", "expert_feed_forward_length", "expert_gating_func",
            "expert_weights_norm", "expert_weights_scale")
_WINDOW, _PATTERN, _LOCAL_BASE = "attention.sliding_window", "attention.sliding_window_pattern", "rope.freq_base_swa"
_CAPS = ("attn_logit_softcapping", "final_logit_softcapping")
_SOFTMAX, _SOFTMAX_OF_CHOSEN = 1, 3  # expert_gating_func; the two are one after the weights are normalised
# llama.cpp tells the models that scale queries by D / N instead of H by their depth (gemma_pytorch's config.py).
_SCALED_BY_WIDTH = {"gemma2": 46, "gemma3": 62}


@dataclass(frozen=True, slots=True)
class _Model:
    """What every architecture has, as read so far."""

    keys: Keys
    architecture: str
    tensors: Mapping[str, Any]
    layers: int
    hidden: int
    heads: int
    head_dim: int
    context: int


@dataclass(frozen=True, slots=True)
class _Architecture:
    """Attributes:
    family: of ModelConfig.
    keys: that it reads besides the common ones.
    options: fields of ModelConfig of its own.
    """

    family: str
    keys: tuple[str, ...] = ()
    options: Callable[[_Model], Fields] = lambda model: {}


def read_gguf_config(path: Path, head: GgufHead, rope_factors: Mapping[str, np.ndarray]) -> ModelConfig:
    """ModelConfig of a GGUF file.

    Args:
      path: for messages.
      head: its metadata and tensor table.
      rope_factors: the stored divisors of frequencies (GgufReader.rope_factors).

    Raises ConfigError naming the key, CheckpointError naming a missing tensor.
    """
    name = head.metadata.get("general.architecture")
    if name not in _ARCHITECTURES:
        raise ConfigError(f"{path}: general.architecture {name!r} is not supported; supported: "
                          f"{', '.join(_ARCHITECTURES)}")
    if head.metadata.get("split.count", 0) > 1:
        raise CheckpointError(f"{path}: is one of {head.metadata['split.count']} parts; join them with "
                              "llama-gguf-split --merge")
    keys, architecture = Keys(path, name, head.metadata), _ARCHITECTURES[name]
    keys.refuse_all_but((*_COMMON, *architecture.keys))
    if not keys.flag("attention.causal", True):
        keys.fail("attention.causal", "must be true")
    if "token_embd.weight" not in head.tensors:
        raise CheckpointError(f"{path}: tensor token_embd.weight is missing")
    heads, hidden = keys.integer("attention.head_count"), keys.integer("embedding_length")
    if not heads:
        keys.fail("attention.head_count", "must be positive")
    head_dim = keys.integer("attention.key_length", hidden // heads)
    if keys.integer("attention.value_length", head_dim) != head_dim:
        keys.fail("attention.value_length", f"must equal the key length {head_dim}")
    if name == "llama" and keys.integer("rope.dimension_count", head_dim) != head_dim:
        keys.fail("rope.dimension_count", f"must equal the head size {head_dim}")
    context = keys.integer("context_length")
    model = _Model(keys, name, head.tensors, keys.integer("block_count"), hidden, heads, head_dim, context)
    rope = read_rope(keys, context, head_dim, rope_factors, truncate=name != "gpt-oss")
    fields: Fields = {
        "family": architecture.family,
        "vocab_size": head.tensors["token_embd.weight"].shape[0],
        "hidden_size": hidden,
        "intermediate_size": keys.integer("feed_forward_length"),
        "num_layers": model.layers,
        "num_heads": heads,
        "num_kv_heads": keys.integer("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_context": context_length(rope, context),
        "norm_eps": keys.number("attention.layer_norm_rms_epsilon"),
        "tie_embeddings": "output.weight" not in head.tensors,
        "qkv_bias": "blk.0.attn_q.bias" in head.tensors,
        "o_bias": "blk.0.attn_output.bias" in head.tensors,
        "mlp_bias": "blk.0.ffn_down.bias" in head.tensors,
        "rope": rope,
        "bos_id": next(iter(_token_ids(path, head, "bos")), None),
        "eos_ids": _token_ids(path, head, "eos", "eot", "eom"),
    }
    return ModelConfig(**(fields | architecture.options(model)))


def _token_ids(path: Path, head: GgufHead, *kinds: str) -> tuple[int, ...]:
    """Special tokens of those kinds, as far as the file has them."""
    ids, rows = [], head.tensors["token_embd.weight"].shape[0]
    for kind in kinds:
        key = f"tokenizer.ggml.{kind}_token_id"
        value = head.metadata.get(key)
        if value is None or value in (-1, 2**32 - 1):  # llama.cpp's spellings of none
            continue
        if not isinstance(value, int) or not 0 <= value < rows:
            raise ConfigError(f"{path}: {key}: {value!r} is none of {rows} tokens")
        ids.append(value)
    return tuple(dict.fromkeys(ids))


def _uniform(model: _Model) -> Fields:
    return {"layers": (LayerConfig(window=model.keys.integer(_WINDOW, 0) or None),)}


def _llama(model: _Model) -> Fields:
    if not model.keys.integer("expert_count", 0):
        return _uniform(model)
    return {**_uniform(model), "family": "mixtral", "experts": _experts(model)}


def _gemma(model: _Model) -> Fields:
    return {"activation": "gelu_tanh"}


def _gemma2(model: _Model) -> Fields:
    keys = model.keys
    if keys.number(_LOCAL_BASE, keys.number("rope.freq_base", 10_000.0)) != keys.number("rope.freq_base", 10_000.0):
        keys.fail(_LOCAL_BASE, "must equal rope.freq_base")
    return {**_gemma(model), "query_scale": _query_scale(model),
            "attention_soft_cap": keys.number(_CAPS[0], 50.0) or None,
            "final_soft_cap": keys.number(_CAPS[1], 30.0) or None,
            "layers": _windows(model, keys.integer(_WINDOW, 4096), period=2)}


def _gemma3(model: _Model) -> Fields:
    keys = model.keys
    # neither llama.cpp nor transformers scales the local rotation
    local = RopeConfig(theta=keys.number(_LOCAL_BASE, 10_000.0), original_context=model.context)
    return {**_gemma(model), "query_scale": _query_scale(model), "qk_norm": "head", "local_rope": local,
            "attention_soft_cap": keys.number(_CAPS[0], 0.0) or None,
            "final_soft_cap": keys.number(_CAPS[1], 0.0) or None,
            "layers": _windows(model, keys.integer(_WINDOW, 0), period=6, local_rope=True)}


def _qwen3moe(model: _Model) -> Fields:
    return {"qk_norm": "head", "experts": _experts(model)}


def _gpt_oss(model: _Model) -> Fields:
    return {"sinks": True, "activation": "clamped_swiglu", "experts": _experts(model, router_bias=True, bias=True),
            "layers": _windows(model, model.keys.integer(_WINDOW), period=2)}


def _query_scale(model: _Model) -> float:
    by_width = _SCALED_BY_WIDTH[model.architecture] == model.layers
    return float(model.hidden // model.heads if by_width else model.head_dim) ** -0.5


def _windows(model: _Model, window: int, *, period: int, local_rope: bool = False) -> tuple[LayerConfig, ...]:
    """Every `period`-th layer sees all, the others a window; the file may give another period, or flags by layer."""
    if not window:
        return (LayerConfig(),)
    pattern = model.keys.get(_PATTERN)
    if isinstance(pattern, list):
        if len(pattern) < model.layers:
            model.keys.fail(_PATTERN, f"has {len(pattern)} values for {model.layers} layers")
        sliding = [bool(flag) for flag in pattern[:model.layers]]
    else:
        period = model.keys.integer(_PATTERN, period)
        sliding = [period == 0 or i % period < period - 1 for i in range(model.layers)]
    return layer_runs([LayerConfig(window=window, local_rope=local_rope) if slides else LayerConfig()
                       for slides in sliding])


def _experts(model: _Model, *, router_bias: bool = False, bias: bool = False) -> ExpertsConfig:
    keys = model.keys
    gating = keys.integer("expert_gating_func", _SOFTMAX)
    normalise = keys.flag("expert_weights_norm", True)
    if gating not in (_SOFTMAX, _SOFTMAX_OF_CHOSEN) or (gating == _SOFTMAX_OF_CHOSEN and not normalise):
        keys.fail("expert_gating_func", f"{gating} is not supported; supported: {_SOFTMAX} (softmax)")
    return ExpertsConfig(
        count=keys.integer("expert_count"), active=keys.integer("expert_used_count"),
        intermediate_size=keys.integer("expert_feed_forward_length", 0) or keys.integer("feed_forward_length"),
        normalise=normalise, scale=keys.number("expert_weights_scale", 1.0) or 1.0,
        router_bias=router_bias, bias=bias)


_ARCHITECTURES: dict[str, _Architecture] = {
    "llama": _Architecture("llama", (_WINDOW, *_EXPERTS), _llama),
    "qwen2": _Architecture("llama"),
    "qwen3": _Architecture("llama", options=lambda model: {"qk_norm": "head"}),
    "qwen3moe": _Architecture("qwen3_moe", _EXPERTS, _qwen3moe),
    "gemma": _Architecture("gemma", options=_gemma),
    "gemma2": _Architecture("gemma2", (_WINDOW, _PATTERN, _LOCAL_BASE, *_CAPS), _gemma2),
    "gemma3": _Architecture("gemma3", (_WINDOW, _PATTERN, _LOCAL_BASE, *_CAPS), _gemma3),
    "phi3": _Architecture("phi3", (_WINDOW,), _uniform),
    "olmo2": _Architecture("olmo2", options=lambda model: {"qk_norm": "all"}),
    "gpt-oss": _Architecture("gpt_oss", (_WINDOW, _PATTERN, *_EXPERTS), _gpt_oss),
}
