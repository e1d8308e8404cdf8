"""resolve: what `auto` and None of an EngineConfig mean for a model and a platform."""

import dataclasses

from jinfer.config.engine import EngineConfig
from jinfer.config.model import ModelConfig
from jinfer.errors import ConfigError


def resolve(config: EngineConfig, model: ModelConfig, platform: str) -> EngineConfig:
    """Replaces every `auto` and None that depends on the model or the platform of the mesh."""
    dtype = config.dtype
    if dtype == "auto":
        dtype = "float32" if platform == "cpu" else "bfloat16"
    kv_dtype = config.kv_dtype
    if kv_dtype == "auto":
        # An int8 model has given up more precision than bfloat16 KV costs.
        kv_dtype = "bfloat16" if config.quantization == "int8" else dtype
    max_context = config.max_context or model.max_context
    if max_context > model.max_context and model.rope.kind != "dynamic":  # which stretches to any length
        raise ConfigError(f"max_context: {max_context} is more than the model's {model.max_context}")
    return dataclasses.replace(config, dtype=dtype, kv_dtype=kv_dtype, max_context=max_context,
                               max_logprobs=min(config.max_logprobs, model.vocab_size))
