"""Tensor names of GGUF files -> Hugging Face names, by architecture.

The stored names are those of llama.cpp's converters (gguf-py's tensor_mapping.py lists them).
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

_BLOCK = re.compile(r"blk\.(\d+)\.(\w+)(?:\.(\d+))?\.(weight|bias)")
_WHOLE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_ATTENTION = {"attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
              "attn_output": "self_attn.o_proj"}
_MLP = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
_PRE_NORMS = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
_QK_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_POST_NORMS = {"post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm"}
_GEMMA2 = {**_ATTENTION, **_MLP, **_POST_NORMS, "attn_norm": "input_layernorm",
           "ffn_norm": "pre_feedforward_layernorm"}
_EXPERTS = ("ffn_gate", "ffn_up", "ffn_down")


@dataclass(frozen=True, slots=True)
class Names:
    """How the tensors of one architecture are called.

    Attributes:
      layer: stored part -> Hugging Face part, inside a layer.
      experts: stored part -> Hugging Face part with {} for the number of the expert: `ffn_gate` stands for one
        tensor an expert (`blk.0.ffn_gate.3.weight`) and for all of them stacked (`blk.0.ffn_gate_exps.weight`).
      permuted: parts whose rows are stored for the interleaved rotation.
      norms_added: what the file adds to all norm weights.
    """

    layer: Mapping[str, str]
    experts: Mapping[str, str] = field(default_factory=dict)
    permuted: frozenset[str] = frozenset()
    norms_added: float = 0.0


@dataclass(frozen=True, slots=True)
class Part:
    """What a stored tensor is.

    Attributes:
      part: its name inside a layer, "" outside of layers.
      name: its Hugging Face name, with {} for the number of the expert where it holds them stacked.
      stacked: it holds one tensor for each expert.
    """

    part: str
    name: str
    stacked: bool = False


_PERMUTED = frozenset({"attn_q", "attn_k"})
_DENSE = Names({**_ATTENTION, **_MLP, **_PRE_NORMS, **_QK_NORMS})
NAMES: Mapping[str, Names] = {
    "llama": Names({**_ATTENTION, **_MLP, **_PRE_NORMS}, permuted=_PERMUTED),
    "mixtral": Names(
        {**_ATTENTION, **_PRE_NORMS, "ffn_gate_inp": "block_sparse_moe.gate"},
        experts=dict(zip(_EXPERTS, (f"block_sparse_moe.experts.{{}}.{w}" for w in ("w1", "w3", "w2")), strict=True)),
        permuted=_PERMUTED),
    "qwen2": Names({**_ATTENTION, **_MLP, **_PRE_NORMS}),
    "qwen3": _DENSE,
    "qwen3moe": Names(
        {**_ATTENTION, **_PRE_NORMS, **_QK_NORMS, "ffn_gate_inp": "mlp.gate"},
        experts=dict(zip(_EXPERTS, (f"mlp.experts.{{}}.{w}_proj" for w in ("gate", "up", "down")), strict=True))),
    "gemma": Names({**_ATTENTION, **_MLP, **_PRE_NORMS}, norms_added=1.0),
    "gemma2": Names(_GEMMA2, norms_added=1.0),
    "gemma3": Names({**_GEMMA2, **_QK_NORMS}, norms_added=1.0),
    "phi3": Names({**_PRE_NORMS, "attn_qkv": "self_attn.qkv_proj", "attn_output": "self_attn.o_proj",
                   "ffn_up": "mlp.gate_up_proj", "ffn_down": "mlp.down_proj"}),
    "olmo2": Names({**_ATTENTION, **_MLP, **_QK_NORMS, **_POST_NORMS}),
    "gpt-oss": Names({**_ATTENTION, "attn_norm": "input_layernorm", "post_attention_norm": "post_attention_layernorm",
                      "ffn_gate_inp": "mlp.router", "attn_sinks": "self_attn.sinks"}),  # experts: gguf_experts.py
}
"""By `general.architecture`; `mixtral` is a llama with experts."""


def part_of(names: Names, stored: str) -> Part:
    """What the tensor stored as `stored` is; one of no known name keeps it, so that a loader refuses it."""
    match = _BLOCK.fullmatch(stored)
    if match is None:
        stem, _, kind = stored.rpartition(".")
        return Part("", f"{_WHOLE[stem]}.{kind}" if stem in _WHOLE else stored)
    layer, part, expert, kind = match.groups()
    stacked = part.endswith("_exps")
    inside = names.layer.get(part)
    if stacked or expert is not None:
        inside = names.experts.get(part.removesuffix("_exps"))
        if inside is not None and expert is not None:
            inside = None if stacked else inside.format(expert)
    if inside is None:
        return Part(part, stored)
    name = f"model.layers.{layer}.{inside}.{kind}"
    return Part(part, name.removesuffix(".weight") if part == "attn_sinks" else name, stacked)
