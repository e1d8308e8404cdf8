"""Hugging Face folders -> small GGUF files by the rules of llama.cpp's converters, written down independently."""

import json
import math

import numpy as np
from safetensors.numpy import load_file

from tests.weights.gguf_files import permute, write_gguf

ARCHITECTURES = {"llama": "llama", "mixtral": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "qwen3_moe": "qwen3moe",
                 "gemma": "gemma", "gemma2": "gemma2", "gemma3_text": "gemma3", "phi3": "phi3", "olmo2": "olmo2",
                 "mistral": "llama", "gpt_oss": "gpt-oss"}
_STEMS = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
    "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "self_attn.qkv_proj": "attn_qkv",
    "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
    "pre_feedforward_layernorm": "ffn_norm", "post_feedforward_layernorm": "post_ffw_norm",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down", "mlp.gate_up_proj": "ffn_up",
    "mlp.gate": "ffn_gate_inp", "block_sparse_moe.gate": "ffn_gate_inp", "mlp.router": "ffn_gate_inp",
}
_EXPERT = {"w1": "ffn_gate", "w3": "ffn_up", "w2": "ffn_down", "gate_proj": "ffn_gate", "up_proj": "ffn_up",
           "down_proj": "ffn_down"}


def convert(path, config, arrays, *, split_experts=False, changes=None):
    """Writes the model and returns the path.

    Args:
      config: of Hugging Face, with old keys. arrays: its tensors.
      split_experts: one tensor an expert, as the first Mixtral files had them.
      changes: metadata to add, or to leave out (...).
    """
    kind = config["model_type"]
    tensors = rope_factors(config)
    arrays = unfused(arrays) if kind == "gpt_oss" else arrays
    for name, array in arrays.items():
        if kind.startswith("gemma") and name.endswith("norm.weight"):
            array = array + np.float32(1)
        if kind in ("llama", "mistral", "mixtral") and name.split(".")[-2] in ("q_proj", "k_proj"):
            array = permute(array, config["num_attention_heads" if "q_proj" in name else "num_key_value_heads"])
        tensors[stored_name(name, kind)] = array
    if not split_experts:
        stacks = {}
        for name in [name for name in tensors if name.split(".")[-2].isdigit()]:
            stem, expert, _ = name.rsplit(".", 2)
            stacks.setdefault(stem, {})[int(expert)] = tensors.pop(name)
        for stem, parts in stacks.items():
            tensors[f"{stem}_exps.weight"] = np.stack([parts[i] for i in range(len(parts))])
    metadata = metadata_of(config) | (changes or {})
    return write_gguf(path, tensors, {k: v for k, v in metadata.items() if v is not ...}, ARCHITECTURES[kind])


def convert_folder(path, folder, **options):
    config = json.loads((folder / "config.json").read_text())
    return convert(path, config, load_file(folder / "model.safetensors"), **options)


def unfused(arrays):
    """gpt-oss: gate and up, whose columns take turns, one by one and as rows; sinks get a suffix."""
    out = {}
    for name, array in arrays.items():
        stem, _, part = name.rpartition(".")
        kind, bias = ("bias", True) if part.endswith("_bias") else ("weight", False)
        if part.startswith("gate_up_proj"):
            for i, half in enumerate(("gate", "up")):
                columns = array[..., i::2]
                out[f"{stem}.{half}_exps.{kind}"] = columns if bias else columns.swapaxes(1, 2).copy()
        elif part.startswith("down_proj") and stem.endswith("experts"):
            out[f"{stem}.down_exps.{kind}"] = array if bias else array.swapaxes(1, 2).copy()
        else:
            out[f"{name}.weight" if part == "sinks" else name] = array
    return out


def rope_factors(config):
    scaling = config.get("rope_scaling") or {}
    return {f"rope_factors_{name}.weight": np.array(scaling[f"{name}_factor"], np.float32)
            for name in ("long", "short") if f"{name}_factor" in scaling}


def stored_name(name, kind):
    """`model.layers.0.mlp.up_proj.weight` -> `blk.0.ffn_up.weight`; an expert's is `blk.0.ffn_up.7.weight`."""
    stem, suffix = name.rsplit(".", 1)
    if stem in _STEMS:
        return f"{_STEMS[stem]}.{suffix}"
    _, _, layer, inner = stem.split(".", 3)
    if kind == "gpt_oss" and inner not in _STEMS | {"post_attention_layernorm": ""}:
        return f"blk.{layer}.{'attn_sinks' if inner == 'self_attn.sinks' else f'ffn_{inner.split(".")[-1]}'}.{suffix}"
    if ".experts." in inner:
        _, _, expert, projection = inner.split(".")
        return f"blk.{layer}.{_EXPERT[projection]}.{expert}.{suffix}"
    after_attention = kind in ("gemma2", "gemma3_text", "olmo2", "gpt_oss")
    stems = _STEMS | {"post_attention_layernorm": "post_attention_norm" if after_attention else "ffn_norm"}
    return f"blk.{layer}.{stems[inner]}.{suffix}"


def metadata_of(config):
    kind = config["model_type"]
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim", config["hidden_size"] // heads)
    keys = {
        "block_count": config["num_hidden_layers"], "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"], "feed_forward_length": config["intermediate_size"],
        "attention.head_count": heads, "attention.head_count_kv": config["num_key_value_heads"],
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"], "rope.freq_base": float(config["rope_theta"]),
    }
    if "head_dim" in config:
        keys |= {"attention.key_length": head_dim, "attention.value_length": head_dim}
    if kind == "phi3":
        keys["rope.dimension_count"] = int(head_dim * config.get("partial_rotary_factor", 1.0))
        keys["rope.scaling.original_context_length"] = config["original_max_position_embeddings"]
        keys["attention.sliding_window"] = config.get("sliding_window") or 0
    if kind in ("gemma2", "gemma3_text", "mistral", "gpt_oss"):
        keys["attention.sliding_window"] = config["sliding_window"]
    for key in ("attn_logit_softcapping", "final_logit_softcapping"):
        if key in config:
            keys[key] = config[key]
    if "num_local_experts" in config or "num_experts" in config:
        keys["expert_count"] = config.get("num_local_experts") or config["num_experts"]
        keys["expert_used_count"] = config["num_experts_per_tok"]
    if kind == "qwen3_moe":
        keys["expert_feed_forward_length"] = config["moe_intermediate_size"]
    if kind == "gpt_oss":
        keys["expert_feed_forward_length"] = config["intermediate_size"]
    scaling = config.get("rope_scaling") or {}
    if "rope_type" in scaling:
        keys["rope.scaling.type"], keys["rope.scaling.factor"] = scaling["rope_type"], scaling["factor"]
    if scaling.get("rope_type") == "yarn":
        keys["rope.scaling.original_context_length"] = scaling["original_max_position_embeddings"]
    if "long_factor" in scaling:
        longer = config["max_position_embeddings"] / config["original_max_position_embeddings"]
        keys["rope.scaling.attn_factor"] = math.sqrt(
            1 + math.log(longer) / math.log(config["original_max_position_embeddings"]))
    metadata = {f"{ARCHITECTURES[kind]}.{key}": value for key, value in keys.items()}
    return metadata | {f"tokenizer.ggml.{name}_token_id": config[f"{name}_token_id"] for name in ("bos", "eos")
                       if f"{name}_token_id" in config}
