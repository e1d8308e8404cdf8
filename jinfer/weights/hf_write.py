"""ModelConfig -> config.json and generation_config.json of a Hugging Face folder, as `read_hf_config` reads them.

Keys are the old ones (`rope_theta`, `rope_scaling`), which every release of transformers reads.
"""

from collections.abc import Callable
from typing import Any

from jinfer.config.model import ModelConfig, RopeConfig
from jinfer.errors import ConfigError

Keys = dict[str, Any]

_ACTIVATIONS = {"silu": "silu", "gelu_tanh": "gelu_pytorch_tanh", "clamped_swiglu": "silu"}


def hf_config(config: ModelConfig, dtype: str) -> Keys:
    """The contents of config.json; `dtype` names the stored one. ConfigError if no known architecture is like this."""
    if config.family not in _FAMILIES:
        raise ConfigError(f"model.family: {config.family!r} has no Hugging Face architecture that is written; "
                          f"known: {', '.join(_FAMILIES)}")
    keys = _FAMILIES[config.family](config)
    activation = _ACTIVATIONS[config.activation]
    return {
        "architectures": [keys.pop("architecture")],
        "model_type": keys.pop("model_type"),
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": activation,
        "max_position_embeddings": _positions(config),
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tie_embeddings,
        **_special(config),
        **_rope(config, config.rope),
        "torch_dtype": dtype,
        **keys,
    }


def hf_generation_config(config: ModelConfig) -> Keys:
    """The contents of generation_config.json: the ids that begin and end a sequence."""
    return _special(config)


def _special(config: ModelConfig) -> Keys:
    """null, not an absent key, says that there is none: readers know defaults of an architecture."""
    eos = config.eos_ids
    return {"bos_token_id": config.bos_id, "eos_token_id": None if not eos else eos[0] if len(eos) == 1 else list(eos)}


def _positions(config: ModelConfig) -> int:
    # dynamic scaling starts from the stored context, and readers extend it
    return config.rope.original_context if config.rope.kind == "dynamic" else config.max_context


def _rope(config: ModelConfig, rope: RopeConfig) -> Keys:
    keys: Keys = {"rope_theta": rope.theta, "rope_scaling": _scaling(config, rope)}
    inside = rope.kind in ("yarn", "llama3")  # where the original context stands
    if not inside and rope.original_context and (
            rope.original_context != _positions(config) or rope.kind == "longrope"):
        keys["original_max_position_embeddings"] = rope.original_context
    if rope.partial != 1.0:
        keys["partial_rotary_factor"] = rope.partial
    return keys


def _scaling(config: ModelConfig, rope: RopeConfig) -> Keys | None:
    if rope.kind == "default":
        return None
    keys: Keys = {"rope_type": rope.kind, "factor": rope.factor}
    match rope.kind:
        case "yarn":
            keys |= {"original_max_position_embeddings": rope.original_context, "beta_fast": rope.beta_fast,
                     "beta_slow": rope.beta_slow}
            keys |= _given(attention_factor=rope.attention_factor, mscale=rope.mscale,
                           mscale_all_dim=rope.mscale_all_dim)
            if not rope.truncate:
                keys["truncate"] = False
        case "llama3":
            keys |= {"original_max_position_embeddings": rope.original_context,
                     "low_freq_factor": rope.low_freq_factor, "high_freq_factor": rope.high_freq_factor}
        case "longrope":
            # older releases allow these three only, and derive the factor
            keys = {"type": "longrope", "short_factor": list(rope.short_factors),
                    "long_factor": list(rope.long_factors)}
            keys |= _given(attention_factor=rope.attention_factor)
            if rope.factor != _positions(config) / rope.original_context:
                keys["factor"] = rope.factor
    return keys


def _given(**values: Any) -> Keys:
    return {name: value for name, value in values.items() if value is not None}


def _windows(config: ModelConfig) -> Keys:
    """The window, and which layers have it."""
    kinds = config.layer_kinds
    windows = {kind.window for kind in kinds if kind.window is not None}
    if len(windows) > 1:
        raise ConfigError(f"model.layers: windows of {sorted(windows)} in one model have no Hugging Face spelling")
    types = ["full_attention" if kind.window is None else "sliding_attention" for kind in kinds]
    return {"sliding_window": windows.pop() if windows else None, "layer_types": types}


def _uniform_window(config: ModelConfig) -> int | None:
    windows = {kind.window for kind in config.layer_kinds}
    if len(windows) > 1:
        raise ConfigError(f"model.layers: {config.family} layers have one window, not several")
    return windows.pop()


def _llama(config: ModelConfig) -> Keys:
    """Llama, Mistral, Qwen 2 or Qwen 3: one family here."""
    sliding = any(kind.window for kind in config.layer_kinds)
    if config.qk_norm == "head":
        return {"architecture": "Qwen3ForCausalLM", "model_type": "qwen3", "attention_bias": config.qkv_bias,
                **_switched(config)}
    if config.qkv_bias and not config.o_bias:
        return {"architecture": "Qwen2ForCausalLM", "model_type": "qwen2", **_switched(config)}
    if sliding:
        return {"architecture": "MistralForCausalLM", "model_type": "mistral", **_windows(config)}
    return {"architecture": "LlamaForCausalLM", "model_type": "llama", "attention_bias": config.qkv_bias,
            "mlp_bias": config.mlp_bias}


def _switched(config: ModelConfig) -> Keys:
    """Qwen's window has a switch of its own."""
    keys = _windows(config)
    return {"use_sliding_window": keys["sliding_window"] is not None, **keys}


def _mixtral(config: ModelConfig) -> Keys:
    assert config.experts is not None
    return {"architecture": "MixtralForCausalLM", "model_type": "mixtral",
            "sliding_window": _uniform_window(config), "num_local_experts": config.experts.count,
            "num_experts_per_tok": config.experts.active}


def _qwen3_moe(config: ModelConfig) -> Keys:
    assert config.experts is not None
    window = _uniform_window(config)
    return {"architecture": "Qwen3MoeForCausalLM", "model_type": "qwen3_moe", "attention_bias": config.qkv_bias,
            "use_sliding_window": window is not None, "sliding_window": window,
            "num_experts": config.experts.count, "num_experts_per_tok": config.experts.active,
            "moe_intermediate_size": config.experts.intermediate_size, "norm_topk_prob": config.experts.normalise,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [i for i, kind in enumerate(config.layer_kinds) if kind.dense]}


def _gemma(config: ModelConfig) -> Keys:
    return {"architecture": "GemmaForCausalLM", "model_type": "gemma", "attention_bias": config.qkv_bias,
            "hidden_activation": _ACTIVATIONS[config.activation]}


def _gemma2(config: ModelConfig) -> Keys:
    return {"architecture": "Gemma2ForCausalLM", "model_type": "gemma2", **_capped(config), **_windows(config)}


def _gemma3(config: ModelConfig) -> Keys:
    assert config.local_rope is not None
    return {"architecture": "Gemma3ForCausalLM", "model_type": "gemma3_text", **_capped(config), **_windows(config),
            "rope_local_base_freq": config.local_rope.theta}


def _capped(config: ModelConfig) -> Keys:
    """What Gemma 2 and 3 share."""
    scalar = float(config.head_dim) if config.query_scale is None else config.query_scale**-2.0
    near = round(scalar)
    return {"attention_bias": config.qkv_bias, "hidden_activation": _ACTIVATIONS[config.activation],
            "query_pre_attn_scalar": near if abs(scalar - near) < 1e-6 * scalar else scalar,
            "attn_logit_softcapping": config.attention_soft_cap, "final_logit_softcapping": config.final_soft_cap}


def _phi3(config: ModelConfig) -> Keys:
    # the class's default is not what a model with another context was trained on
    original = {"original_max_position_embeddings": config.rope.original_context}
    return {"architecture": "Phi3ForCausalLM", "model_type": "phi3", "sliding_window": _uniform_window(config),
            **original}


def _olmo2(config: ModelConfig) -> Keys:
    return {"architecture": "Olmo2ForCausalLM", "model_type": "olmo2", "attention_bias": config.qkv_bias}


def _gpt_oss(config: ModelConfig) -> Keys:
    assert config.experts is not None
    return {"architecture": "GptOssForCausalLM", "model_type": "gpt_oss", "attention_bias": config.qkv_bias,
            **_windows(config), "swiglu_limit": config.swiglu_limit, "num_local_experts": config.experts.count,
            "num_experts_per_tok": config.experts.active}


def _deepseek(config: ModelConfig) -> Keys:
    latent, experts = config.latent, config.experts
    assert latent is not None
    keys: Keys = {
        "num_key_value_heads": config.num_heads, "head_dim": latent.rope_dim,  # what transformers writes there
        "q_lora_rank": latent.q_rank, "kv_lora_rank": latent.kv_rank, "qk_nope_head_dim": latent.nope_dim,
        "qk_rope_head_dim": latent.rope_dim, "v_head_dim": latent.value_dim, "attention_bias": config.qkv_bias}
    dense = [kind.dense for kind in config.layer_kinds]
    if experts is None:
        return {"architecture": "DeepseekV3ForCausalLM", "model_type": "deepseek_v3", **keys,
                "rope_interleave": config.rope.interleaved, "first_k_dense_replace": config.num_layers,
                "moe_intermediate_size": config.intermediate_size}
    keys |= {"n_routed_experts": experts.count, "num_experts_per_tok": experts.active,
             "moe_intermediate_size": experts.intermediate_size, "n_shared_experts": experts.shared or None,
             "routed_scaling_factor": experts.scale, "norm_topk_prob": experts.normalise,
             "first_k_dense_replace": sum(dense), "scoring_func": experts.scoring}
    if experts.scoring == "sigmoid":
        return {"architecture": "DeepseekV3ForCausalLM", "model_type": "deepseek_v3", **keys,
                "topk_method": "noaux_tc", "n_group": experts.groups, "topk_group": experts.active_groups,
                "rope_interleave": config.rope.interleaved}
    grouped = experts.groups > 1
    return {"architecture": "DeepseekV2ForCausalLM", "model_type": "deepseek_v2", **keys,
            "topk_method": "group_limited_greedy" if grouped else "greedy",
            "n_group": experts.groups, "topk_group": experts.active_groups}


_FAMILIES: dict[str, Callable[[ModelConfig], Keys]] = {
    "llama": _llama, "qwen3_moe": _qwen3_moe, "mixtral": _mixtral, "gemma": _gemma, "gemma2": _gemma2,
    "gemma3": _gemma3, "phi3": _phi3, "olmo2": _olmo2, "gpt_oss": _gpt_oss, "deepseek": _deepseek,
}
