"""The vocabulary inside a GGUF file: byte-level BPE (`gpt2`) or sentencepiece (`llama`), rebuilt exactly.

Both are handed back to the library that the vocabulary came from: BPE with its merges and the pre-tokeniser
that `tokenizer.ggml.pre` names to `tokenizers`, pieces with their scores to `sentencepiece`.
"""

import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers

from jinfer.errors import CheckpointError, TokenizerError
from jinfer.tokenizer.chat import ChatTemplate
from jinfer.tokenizer.gguf_pre import PRE_TOKENIZERS, PreTokenizer
from jinfer.tokenizer.hf import from_backend
from jinfer.tokenizer.spm import META_SPACE, from_model, open_model
from jinfer.tokenizer.tokenizer import Tokenizer
from jinfer.weights.gguf_meta import read_metadata

# tokenizer.ggml.token_type; the numbers are those of sentencepiece's ModelProto.SentencePiece.Type.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
# Files made before tokenizer.ggml.eot_token_id existed name the end of a turn only by its text.
_TURN_ENDS = ("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|end_of_turn|>", "<|eom_id|>")


def load_gguf(path: Path) -> Tokenizer:
    """The tokenizer inside the GGUF file `path`. TokenizerError if it has none or one of an unknown kind."""
    vocab = open_vocabulary(path)
    model = vocab.value("model", str)
    if model == "gpt2":
        return _load_bpe(vocab)
    if model == "llama":
        return _load_spm(vocab)
    raise TokenizerError(f"{path}: tokenizer.ggml.model {model!r} is not supported; known: gpt2, llama")


def open_vocabulary(path: Path) -> "Vocabulary":
    """The `tokenizer.*` keys of the GGUF file `path`. TokenizerError if they are missing or broken."""
    try:
        return Vocabulary(path, read_metadata(path))
    except CheckpointError as error:
        raise TokenizerError(str(error)) from None


class Vocabulary:
    """Checked access to the `tokenizer.*` keys of a file."""

    def __init__(self, path: Path, metadata: Mapping[str, Any]):
        self.path, self.metadata = path, metadata
        self.tokens: list[str] = self.strings("tokens")
        count = len(self.tokens)
        self.types: Sequence[int] = self.value("token_type", list, [NORMAL] * count)
        self.bos_id, self.eos_id = self.token("bos_token_id"), self.token("eos_token_id")
        if len(self.types) != count:
            raise TokenizerError(f"{path}: {count} tokenizer.ggml.tokens but {len(self.types)} token_type")
        if not set(self.types) <= {NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE}:
            raise TokenizerError(f"{path}: tokenizer.ggml.token_type must hold numbers from 1 to 6")

    def value(self, key: str, kind: type, default: Any = None) -> Any:
        name = f"tokenizer.ggml.{key}"
        value = self.metadata.get(name, default)
        if value is None:
            raise TokenizerError(f"{self.path}: no tokenizer: {name} is missing")
        if not isinstance(value, kind):
            raise TokenizerError(f"{self.path}: {name} must be {kind.__name__}, got {type(value).__name__}")
        return value

    def strings(self, key: str) -> list[str]:
        values = self.value(key, list)
        if not all(isinstance(text, str) for text in values):
            raise TokenizerError(f"{self.path}: tokenizer.ggml.{key} must hold strings")
        return values

    def token(self, key: str) -> int | None:
        value = self.metadata.get(f"tokenizer.ggml.{key}")
        if value is None or value in (-1, 2**32 - 1):
            return None
        if not isinstance(value, int) or not 0 <= value < len(self.tokens):
            raise TokenizerError(f"{self.path}: tokenizer.ggml.{key} is {value!r}, but there are "
                                 f"{len(self.tokens)} tokens")
        return value

    def eos_ids(self) -> tuple[int, ...]:
        eot = self.token("eot_token_id")
        found = [self.eos_id, eot, self.token("eom_token_id")]
        if eot is None:
            found += [i for i, text in enumerate(self.tokens)
                      if text in _TURN_ENDS and self.types[i] == CONTROL]
        return tuple(dict.fromkeys(i for i in found if i is not None))

    def named(self) -> dict[str, int]:
        """`bos_token`, `eos_token`, ... -> id, for those that are set."""
        found = {"bos_token": self.bos_id, "eos_token": self.eos_id,
                 "unk_token": self.token("unknown_token_id"), "pad_token": self.token("padding_token_id")}
        return {name: i for name, i in found.items() if i is not None}

    def templates(self) -> dict[str, str]:
        """Chat templates by name, `default` at last; empty if there is none of that name."""
        source = self.metadata.get("tokenizer.chat_template")
        if not isinstance(source, str) or not source:
            return {}
        prefix = "tokenizer.chat_template."
        others = {key.removeprefix(prefix): text for key, text in self.metadata.items()
                  if key.startswith(prefix) and isinstance(text, str)}
        return {**others, "default": source}

    def chat(self) -> ChatTemplate | None:
        templates = self.templates()
        variables = {name: self.tokens[i] for name, i in self.named().items()}
        return ChatTemplate(templates, variables) if templates else None


def _load_bpe(vocab: Vocabulary) -> Tokenizer:
    backend, kind = bpe_backend(vocab)
    add_bos = vocab.value("add_bos_token", bool, kind.add_bos)
    prefix = (vocab.bos_id,) if add_bos and vocab.bos_id is not None else ()
    return from_backend(
        backend, prefix=prefix, bos_id=vocab.bos_id, eos_ids=vocab.eos_ids(), chat=vocab.chat(),
        name=str(vocab.path))


def bpe_backend(vocab: Vocabulary) -> tuple[tokenizers.Tokenizer, PreTokenizer]:
    """The vocabulary as the `tokenizers` library's, and how it cuts text."""
    name = vocab.value("pre", str, "default")
    kind = PRE_TOKENIZERS.get(name)
    if kind is None:
        raise TokenizerError(f"{vocab.path}: tokenizer.ggml.pre {name!r} is not supported; known: "
                             f"{', '.join(sorted(PRE_TOKENIZERS))}")
    merges = [_pair(vocab.path, merge) for merge in vocab.strings("merges")]
    ids = {text: i for i, text in enumerate(vocab.tokens)}
    try:
        model = models.BPE(ids, merges, ignore_merges=kind.ignore_merges)
    except Exception as error:  # the library raises bare exceptions
        raise TokenizerError(f"{vocab.path}: tokenizer.ggml.merges do not fit the tokens: {error}") from None
    backend = tokenizers.Tokenizer(model)
    if kind.nfc:
        backend.normalizer = normalizers.NFC()
    splits = [pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated") for pattern in kind.patterns]
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens([
        tokenizers.AddedToken(text, special=type_ == CONTROL, normalized=False)
        for text, type_ in zip(vocab.tokens, vocab.types, strict=True) if type_ in (CONTROL, USER_DEFINED)])
    return backend, kind


def _pair(path: Path, merge: str) -> tuple[str, str]:
    left, _, right = merge.partition(" ")
    if not left or not right:
        raise TokenizerError(f"{path}: tokenizer.ggml.merges holds {merge!r}, not two tokens")
    return left, right


def _load_spm(vocab: Vocabulary) -> Tokenizer:
    model = spm_model(vocab)
    return from_model(
        model, open_model(model, str(vocab.path)), add_bos=vocab.value("add_bos_token", bool, True),
        bos_id=vocab.bos_id, eos_ids=vocab.eos_ids(), chat=vocab.chat(), swallowing=swallowing(vocab))


def swallowing(vocab: Vocabulary) -> frozenset[str]:
    """The format cannot say it, so llama.cpp knows it too: which tokens of Phi-3 take the whitespace after them."""
    if vocab.metadata.get("general.architecture") != "phi3":
        return frozenset()
    control = {text for text, kind in zip(vocab.tokens, vocab.types, strict=True) if kind == CONTROL}
    return frozenset(control - {"<unk>", "<s>", "<|endoftext|>"})


def spm_model(vocab: Vocabulary) -> bytes:
    """The vocabulary as a sentencepiece model file."""
    scores = vocab.value("scores", list)
    if len(scores) != len(vocab.tokens):
        raise TokenizerError(
            f"{vocab.path}: {len(vocab.tokens)} tokenizer.ggml.tokens but {len(scores)} scores")
    types = list(vocab.types)
    if UNKNOWN not in types:  # sentencepiece cannot do without one
        unknown = vocab.token("unknown_token_id")
        types[0 if unknown is None else unknown] = UNKNOWN
    # Converters store user-defined pieces with plain spaces.
    pieces = [text.replace(" ", META_SPACE) if kind == USER_DEFINED else text
              for text, kind in zip(vocab.tokens, types, strict=True)]
    return _model_proto(pieces, scores, types, vocab.value("add_space_prefix", bool, True))


def _model_proto(
        pieces: Sequence[str], scores: Sequence[float], types: Sequence[int], dummy_prefix: bool) -> bytes:
    """A sentencepiece ModelProto (sentencepiece_model.proto), written field by field: it needs no protobuf
    package.

    No normalisation beyond spaces, spaces kept as they are: what Llama's, Mistral's and Gemma's models state.
    """
    out = bytearray()
    for text, score, kind in zip(pieces, scores, types, strict=True):
        data = text.encode()
        # SentencePiece { piece (1), score (2), type (3) }
        tail = b"\x15" + struct.pack("<f", score) + b"\x18" + bytes((kind,))
        body = b"\x0a" + _varint(len(data)) + data + tail
        out += b"\x0a" + _varint(len(body)) + body
    byte_fallback = types.count(BYTE) == 256
    trainer = b"\x18\x02" + b"\x98\x02" + bytes([byte_fallback])  # model_type (3) BPE, byte_fallback (35)
    name = b"identity"
    # name (1), add_dummy_prefix (3), remove_extra_whitespaces (4), escape_whitespaces (5)
    normalizer = (b"\x0a" + _varint(len(name)) + name + b"\x18" + bytes([dummy_prefix]) + b"\x20\x00"
                  + b"\x28\x01")
    out += b"\x12" + _varint(len(trainer)) + trainer + b"\x1a" + _varint(len(normalizer)) + normalizer
    return bytes(out)


def _varint(value: int) -> bytes:
    if value < 128:
        return bytes((value,))
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes([*out, value])
