"""Small tokenizers of every kind."""

from pathlib import Path

import gguf
import pytest

from jinfer.tokenizer import Tokenizer, load_tokenizer
from jinfer.tokenizer.hf import byte_alphabet

DATA = Path(__file__).parents[1] / "data"
SPACE = "\u2581"


def write_gguf(path: Path, model: str, tokens: list[str], types: list[int], architecture="llama", **keys) -> Path:
    """A GGUF file that holds a vocabulary and no tensors."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_tokenizer_model(model)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    for key, value in keys.items():
        getattr(writer, key)(value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def bpe_vocabulary() -> tuple[list[str], list[int], list[str]]:
    """Tokens, types and merges of a byte-level BPE: 256 bytes, 8 merges, 3 control tokens, 1 user's."""
    merges = ["h e", "l l", "he ll", "hell o", "Ġ w", "1 2", "12 3", "3 4"]
    tokens = [*byte_alphabet(), *(merge.replace(" ", "") for merge in merges),
              "<|bos|>", "<|im_end|>", "<|eom|>", "<tool call>"]
    return tokens, [1] * (256 + len(merges)) + [3, 3, 3, 4], merges


def spm_vocabulary() -> tuple[list[str], list[float], list[int]]:
    """Pieces, scores and types of a sentencepiece BPE with byte fallback."""
    special = [("<unk>", 0.0, 2), ("<s>", 0.0, 3), ("</s>", 0.0, 3)]
    byte_pieces = [(f"<0x{byte:02X}>", 0.0, 6) for byte in range(256)]
    # Scores rank the merges: "he" before "el", so "hel" never forms and "hello" comes out as he + ll + o.
    words = ["he", "ll", "lo", "hell", f"{SPACE}w", "or", f"{SPACE}wor", f"{SPACE}{SPACE}"]
    merged = [(word, -float(i), 1) for i, word in enumerate(words)]
    letters = [(char, -100.0 - i, 1) for i, char in enumerate(f"{SPACE}helowrdxy")]
    pieces = [*special, *byte_pieces, *merged, *letters, ("   ", 0.0, 4), ("<turn>", 0.0, 3)]
    return [p[0] for p in pieces], [p[1] for p in pieces], [p[2] for p in pieces]


@pytest.fixture(scope="session")
def table_open() -> Tokenizer:
    return load_tokenizer(DATA / "models" / "table_open")


@pytest.fixture(scope="session")
def sp() -> Tokenizer:
    return load_tokenizer(DATA / "tokenizer" / "sp.model")


@pytest.fixture(scope="session")
def gguf_bpe(tmp_path_factory) -> Tokenizer:
    tokens, types, merges = bpe_vocabulary()
    path = tmp_path_factory.mktemp("bpe") / "bpe.gguf"
    return load_tokenizer(write_gguf(
        path, "gpt2", tokens, types, add_token_merges=merges, add_tokenizer_pre="smollm",
        add_bos_token_id=264, add_eos_token_id=265, add_add_bos_token=True,
        add_chat_template="{{ bos_token }}{{ messages[0].content }}{{ eos_token }}"))


@pytest.fixture(scope="session")
def gguf_spm(tmp_path_factory) -> Tokenizer:
    tokens, scores, types = spm_vocabulary()
    path = tmp_path_factory.mktemp("spm") / "spm.gguf"
    return load_tokenizer(write_gguf(
        path, "llama", tokens, types, add_token_scores=scores, add_bos_token_id=1, add_eos_token_id=2))
