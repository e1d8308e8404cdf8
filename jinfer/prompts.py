"""What users hand in -> what an engine takes: text or token ids, and whether BOS is still to be added."""

from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import TYPE_CHECKING, Any, NamedTuple, TypeGuard

from jinfer.errors import RequestError, TokenizerError

if TYPE_CHECKING:
    from jinfer.tokenizer import Tokenizer

type Prompt = str | Sequence[int]
type Messages = Sequence[Mapping[str, Any]]


class Prepared(NamedTuple):
    """Arguments of `Engine.submit`. add_special: let the tokenizer put BOS in front, if it is set up to."""

    prompt: str | list[int]
    add_special: bool


def is_conversation(item: object) -> TypeGuard[Messages]:
    """True for a list of chat messages, false for text, token ids, or lists of those."""
    return _is_list(item) and len(item) > 0 and isinstance(item[0], Mapping)


def is_one_prompt(item: object) -> TypeGuard[Prompt]:
    """True for text or a list of token ids. An empty list is a list of no prompts."""
    item = _unpacked(item)
    return isinstance(item, str) or (_is_list(item) and len(item) > 0 and not _is_prompt(item[0]))


def prepare(item: object, tokenizer: "Tokenizer | None", *, answer: bool = True) -> Prepared:
    """Checks a prompt or a conversation, and renders the latter with the model's chat template.

    answer: the assistant's turn begins at its end; false for what is only a beginning.

    Raises RequestError naming `prompt` or `messages`.
    """
    item = _unpacked(item)
    if is_conversation(item):
        return Prepared(_text("messages", render(item, tokenizer, answer)), False)  # the template holds all specials
    if isinstance(item, str):
        return Prepared(_text("prompt", item), True)
    if _is_list(item) and all(isinstance(i, Integral) and not isinstance(i, bool) for i in item):
        return Prepared([int(i) for i in item], False)
    raise RequestError("prompt", f"must be text or a list of token ids, got {item!r:.60}")


def render(messages: object, tokenizer: "Tokenizer | None", answer: bool = True) -> str:
    """The prompt of a conversation; with `answer`, up to where the assistant's turn begins."""
    if not _is_list(messages) or not messages:
        raise RequestError("messages", f"must be a list of at least one message, got {messages!r:.60}")
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise RequestError("messages", f"[{i}] must be an object with a role, got {message!r:.60}")
    if tokenizer is None or tokenizer.chat is None:
        raise RequestError("messages", "this model has no chat template; give a plain prompt")
    try:
        return tokenizer.chat.render(messages, add_generation_prompt=answer)
    except TokenizerError as error:
        raise RequestError("messages", str(error)) from error


def _text(field: str, text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(field, f"holds half a surrogate pair at character {error.start}") from None
    return text


def _is_list(item: object) -> TypeGuard[Sequence[Any]]:
    return isinstance(item, Sequence) and not isinstance(item, str | bytes | bytearray)


def _is_prompt(first: object) -> bool:
    """An element that makes its list a list of prompts."""
    return isinstance(first, str) or _is_list(_unpacked(first))


def _unpacked(item: Any) -> Any:
    """An array of token ids as a list; anything else as it is."""
    return item.tolist() if getattr(item, "ndim", 0) else item
