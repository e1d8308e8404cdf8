"""tokenizer.json: encoding by the `tokenizers` library, decoding by the rules its decoder section states."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tokenizers

from jinfer.errors import TokenizerError
from jinfer.tokenizer.chat import ChatTemplate
from jinfer.tokenizer.detok import DecodeRules
from jinfer.tokenizer.folder import FolderConfig, read_folder
from jinfer.tokenizer.tokenizer import Tokenizer

_META_SPACE = "\u2581"


def load_hf(path: Path) -> Tokenizer:
    """The tokenizer of the file `path` (tokenizer.json) with the settings in the files beside it."""
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise TokenizerError(f"{path}: not a usable tokenizer.json: {error}") from None
    backend.no_truncation()
    backend.no_padding()
    config = read_folder(path.parent)
    _declare_specials(backend, config)
    bos_text = config.named.get("bos_token")
    bos_id = backend.token_to_id(bos_text) if bos_text else config.bos_id
    eos_text = config.named.get("eos_token")
    eos_id = backend.token_to_id(eos_text) if eos_text else None
    eos_ids = tuple(dict.fromkeys([*([] if eos_id is None else [eos_id]), *config.eos_ids]))

    def spelled(token_id: int | None) -> str | None:
        return None if token_id is None else backend.id_to_token(token_id)

    chat = config.chat(bos_token=spelled(bos_id), eos_token=spelled(eos_ids[0] if eos_ids else None))
    return from_backend(
        backend, prefix=_prefix(backend, config, bos_id), bos_id=bos_id, eos_ids=eos_ids, chat=chat,
        name=str(path))


def from_backend(backend: tokenizers.Tokenizer, *, prefix: tuple[int, ...], bos_id: int | None,
                 eos_ids: tuple[int, ...], chat: ChatTemplate | None, name: str) -> Tokenizer:
    """Wraps a `tokenizers` tokenizer; `name` stands in error messages."""
    specials = {t.content: i for i, t in backend.get_added_tokens_decoder().items() if t.special}
    special_ids = frozenset(specials.values())
    size = max(backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1  # ids may have gaps

    def encode(text: str) -> list[int]:
        if not text.isascii():
            text.encode()  # the library's own complaint about a lone surrogate names no position
        return backend.encode(text, add_special_tokens=False).ids

    return Tokenizer(
        vocab_size=size, bos_id=bos_id, eos_ids=eos_ids, special_ids=special_ids, chat=chat, prefix=prefix,
        specials=specials, encoder=encode, rules=_rules(backend, special_ids, name))


def _declare_specials(backend: tokenizers.Tokenizer, config: FolderConfig) -> None:
    """Adds what only tokenizer_config.json knows: added tokens, and which tokens count as special."""
    texts = set(config.special_texts)
    for token in sorted(config.added, key=lambda token: token.id):
        if backend.token_to_id(token.text) is None:
            backend.add_tokens([tokenizers.AddedToken(token.text, special=token.special, normalized=False)])
            if backend.token_to_id(token.text) != token.id:
                raise TokenizerError(f"tokenizer_config.json: added token {token.text!r} has id {token.id}, "
                                     f"but the next free id is {backend.token_to_id(token.text)}")
    known = {t.content for t in backend.get_added_tokens_decoder().values() if t.special}
    backend.add_special_tokens([
        tokenizers.AddedToken(text, special=True, normalized=False)
        for text in config.special_texts
        if text in texts - known and backend.token_to_id(text) is not None])


def _prefix(backend: tokenizers.Tokenizer, config: FolderConfig, bos_id: int | None) -> tuple[int, ...]:
    """What stands before every text: the post-processor's word, unless add_bos_token says otherwise."""
    if config.add_bos is False:
        return ()
    probe = backend.encode("a", add_special_tokens=True)
    count = 0
    while count < len(probe.ids) and probe.special_tokens_mask[count]:
        count += 1
    prefix = tuple(probe.ids[:count])
    if not prefix and config.add_bos and bos_id is not None:
        prefix = (bos_id,)
    return prefix


def _rules(backend: tokenizers.Tokenizer, special_ids: frozenset[int], name: str) -> DecodeRules:
    steps = _decoder_steps(backend, name)
    kinds = {step["type"] for step in steps}
    if kinds == {"ByteLevel"}:
        return DecodeRules(
            piece=_cached(backend, _byte_level_piece()), special_ids=special_ids, byte_level=True)
    unknown = kinds - {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}
    if unknown or not kinds:
        raise TokenizerError(f"{name}: decoder {', '.join(sorted(unknown)) or 'null'} is not supported; "
                             "known: ByteLevel, Metaspace, and Replace + ByteFallback + Fuse + Strip")
    space, strips = _META_SPACE, False
    for step in steps:
        if step["type"] == "Replace":
            if step.get("content") != " " or not isinstance(step.get("pattern", {}).get("String"), str):
                raise TokenizerError(f"{name}: decoder Replace {step.get('pattern')} is not supported")
            space = step["pattern"]["String"]
        elif step["type"] == "Strip":
            if (step.get("content"), step.get("start"), step.get("stop")) != (" ", 1, 0):
                raise TokenizerError(f"{name}: decoder Strip other than one leading space is not supported")
            strips = True
        elif step["type"] == "Metaspace":
            space = step.get("replacement", _META_SPACE)
            strips = step.get("prepend_scheme", "always") != "never"
    byte_values = _byte_fallback_ids(backend) if "ByteFallback" in kinds else {}

    def text_piece(token: str) -> bytes:
        return token.replace(space, " ").encode()

    texts = _cached(backend, text_piece)

    def piece(token_id: int) -> bytes:
        return byte_values.get(token_id) or texts(token_id)

    return DecodeRules(
        piece=piece, special_ids=special_ids, byte_level=False, byte_ids=frozenset(byte_values),
        leading_space=lambda token_id: strips and piece(token_id)[:1] == b" ")


def _decoder_steps(backend: tokenizers.Tokenizer, name: str) -> list[dict[str, Any]]:
    if backend.decoder is None:
        return []
    state: Any = backend.decoder.__getstate__()  # the JSON of the decoder section, as the library pickles it
    spec = json.loads(state)
    return spec["decoders"] if spec["type"] == "Sequence" else [spec]


def _cached(backend: tokenizers.Tokenizer, convert: Callable[[str], bytes]) -> Callable[[int], bytes]:
    """id -> bytes, filled as ids turn up: a table of 262144 pieces would delay the first token."""
    known: dict[int, bytes] = {}

    def piece(token_id: int) -> bytes:
        found = known.get(token_id)
        if found is None:
            token = backend.id_to_token(token_id) if token_id >= 0 else None
            found = known[token_id] = b"" if token is None else convert(token)
        return found

    return piece


def _byte_level_piece() -> Callable[[str], bytes]:
    values = byte_alphabet()

    def convert(token: str) -> bytes:
        try:
            return bytes([values[char] for char in token])
        except KeyError:  # an added token spelled in plain text
            return token.encode()

    return convert


def byte_alphabet() -> dict[str, int]:
    """Character -> byte of byte-level BPE: printable Latin-1 stands for itself, the rest for 256, 257, ...

    Source: bytes_to_unicode of GPT-2's encoder.py.
    """
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    values = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if chr(byte) not in values]
    return values | {chr(256 + i): byte for i, byte in enumerate(others)}


def _byte_fallback_ids(backend: tokenizers.Tokenizer) -> dict[int, bytes]:
    ids = ((backend.token_to_id(f"<0x{byte:02X}>"), byte) for byte in range(256))
    return {token_id: bytes([byte]) for token_id, byte in ids if token_id is not None}
