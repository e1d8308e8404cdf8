"""Tokenizer: text to token ids and back, whatever file the vocabulary came from."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence

from jinfer.errors import TokenizerError
from jinfer.tokenizer.chat import ChatTemplate
from jinfer.tokenizer.detok import DecodeRules, StreamDecoder, decode_ids


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Tokenizer:
    """One vocabulary. Made by `load_tokenizer`; safe to use from several threads.

    Attributes:
      vocab_size: highest token id + 1 (a model may pad its vocabulary beyond it).
      bos_id: beginning-of-sequence id, if there is one (it need not be added: see add_bos).
      eos_ids: every id that ends a generation, the tokenizer's own first.
      special_ids: control tokens, hidden by decode(skip_special=True).
      chat: the chat template, or None if the model has none.
      prefix: ids that encode() puts first, normally (bos_id,) or ().
      specials: text of each special token -> id.
      encoder: text -> ids; special tokens in the text are recognised, nothing is added.
      rules: how ids become text.
    """

    vocab_size: int
    bos_id: int | None
    eos_ids: tuple[int, ...]
    special_ids: frozenset[int]
    chat: ChatTemplate | None
    prefix: tuple[int, ...]
    specials: Mapping[str, int]
    encoder: Callable[[str], list[int]]
    rules: DecodeRules

    @property
    def add_bos(self) -> bool:
        """True if encode() puts the beginning-of-sequence token first."""
        return bool(self.prefix)

    def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        """Token ids of `text`.

        With add_special the beginning-of-sequence token stands first if the tokenizer is configured so,
        exactly
        once: a text that already spells it out gets no second one. Rendered chat templates are encoded with
        add_special=False. Raises TokenizerError if the text is not valid Unicode (a lone surrogate).
        """
        try:
            ids = self.encoder(text)
        except UnicodeEncodeError as error:
            raise TokenizerError(
                f"text holds a lone surrogate at character {error.start}; it is not valid Unicode") from None
        prefix = self.prefix
        if not add_special or not prefix or tuple(ids[:len(prefix)]) == prefix:
            return ids
        return [*prefix, *ids]

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """Text of `ids`. Ids outside the vocabulary give no text; illegal UTF-8 gives U+FFFD."""
        return decode_ids(self.rules, ids, skip_special=skip_special)

    def stream(self, prompt_ids: Sequence[int] = (), *, skip_special: bool = True) -> StreamDecoder:
        """A decoder for the tokens that follow `prompt_ids`."""
        return StreamDecoder(self.rules, prompt_ids, skip_special=skip_special)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes one token stands for (spaces are real spaces), b"" outside the vocabulary."""
        return self.rules.piece(token_id)

    def token_id(self, text: str) -> int | None:
        """The id of the special token spelled `text`, else None."""
        return self.specials.get(text)
