"""The tokenizer inside a GGUF file as the files of a Hugging Face folder."""

import json
from pathlib import Path
from typing import Any

from tokenizers import processors

from jinfer.tokenizer.gguf_vocab import (
    CONTROL,
    Vocabulary,
    bpe_backend,
    load_gguf,
    open_vocabulary,
    spm_model,
    swallowing,
)
from jinfer.weights.gguf_meta import read_metadata


def has_gguf_tokenizer(path: Path) -> bool:
    """Whether `path` is a GGUF file that holds a vocabulary."""
    return path.is_file() and "tokenizer.ggml.tokens" in read_metadata(path)


def write_gguf_tokenizer(path: Path, folder: Path) -> None:
    """Writes the tokenizer of the GGUF file `path` into `folder`.

    Byte-level BPE becomes tokenizer.json, sentencepiece tokenizer.model; both with tokenizer_config.json and the
    chat templates. End tokens are the business of generation_config.json. Raises TokenizerError, OSError.
    """
    vocab, tokenizer = open_vocabulary(path), load_gguf(path)
    own: dict[str, Any] = {}
    if vocab.value("model", str) == "gpt2":
        backend, _ = bpe_backend(vocab)
        if tokenizer.prefix:
            bos = vocab.tokens[tokenizer.prefix[0]]
            backend.post_processor = processors.TemplateProcessing(
                single=[bos, "$A"], pair=[bos, "$A", bos, "$B"], special_tokens=[(bos, tokenizer.prefix[0])])
        backend.save(str(folder / "tokenizer.json"))
        kind = "PreTrainedTokenizerFast"
    else:
        (folder / "tokenizer.model").write_bytes(spm_model(vocab))
        kind = "LlamaTokenizer"
        # transformers' class goes by this key, not by what tokenizer.model says
        own["add_prefix_space"] = vocab.value("add_space_prefix", bool, True)
    config = {"tokenizer_class": kind, "add_bos_token": tokenizer.add_bos, "add_eos_token": False,
              "clean_up_tokenization_spaces": False, **own, **_named(vocab), **_added(vocab),
              **_templates(vocab, folder)}
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", "utf-8")


def _named(vocab: Vocabulary) -> dict[str, str]:
    """Only control tokens: what a folder names becomes special."""
    return {name: vocab.tokens[i] for name, i in vocab.named().items() if vocab.types[i] == CONTROL}


def _added(vocab: Vocabulary) -> dict[str, Any]:
    """Control tokens that take the whitespace after them with them; tokenizer.model cannot say it."""
    texts = swallowing(vocab)
    added = {str(i): {"content": text, "lstrip": False, "normalized": False, "rstrip": True, "single_word": False,
                      "special": True} for i, text in enumerate(vocab.tokens) if text in texts}
    return {"added_tokens_decoder": added} if added else {}


def _templates(vocab: Vocabulary, folder: Path) -> dict[str, Any]:
    templates = vocab.templates()
    if len(templates) > 1:
        return {"chat_template": [{"name": name, "template": text} for name, text in templates.items()]}
    for text in templates.values():
        (folder / "chat_template.jinja").write_text(text, "utf-8", newline="")
    return {}
