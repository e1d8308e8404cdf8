"""Token ids back to text, one at a time: never half a character, never a lost space.

Two families of vocabularies exist. In a byte-level one every token is a run of bytes and text is the UTF-8
decoding of all bytes together; an illegal sequence becomes one U+FFFD (the "maximal subpart" rule of the
Unicode standard, chapter 3.9, which Python and Rust share). In a sentencepiece one a token is text, except
for byte-fallback tokens, whose runs are decoded together with one U+FFFD for each illegal byte, and the space
that sentencepiece puts before the first word is dropped at the very start of the text only.

`Tokenizer.decode` feeds a StreamDecoder as well, so streamed and whole text cannot differ.
"""

import codecs
import dataclasses
from collections.abc import Callable, Iterable, Sequence

REPLACEMENT = "\ufffd"
_NO_IDS: frozenset[int] = frozenset()


def _never(token_id: int) -> bool:
    return False


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DecodeRules:
    """How one vocabulary turns ids into text.

    Attributes:
      piece: token id -> its bytes (UTF-8 text with real spaces for sentencepiece); b"" for an unknown id.
      special_ids: tokens that are hidden when specials are skipped.
      byte_level: every token is bytes. If False, only `byte_ids` are and all other pieces are whole text.
      byte_ids: the byte-fallback tokens of a sentencepiece vocabulary.
      leading_space: whether an id starts with a space that is dropped at the very start of the text.
      drop_all_leading: drop such spaces until there is text (sentencepiece's remove_extra_whitespaces), not
        one.
      special_ends_run: a skipped special token ends a run of byte tokens (as in sentencepiece; tokenizer.json
        decoders never see the skipped token).
    """

    piece: Callable[[int], bytes]
    special_ids: frozenset[int]
    byte_level: bool
    byte_ids: frozenset[int] = _NO_IDS
    leading_space: Callable[[int], bool] = _never
    drop_all_leading: bool = False
    special_ends_run: bool = False


class StreamDecoder:
    """Text of a growing sequence of ids. Cost per token does not depend on how many came before.

    The texts returned by push and flush, joined, are what decoding prompt + new ids has beyond the text of
    the prompt alone.

    Args:
      rules: of the vocabulary.
      prompt_ids: what stands before the first pushed token; only its tail (and, until the first visible
        token, its head) is looked at.
      skip_special: hide special tokens.
    """

    __slots__ = ("_at_start", "_owed", "_rules", "_run", "_skip")

    def __init__(self, rules: DecodeRules, prompt_ids: Sequence[int] = (), *, skip_special: bool = True):
        self._rules = rules
        self._skip = rules.special_ids if skip_special else _NO_IDS
        self._run = _Utf8Run() if rules.byte_level else _ByteRun()
        self._at_start = True
        # Replacement characters that the prompt's own text ends with because it stops inside a character.
        self._owed = 0
        if len(prompt_ids):
            self._read_prompt(prompt_ids)

    def push(self, token_id: int) -> str:
        """Text that became certain with this token; may be empty."""
        text = self._advance(token_id)
        return self._beyond_prompt(text) if self._owed and text else text

    def flush(self) -> str:
        """What an unfinished character at the end decodes to. Call once, after the last token."""
        text = self._run.end()
        return self._beyond_prompt(text) if self._owed and text else text

    def _advance(self, token_id: int) -> str:
        rules = self._rules
        if token_id in self._skip:
            return self._visible(self._run.end()) if rules.special_ends_run else ""
        piece = rules.piece(token_id)
        if rules.byte_level:
            return self._run.feed(piece)
        if token_id in rules.byte_ids:
            if self._at_start and rules.leading_space(token_id):
                piece = piece[1:]
            self._at_start = False
            return self._run.feed(piece)
        before = self._visible(self._run.end())
        if self._at_start and rules.leading_space(token_id):
            piece = piece[1:]
            self._at_start = rules.drop_all_leading and not piece
        elif piece:
            self._at_start = False
        return before + piece.decode("utf-8", "replace")

    def _visible(self, text: str) -> str:
        if text:
            self._at_start = False
        return text

    def _beyond_prompt(self, text: str) -> str:
        # The prompt's text ended in U+FFFD for a character it had begun. If that character is now completed
        # it is new text; if it is broken for good, those U+FFFD are the prompt's and are not given twice.
        kept = text.lstrip(REPLACEMENT)
        repeated = min(len(text) - len(kept), self._owed)
        self._owed = 0 if kept else self._owed - repeated
        return text[repeated:]

    def _read_prompt(self, ids: Sequence[int]) -> None:
        rules = self._rules
        if not rules.byte_level:
            for token_id in ids:  # stops at the first visible token: normally the first or second
                self._advance(token_id)
                if not self._at_start:
                    break
            self._run.end()
        for token_id in reversed(self._unfinished(ids)):
            self._run.feed(rules.piece(token_id))
        self._owed = len(self._run.peek())

    def _unfinished(self, ids: Sequence[int]) -> list[int]:
        """The last ids, newest first, that can hold an unfinished character (three bytes at most)."""
        rules, tail, size = self._rules, [], 0
        for token_id in reversed(ids):
            if size >= 3:
                break
            if token_id in self._skip:
                if rules.special_ends_run:
                    break
                continue
            if not rules.byte_level and token_id not in rules.byte_ids:
                break
            tail.append(token_id)
            size += len(rules.piece(token_id))
        return tail


class _Utf8Run:
    """Bytes of a byte-level vocabulary: one U+FFFD for each maximal illegal subpart."""

    __slots__ = ("_decoder",)

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, data: bytes) -> str:
        return self._decoder.decode(data)

    def end(self) -> str:
        return self._decoder.decode(b"", final=True)

    def peek(self) -> str:
        return self._decoder.getstate()[0].decode("utf-8", "replace")


class _ByteRun:
    """A run of byte-fallback tokens: one U+FFFD for each illegal byte, as sentencepiece decodes."""

    __slots__ = ("_held",)

    def __init__(self) -> None:
        self._held = b""

    def feed(self, data: bytes) -> str:
        text, self._held = _legal(self._held + data)
        return text

    def end(self) -> str:
        if not self._held:
            return ""
        text, self._held = REPLACEMENT * len(self._held), b""
        return text

    def peek(self) -> str:
        return REPLACEMENT * len(self._held)


def _legal(data: bytes) -> tuple[str, bytes]:
    """Text of `data` with U+FFFD for each illegal byte, and the unfinished character it ends with."""
    text: list[str] = []
    while data:
        try:
            text.append(data.decode("utf-8"))
            return "".join(text), b""
        except UnicodeDecodeError as error:
            text.append(data[:error.start].decode("utf-8"))
            if error.reason == "unexpected end of data":
                return "".join(text), data[error.start:]
            text.append(REPLACEMENT)
            data = data[error.start + 1:]
    return "".join(text), b""


def decode_ids(rules: DecodeRules, ids: Iterable[int], *, skip_special: bool) -> str:
    """Text of all ids at once."""
    stream = StreamDecoder(rules, skip_special=skip_special)
    return "".join([stream.push(i) for i in ids]) + stream.flush()
