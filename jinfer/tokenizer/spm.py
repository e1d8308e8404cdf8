"""Sentencepiece models: a .model file, or one rebuilt from the vocabulary inside a GGUF file."""

import re
from collections.abc import Callable, Iterable, Mapping, Set
from pathlib import Path

import sentencepiece

from jinfer.errors import TokenizerError
from jinfer.tokenizer.chat import ChatTemplate
from jinfer.tokenizer.detok import DecodeRules
from jinfer.tokenizer.folder import read_folder
from jinfer.tokenizer.tokenizer import Tokenizer

META_SPACE = "\u2581"
# ModelProto { normalizer_spec (3) { add_dummy_prefix (3): false } }. Concatenated protobuf messages merge, so
# appending this to a model switches off the space before the first word.
_NO_DUMMY_PREFIX = b"\x1a\x02\x18\x00"


def load_spm(path: Path) -> Tokenizer:
    """The tokenizer of the sentencepiece file `path` with the settings in the JSON files beside it."""
    try:
        model = path.read_bytes()
    except OSError as error:
        raise TokenizerError(f"{path}: cannot be read: {error.strerror or error}") from None
    processor = open_model(model, str(path))
    config = read_folder(path.parent)

    def own(token_id: int) -> int | None:
        return token_id if token_id >= 0 else None  # sentencepiece says -1 for "none"

    size = processor.vocab_size()
    added = {token.text: token.id for token in config.added if token.id >= size}

    def find(text: str | None) -> int | None:
        if text is None:
            return None
        token_id = added.get(text, processor.piece_to_id(text))
        return None if token_id == processor.unk_id() else token_id

    named_bos, named_eos = find(config.named.get("bos_token")), find(config.named.get("eos_token"))
    bos_id = own(processor.bos_id()) if named_bos is None else named_bos
    eos_id = own(processor.eos_id()) if named_eos is None else named_eos
    # What the folder declares special is hidden too; the unknown token stays visible, as in sentencepiece.
    declared = {text: token_id for text in config.special_texts if (token_id := find(text)) is not None}
    eos_ids = tuple(dict.fromkeys([*([] if eos_id is None else [eos_id]), *config.eos_ids]))
    chat = config.chat(bos_token=None if bos_id is None else processor.id_to_piece(bos_id),
                       eos_token=None if eos_id is None else processor.id_to_piece(eos_id))
    return from_model(
        model, processor, add_bos=config.add_bos is not False, bos_id=bos_id, eos_ids=eos_ids, chat=chat,
        added=added, declared=declared, space_after_special=config.legacy,
        swallowing=frozenset(token.text for token in config.added if token.rstrip))


def from_model(model: bytes, processor: sentencepiece.SentencePieceProcessor, *, add_bos: bool,
               bos_id: int | None, eos_ids: tuple[int, ...], chat: ChatTemplate | None,
               added: Mapping[str, int] | None = None, declared: Mapping[str, int] | None = None,
               space_after_special: bool = True, swallowing: Set[str] = frozenset()) -> Tokenizer:
    """Wraps a sentencepiece model.

    Args:
      model: the serialised ModelProto of `processor`.
      added: text -> id of tokens beyond the model's own pieces.
      declared: text -> id of tokens to treat as special besides the model's control pieces.
      space_after_special: put sentencepiece's leading space before the text after every special token
        (transformers' legacy behaviour, llama.cpp's too), not only at the start of the text.
      swallowing: special tokens that take the whitespace after them with them (`rstrip` of Hugging Face).
    """
    size = processor.vocab_size()
    control = {processor.id_to_piece(i): i for i in _where(processor.is_control, size)}
    specials = {**control, **(declared or {})}
    # Control pieces are never matched by sentencepiece itself; user-defined pieces are.
    split = {processor.id_to_piece(processor.unk_id()): processor.unk_id(), **(added or {}), **specials}
    plain = processor
    if not space_after_special:
        plain = open_model(model + _NO_DUMMY_PREFIX, "sentencepiece model")
    beyond = {token_id: text.encode() for text, token_id in (added or {}).items()}
    return Tokenizer(
        vocab_size=max([size, *(i + 1 for i in beyond)]), bos_id=bos_id, eos_ids=eos_ids,
        special_ids=frozenset(specials.values()), chat=chat,
        prefix=(bos_id,) if add_bos and bos_id is not None else (), specials=specials,
        encoder=_encoder(processor, plain, split, swallowing),
        rules=_rules(processor, beyond, frozenset(specials.values())))


def open_model(model: bytes, name: str) -> sentencepiece.SentencePieceProcessor:
    """A processor for a serialised ModelProto; TokenizerError naming `name` if it is broken."""
    try:
        return sentencepiece.SentencePieceProcessor(model_proto=model)
    except Exception as error:  # RuntimeError today; the binding documents none
        reason = " ".join(str(error).split())
        raise TokenizerError(f"{name}: not a usable sentencepiece model: {reason}") from None


def split_pattern(texts: Iterable[str]) -> re.Pattern[str] | None:
    """Matches any of `texts`, the longest first, as one group (so that re.split keeps them)."""
    ordered = sorted(texts, key=len, reverse=True)
    return re.compile("(" + "|".join(map(re.escape, ordered)) + ")") if ordered else None


def _encoder(first: sentencepiece.SentencePieceProcessor, later: sentencepiece.SentencePieceProcessor,
             split: Mapping[str, int], swallowing: Set[str]) -> Callable[[str], list[int]]:
    pattern = split_pattern(split)

    def encode(text: str) -> list[int]:
        if not text.isascii():
            text.encode()  # UnicodeEncodeError for a lone surrogate
        ids: list[int] = []
        processor, before = first, ""
        for part in pattern.split(text) if pattern else [text]:
            part = part.lstrip() if before in swallowing else part
            before = part or before
            if part in split:
                ids.append(split[part])
            elif part:
                ids.extend(processor.encode(part))
            if part:
                processor = later
        return ids

    return encode


def _rules(processor: sentencepiece.SentencePieceProcessor, beyond: Mapping[int, bytes],
           special_ids: frozenset[int]) -> DecodeRules:
    size, unk_id = processor.vocab_size(), processor.unk_id()
    unk_text = processor.decode([unk_id]).encode()
    byte_values = {i: bytes([int(processor.id_to_piece(i)[1:-1], 16)])  # spelled <0x0A>
                   for i in _where(processor.is_byte, size)}
    drops, drops_all = _leading_rule(processor)
    known: dict[int, bytes] = {**beyond, **byte_values, unk_id: unk_text}

    def piece(token_id: int) -> bytes:
        found = known.get(token_id)
        if found is None:
            text = processor.id_to_piece(token_id).replace(META_SPACE, " ") if 0 <= token_id < size else ""
            found = known[token_id] = text.encode()
        return found

    def leading_space(token_id: int) -> bool:
        return (drops and token_id != unk_id and 0 <= token_id < size and token_id not in byte_values
                and processor.id_to_piece(token_id).startswith(META_SPACE))

    return DecodeRules(
        piece=piece, special_ids=special_ids, byte_level=False, byte_ids=frozenset(byte_values),
        leading_space=leading_space, drop_all_leading=drops_all, special_ends_run=True)


def _where(is_kind: Callable[[list[int]], list[bool]], size: int) -> list[int]:
    """The ids below `size` that are of a kind: one call for all, as 262144 calls would take a second."""
    return [i for i, yes in enumerate(is_kind(list(range(size)))) if yes]


def _leading_rule(processor: sentencepiece.SentencePieceProcessor) -> tuple[bool, bool]:
    """Whether decoding drops the first space, and whether it drops every space before the first text.

    The binding does not expose the normaliser's settings, but decoding one or two pieces shows them.
    """
    words = (i for i in range(processor.vocab_size()) if processor.id_to_piece(i).startswith(META_SPACE)
             and processor.id_to_piece(i)[1:2] not in ("", META_SPACE))
    word = next(words, None)
    if word is None:
        return False, False
    drops = not processor.decode([word]).startswith(" ")
    bare = processor.piece_to_id(META_SPACE)
    drops_all = drops and bare != processor.unk_id() and processor.decode([bare, bare]) == ""
    return drops, drops_all
