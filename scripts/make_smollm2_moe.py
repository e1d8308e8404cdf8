#!/usr/bin/env python
"""Makes a mixture of experts with real weights out of SmolLM2: a Hugging Face folder of 373 M parameters.

    .venv/bin/python scripts/make_smollm2_moe.py OUT
    .venv/bin/jinfer generate OUT -p "The capital of France is"

Each of the 4 experts of a layer is the dense layer's network plus 3 % noise (of the matrix's standard deviation),
the router is random, a token takes 2. Everything is seeded and stored as bfloat16, so that the folder is the same
wherever it is made. The text stays sensible, because the experts are nearly alike.
"""

import argparse
import json
from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from jinfer.tokenizer.hf_write import write_gguf_tokenizer
from jinfer.weights import TensorReader, open_checkpoint, resolve_model

EXPERTS, ACTIVE, NOISE = 4, 2, 0.03
PROJECTIONS = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}


def experts(reader: TensorReader, layer: int) -> dict[str, np.ndarray]:
    """Mixtral's tensors of one layer's experts and their router."""
    rng = np.random.default_rng([2026, layer])
    moe, out = f"model.layers.{layer}.block_sparse_moe", {}
    for name, dense in PROJECTIONS.items():
        weight = np.asarray(reader.read(f"model.layers.{layer}.mlp.{dense}.weight"), np.float32)
        for expert in range(EXPERTS):
            noise = rng.standard_normal(weight.shape, np.float32) * (NOISE * weight.std())
            out[f"{moe}.experts.{expert}.{name}.weight"] = weight + noise
    out[f"{moe}.gate.weight"] = rng.standard_normal((EXPERTS, reader.shape("model.norm.weight")[0]), np.float32) * 0.02
    return out


def make(out: Path) -> None:
    """Writes configuration, tensors and tokenizer into the folder `out`."""
    checkpoint = open_checkpoint(resolve_model("smollm2-135m"))
    reader, config = checkpoint.reader, checkpoint.config
    tensors = {name: np.asarray(reader.read(name)) for name in reader.names() if ".mlp." not in name}
    for layer in range(config.num_layers):
        tensors |= experts(reader, layer)
    out.mkdir(parents=True, exist_ok=True)
    save_file({name: value.astype(ml_dtypes.bfloat16) for name, value in tensors.items()}, out / "model.safetensors")
    write_gguf_tokenizer(checkpoint.path, out)
    (out / "config.json").write_text(json.dumps({
        "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size, "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers, "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads, "head_dim": config.head_dim, "num_local_experts": EXPERTS,
        "num_experts_per_tok": ACTIVE, "rms_norm_eps": config.norm_eps, "rope_theta": config.rope.theta,
        "max_position_embeddings": config.max_context, "sliding_window": None, "tie_word_embeddings": True,
        "bos_token_id": config.bos_id, "eos_token_id": list(config.eos_ids), "hidden_act": "silu",
        "torch_dtype": "bfloat16"}, indent=1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    make(parser.parse_args().out)


if __name__ == "__main__":
    main()
