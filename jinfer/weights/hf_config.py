"""A Hugging Face folder's config.json and generation_config.json -> ModelConfig.

Old keys (`rope_theta`, `rope_scaling` with `type` or `rope_type`) and those of transformers 5
(`rope_parameters`) are both read. Whatever would change the maths and is not known is refused by name.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn, cast

from jinfer.config.model import LayerConfig, ModelConfig, RopeConfig, RopeKind
from jinfer.errors import ConfigError

_ARCHITECTURES = {"LlamaForCausalLM": "llama", "MistralForCausalLM": "mistral"}
_ROPE_COMMON = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
_ROPE_KEYS: dict[str, set[str]] = {
    "default": set(),
    "linear": {"factor"},
    "dynamic": {"factor", "original_max_position_embeddings"},
    "yarn": {"factor", "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow",
             "mscale", "mscale_all_dim", "truncate"},
    "llama3": {"factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"},
}
_REQUIRED = object()


def read_hf_config(folder: Path) -> ModelConfig:
    """ModelConfig of the model in `folder`. ConfigError names the file and the key."""
    main = _Section(folder / "config.json")
    kind = _architecture(main)
    generation_path = folder / "generation_config.json"
    generation = _Section(generation_path) if generation_path.exists() else main
    heads = main.integer("num_attention_heads")
    hidden = main.integer("hidden_size")
    head_dim = main.integer("head_dim", None)
    if head_dim is None:
        if hidden % heads:
            main.fail("head_dim", f"is absent, and num_attention_heads {heads} does not divide "
                                  f"hidden_size {hidden}")
        head_dim = hidden // heads
    attention_bias = kind == "llama" and main.flag("attention_bias", False)
    positions = main.integer("max_position_embeddings")
    rope = _rope(main, positions, head_dim)
    bos = main.token_ids("bos_token_id") or generation.token_ids("bos_token_id")
    return ModelConfig(
        family="llama",
        vocab_size=main.integer("vocab_size"),
        hidden_size=hidden,
        intermediate_size=main.integer("intermediate_size"),
        num_layers=main.integer("num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=main.integer("num_key_value_heads", None) or heads,
        head_dim=head_dim,
        max_context=context_length(rope, positions),
        norm_eps=main.number("rms_norm_eps", 1e-6),
        tie_embeddings=main.flag("tie_word_embeddings", False),
        qkv_bias=attention_bias,
        o_bias=attention_bias,
        mlp_bias=kind == "llama" and main.flag("mlp_bias", False),
        layers=(LayerConfig(window=_window(main, kind)),),
        rope=rope,
        bos_id=bos[0] if bos else None,
        eos_ids=tuple(dict.fromkeys(generation.token_ids("eos_token_id") + main.token_ids("eos_token_id"))),
    )


class _Section:
    """A JSON object with typed access; every complaint names the file and the key."""

    def __init__(self, path: Path, data: Mapping[str, Any] | None = None):
        self.path = path
        self.data = _load(path) if data is None else data

    def fail(self, key: str, message: str) -> NoReturn:
        raise ConfigError(f"{self.path}: {key}: {message}")

    def integer(self, key: str, default: Any = _REQUIRED) -> Any:
        return self._get(key, default, lambda v: isinstance(v, int) and not isinstance(v, bool) and v > 0,
                         "a positive integer")

    def number(self, key: str, default: Any = _REQUIRED) -> Any:
        value = self._get(key, default, lambda v: isinstance(v, int | float) and not isinstance(v, bool),
                          "a number")
        return value if value is None else float(value)

    def flag(self, key: str, default: Any = _REQUIRED) -> Any:
        return self._get(key, default, lambda v: isinstance(v, bool), "true or false")

    def token_ids(self, key: str) -> tuple[int, ...]:
        value = self.data.get(key)
        values = [] if value is None else value if isinstance(value, list) else [value]
        for item in values:
            if not isinstance(item, int) or isinstance(item, bool) or item < 0:
                self.fail(key, f"must be a token id or a list of them, got {value!r}")
        return tuple(values)

    def _get(self, key: str, default: Any, valid: Any, what: str) -> Any:
        value = self.data.get(key)
        if value is None:  # null means absent, as transformers reads it
            if default is _REQUIRED:
                self.fail(key, "is missing")
            return default
        if not valid(value):
            self.fail(key, f"must be {what}, got {value!r}")
        return value


def _load(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from None
    except ValueError as error:
        raise ConfigError(f"{path}: is not valid JSON: {error}") from None
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: must hold a JSON object")
    return data


def _architecture(main: _Section) -> str:
    """`llama` or `mistral`; refuses other architectures and options that change the maths."""
    known = ", ".join(_ARCHITECTURES)
    names = main.data.get("architectures")
    if not names:
        kind = main.data.get("model_type")
        if kind not in _ARCHITECTURES.values():
            main.fail("model_type", f"{kind!r} is not supported; supported architectures: {known}")
    else:
        if not isinstance(names, list) or names[0] not in _ARCHITECTURES:
            main.fail("architectures", f"{names!r} is not supported; supported: {known}")
        kind = _ARCHITECTURES[names[0]]
    if main.data.get("hidden_act", "silu") not in ("silu", "swish"):
        main.fail("hidden_act", f"{main.data['hidden_act']!r} is not supported; supported: silu")
    if main.data.get("rope_interleaved"):
        main.fail("rope_interleaved", "interleaved rotation is not supported")
    if main.data.get("quantization_config"):
        main.fail("quantization_config", "quantised safetensors checkpoints are not supported")
    return cast(str, kind)


def _window(main: _Section, kind: str) -> int | None:
    if kind != "mistral":
        return None  # transformers' llama has no window whatever the file says
    # an absent key means MistralConfig's default of 4096; null means none
    window = main.integer("sliding_window", None) if "sliding_window" in main.data else 4096
    types = set(main.data.get("layer_types") or ())
    if types == {"full_attention"}:
        return None
    if types - {"sliding_attention"}:
        main.fail("layer_types", f"a mix of {sorted(types)} is not supported")
    return window


def _rope(main: _Section, positions: int, head_dim: int) -> RopeConfig:
    new, old = main.data.get("rope_parameters"), main.data.get("rope_scaling")
    key = "rope_parameters" if new else "rope_scaling"
    values = new or old or {}
    if not isinstance(values, dict):
        main.fail(key, f"must be an object, got {values!r}")
    if any(isinstance(value, dict) for value in values.values()):
        main.fail(key, "parameters that differ by layer type are not supported")
    kind = values.get("rope_type", values.get("type", "default"))
    if kind not in _ROPE_KEYS:
        main.fail(f"{key}.rope_type", f"{kind!r} is not supported; supported: {', '.join(_ROPE_KEYS)}")
    for name in values:
        if name not in _ROPE_KEYS[kind] | _ROPE_COMMON:
            main.fail(f"{key}.{name}", f"is not a known parameter of rope type {kind!r}")
    scaling = _Section(Path(f"{main.path}: {key}"), values)
    partial = scaling.number("partial_rotary_factor", None)
    if partial is None:
        partial = main.number("partial_rotary_factor", 1.0)
    lanes = int(head_dim * partial)
    if not 0.0 < partial <= 1.0 or lanes < 2 or lanes % 2:
        main.fail("partial_rotary_factor", f"{partial} of head_dim {head_dim} is not an even number of lanes")
    theta = scaling.number("rope_theta", None)
    if theta is None:
        theta = main.number("rope_theta", 10_000.0)
    original = scaling.integer("original_max_position_embeddings", None)
    if original is None:
        original = main.integer("original_max_position_embeddings", positions)
    if kind == "dynamic":
        original = positions  # transformers reads this one, whatever the scaling object says
    factor = 1.0
    if kind == "yarn":
        factor = scaling.number("factor", None) or positions / original
    elif kind != "default":
        factor = scaling.number("factor")
    if not factor > 0:
        main.fail(f"{key}.factor", f"must be positive, got {factor}")
    options = {}
    if kind == "yarn":
        options = {n: scaling.number(n, None) for n in ("attention_factor", "mscale", "mscale_all_dim")}
        options["beta_fast"] = scaling.number("beta_fast", None) or 32.0
        options["beta_slow"] = scaling.number("beta_slow", None) or 1.0
        options["truncate"] = scaling.flag("truncate", True)
    elif kind == "llama3":
        options = {name: scaling.number(name) for name in ("low_freq_factor", "high_freq_factor")}
        if not options["low_freq_factor"] < options["high_freq_factor"]:
            main.fail(f"{key}.high_freq_factor", "must be greater than low_freq_factor")
    return RopeConfig(theta=theta, kind=cast(RopeKind, kind), factor=factor, original_context=original,
                      partial=partial, **options)


def context_length(rope: RopeConfig, positions: int) -> int:
    """Longest sequence in tokens, from the stored one: that is unextended for dynamic and may be for yarn."""
    if rope.kind in ("dynamic", "yarn"):
        return max(positions, int(rope.factor * rope.original_context))
    return positions
