"""Small GGUF files, written with the gguf package in the order of llama.cpp's converter."""

import gguf
import numpy as np
from gguf import GGMLQuantizationType

LAYER_NAMES = {
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}
WHOLE_NAMES = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
LLAMA_PLAIN = {
    "llama.block_count": 2, "llama.context_length": 128, "llama.embedding_length": 32,
    "llama.feed_forward_length": 48, "llama.attention.head_count": 4, "llama.attention.head_count_kv": 2,
    "llama.attention.layer_norm_rms_epsilon": 1e-5, "llama.rope.freq_base": 10000.0,
    "llama.rope.dimension_count": 8,
    "tokenizer.ggml.bos_token_id": 256, "tokenizer.ggml.eos_token_id": 257,
}


def permute(rows, heads):
    """llama.cpp's order of q and k rows (convert_hf_to_gguf.py, LlamaModel.permute)."""
    split = rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:])
    return split.swapaxes(1, 2).reshape(rows.shape)


def write_gguf(path, tensors, metadata=None, architecture="llama"):
    """Writes stored tensors (name -> array, or bytes and their type) and metadata; returns the path."""
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in (LLAMA_PLAIN if metadata is None else metadata).items():
        match value:
            case bool():
                writer.add_bool(key, value)
            case int():
                writer.add_uint32(key, value)
            case float():
                writer.add_float32(key, value)
            case str():
                writer.add_string(key, value)
            case _:
                writer.add_array(key, value)
    for name, value in tensors.items():
        array, kind = value if isinstance(value, tuple) else (value, None)
        writer.add_tensor(name, array, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_llama(path, arrays, kind=GGMLQuantizationType.F32, metadata=None, extra=None):
    """Writes a llama (4 heads, 2 kv heads) from Hugging Face arrays.

    Matrices whose rows hold whole blocks are stored as `kind`, other matrices as F16, vectors as F32. Returns
    the path and what each tensor decodes to, by Hugging Face name.
    """
    block, _ = gguf.GGML_QUANT_SIZES[kind]
    tensors, decoded = {}, {}
    for name, array in arrays.items():
        heads = {"q_proj": 4, "k_proj": 2}.get(name.split(".")[-2], 0)
        stored = permute(array, heads) if heads else array
        if array.ndim == 1:
            this = GGMLQuantizationType.F32
        else:
            this = kind if array.shape[-1] % block == 0 else GGMLQuantizationType.F16
        raw = gguf.quants.quantize(stored, this)
        tensors[_stored_name(name)] = (raw, this)
        values = gguf.quants.dequantize(raw, this)
        # back by sorting the permuted row numbers, not by the formula under test
        decoded[name] = values[np.argsort(permute(np.arange(len(array)), heads))] if heads else values
    return write_gguf(path, tensors | (extra or {}), metadata), decoded


def _stored_name(name):
    stem, kind = name.rsplit(".", 1)
    if stem in WHOLE_NAMES:
        return f"{WHOLE_NAMES[stem]}.{kind}"
    _, _, layer, inner = stem.split(".", 3)
    return f"blk.{layer}.{LAYER_NAMES[inner]}.{kind}"
