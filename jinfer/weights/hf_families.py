"""Which Hugging Face architectures are read, and what each makes of its options: fields of ModelConfig.

Defaults are those of transformers' configuration classes; what an option means is what its modelling code does
with it.
"""

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from jinfer.config.model import Activation, LatentConfig
from jinfer.weights import hf_moe
from jinfer.weights.hf_layers import (
    alternating,
    by_pattern,
    every_nth_full,
    last_layers_slide,
    switched_window,
    uniform,
)
from jinfer.weights.hf_rope import read_rope, read_rope_by_layer_type
from jinfer.weights.hf_section import Section

Fields = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Architecture:
    """Attributes:
    family: of ModelConfig. model_type: its name in files that name no architecture.
    options: fields of ModelConfig beside the common ones; `head_dim` and `rope` are always among them.
    reads: the options of `_OFF` that it has.
    kv_heads: K of files without one; None is one for each query head.
    norm_eps, tied, bos, eos: of files without one.
    shapes: keys that published files leave out, and their values.
    """

    family: str
    model_type: str
    options: Callable[[Section], Fields]
    reads: tuple[str, ...] = ()
    kv_heads: int | None = None
    norm_eps: float = 1e-6
    tied: bool = False
    bos: tuple[int, ...] = ()
    eos: tuple[int, ...] = ()
    shapes: dict[str, int] = field(default_factory=dict)

    def refuse_other_options(self, main: Section) -> None:
        """ConfigError for an option that the architecture does not have and that is not switched off."""
        for key, off in _OFF.items():
            if key not in self.reads and main.data.get(key) not in off:
                main.fail(key, f"{main.data[key]!r} is not supported")


# Options of some architecture that have no tensors, so that only a refusal tells; and what switches them off.
_OFF: dict[str, tuple[Any, ...]] = {
    "attn_logit_softcapping": (None,), "final_logit_softcapping": (None,), "query_pre_attn_scalar": (None,),
    "use_bidirectional_attention": (None, False), "rope_interleaved": (None, False), "alibi": (None, False),
    "logit_scale": (None, 1), "logits_scaling": (None, 1), "embedding_multiplier": (None, 1),
    "residual_multiplier": (None, 1), "attention_multiplier": (None,), "clip_qkv": (None,),
    "attention_chunk_size": (None,), "attn_temperature_tuning": (None, False), "no_rope_layers": (None, []),
    "moe_layer_freq": (None, 1), "swiglu_alpha": (None, 1.702),
}
_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh"}


def _activation(main: Section, key: str = "hidden_act", default: str = "silu", **more: Activation) -> Activation:
    names, name = _ACTIVATIONS | more, main.data.get(key) or default
    if name not in names:
        main.fail(key, f"{name!r} is not supported; supported: {', '.join(names)}")
    return names[name]


def _heads(main: Section, default: int | None = None) -> int:
    """H; null is hidden_size / num_attention_heads, and so is absence where the architecture has no default."""
    given = main.integer("head_dim", default, null=None)
    if given is not None:
        return int(given)
    heads, hidden = main.integer("num_attention_heads"), main.integer("hidden_size")
    if hidden % heads:
        main.fail("head_dim", f"is absent, and num_attention_heads {heads} does not divide hidden_size {hidden}")
    return int(hidden // heads)


def _rotated(main: Section, default: int | None = None, **options: Any) -> Fields:
    """Width and rotation of ordinary heads."""
    lanes = _heads(main, default)
    return {"head_dim": lanes, "rope": read_rope(main, main.integer("max_position_embeddings"), lanes, **options)}


def _biases(main: Section, *, default: bool = False) -> Fields:
    bias = main.flag("attention_bias", default)
    return {"qkv_bias": bias, "o_bias": bias}


def _llama(main: Section) -> Fields:
    # no window, whatever the file says: transformers has none here
    return _rotated(main) | _biases(main) | {
        "mlp_bias": main.flag("mlp_bias", False), "activation": _activation(main)}


def _mistral(main: Section) -> Fields:
    window = main.integer("sliding_window", 4096, null=None)
    layers = by_pattern(main, window, [window is not None] * main.integer("num_hidden_layers"))
    return _rotated(main) | {"layers": layers, "activation": _activation(main)}


def _qwen2(main: Section) -> Fields:
    return _rotated(main) | {"qkv_bias": True, "layers": last_layers_slide(main), "activation": _activation(main)}


def _qwen3(main: Section) -> Fields:
    return _rotated(main, 128) | _biases(main) | {
        "qk_norm": "head", "layers": last_layers_slide(main), "activation": _activation(main)}


def _qwen3_moe(main: Section) -> Fields:
    return _rotated(main) | _biases(main) | hf_moe.qwen3_experts(main, switched_window(main)) | {
        "qk_norm": "head", "activation": _activation(main)}


def _mixtral(main: Section) -> Fields:
    return _rotated(main, theta=1e6) | {
        "layers": uniform(main.integer("sliding_window", None)), "experts": hf_moe.mixtral_experts(main),
        "activation": _activation(main)}


def _gemma(main: Section) -> Fields:
    # the first files say gelu and mean its tanh form
    return _rotated(main, 256) | _biases(main) | {
        "activation": _activation(main, default="gelu_pytorch_tanh", gelu="gelu_tanh")}


def _gemma2(main: Section) -> Fields:
    window, count = main.integer("sliding_window", 4096, null=None), main.integer("num_hidden_layers")
    return _rotated(main, 256) | _capped(main, attention=50.0, final=30.0) | {
        "layers": by_pattern(main, window, alternating(count))}


def _gemma3(main: Section) -> Fields:
    window, count = main.integer("sliding_window", 4096, null=None), main.integer("num_hidden_layers")
    nth = main.integer(main.either("sliding_window_pattern", "_sliding_window_pattern"), 6)
    lanes = _heads(main, 256)
    rope, local = read_rope_by_layer_type(main, main.integer("max_position_embeddings"), lanes,
                                          theta=1e6, local_theta=1e4)
    return _capped(main, attention=None, final=None) | {
        "head_dim": lanes, "rope": rope, "local_rope": local, "qk_norm": "head",
        "layers": by_pattern(main, window, every_nth_full(count, nth), local_rope=True)}


def _capped(main: Section, *, attention: float | None, final: float | None) -> Fields:
    """What Gemma 2 and 3 share; arguments: caps of files without them."""
    return _biases(main) | {
        "attention_soft_cap": main.number("attn_logit_softcapping", attention, null=None),
        "final_soft_cap": main.number("final_logit_softcapping", final, null=None),
        "query_scale": main.number("query_pre_attn_scalar", 256.0) ** -0.5,
        "activation": _activation(main, "hidden_activation", "gelu_pytorch_tanh")}


def _phi3(main: Section) -> Fields:
    fields = _rotated(main, original=4096, aliases={"su": "longrope", "yarn": "longrope"})
    if fields["rope"].kind not in ("default", "longrope"):
        main.fail("rope_scaling", f"{fields['rope'].kind!r} is not supported; supported: default, longrope")
    return fields | {"layers": uniform(main.integer("sliding_window", None)), "activation": _activation(main)}


def _olmo2(main: Section) -> Fields:
    return _rotated(main) | _biases(main) | {"qk_norm": "all", "activation": _activation(main)}


def _gpt_oss(main: Section) -> Fields:
    if _activation(main) != "silu":
        main.fail("hidden_act", f"{main.data['hidden_act']!r} is not supported; supported: silu")
    window, count = main.integer("sliding_window", 128, null=None), main.integer("num_hidden_layers")
    rope = {"rope_type": "yarn", "factor": 32.0, "truncate": False, "original_max_position_embeddings": 4096}
    with_rope = Section(main.path, {"rope_parameters": rope} | {k: v for k, v in main.data.items() if v is not None})
    return _rotated(with_rope, 64, theta=150_000.0) | _biases(main, default=True) | {
        "sinks": True, "activation": "clamped_swiglu", "swiglu_limit": main.number("swiglu_limit", 7.0),
        "layers": by_pattern(main, window, alternating(count)), "experts": hf_moe.gpt_oss_experts(main)}


def _deepseek2(main: Section) -> Fields:
    return _latent(main, interleaved=True) | hf_moe.deepseek2_experts(main)


def _deepseek3(main: Section) -> Fields:
    return _latent(main, interleaved=main.flag("rope_interleave", True)) | hf_moe.deepseek3_experts(main)


def _latent(main: Section, *, interleaved: bool) -> Fields:
    heads = main.integer("num_attention_heads")
    if main.integer("num_key_value_heads", heads) != heads:
        main.fail("num_key_value_heads", f"must equal num_attention_heads {heads}")
    for name in ("attention_bias", "mlp_bias"):
        if main.flag(name, False):
            main.fail(name, "is not supported")
    latent = LatentConfig(
        q_rank=main.integer("q_lora_rank", 1536, null=None), kv_rank=main.integer("kv_lora_rank", 512),
        nope_dim=main.integer("qk_nope_head_dim", 128), rope_dim=main.integer("qk_rope_head_dim", 64),
        value_dim=main.integer("v_head_dim", 128))
    width = latent.nope_dim + latent.rope_dim
    rope = read_rope(main, main.integer("max_position_embeddings"), latent.rope_dim)
    scale = None
    if rope.mscale_all_dim and rope.factor > 1.0:
        # YaRN's temperature over all lanes, of queries and keys both (arXiv 2309.00071, section 3.4)
        scale = width**-0.5 * (0.1 * rope.mscale_all_dim * math.log(rope.factor) + 1.0) ** 2
    return {"latent": latent, "num_kv_heads": 1, "head_dim": width, "query_scale": scale,
            "rope": dataclasses.replace(rope, interleaved=interleaved), "activation": _activation(main)}


_CAPS = ("attn_logit_softcapping", "final_logit_softcapping", "query_pre_attn_scalar")
ARCHITECTURES: dict[str, Architecture] = {
    "LlamaForCausalLM": Architecture("llama", "llama", _llama, bos=(1,), eos=(2,)),
    "MistralForCausalLM": Architecture("llama", "mistral", _mistral, kv_heads=8, bos=(1,), eos=(2,)),
    "Qwen2ForCausalLM": Architecture("llama", "qwen2", _qwen2, kv_heads=32),
    "Qwen3ForCausalLM": Architecture("llama", "qwen3", _qwen3, kv_heads=32),
    "Qwen3MoeForCausalLM": Architecture("qwen3_moe", "qwen3_moe", _qwen3_moe, kv_heads=4),
    "MixtralForCausalLM": Architecture("mixtral", "mixtral", _mixtral, kv_heads=8, norm_eps=1e-5, bos=(1,), eos=(2,)),
    "GemmaForCausalLM": Architecture("gemma", "gemma", _gemma, kv_heads=16, tied=True, bos=(2,), eos=(1,)),
    "Gemma2ForCausalLM": Architecture("gemma2", "gemma2", _gemma2, _CAPS, kv_heads=4, tied=True, bos=(2,), eos=(1,)),
    "Gemma3ForCausalLM": Architecture("gemma3", "gemma3_text", _gemma3, _CAPS, kv_heads=4, tied=True, bos=(2,),
                                      eos=(1,), shapes={"vocab_size": 262_208, "num_attention_heads": 8,
                                                        "max_position_embeddings": 131_072}),
    "Phi3ForCausalLM": Architecture("phi3", "phi3", _phi3, norm_eps=1e-5, bos=(1,), eos=(32000,)),
    "Olmo2ForCausalLM": Architecture("olmo2", "olmo2", _olmo2, norm_eps=1e-5, eos=(50279,)),
    "GptOssForCausalLM": Architecture("gpt_oss", "gpt_oss", _gpt_oss, kv_heads=8, norm_eps=1e-5),
    "DeepseekV2ForCausalLM": Architecture("deepseek", "deepseek_v2", _deepseek2, bos=(1,), eos=(2,)),
    "DeepseekV3ForCausalLM": Architecture("deepseek", "deepseek_v3", _deepseek3, bos=(0,), eos=(1,)),
}
