"""One line of a batch file -> a request, or a reason why not.

Two shapes are read. jinfer's own: `{"custom_id", "prompt" | "messages", <any field of SamplingParams or
ServiceParams>}`. And that of OpenAI's batch files: `{"custom_id", "method": "POST", "url", "body": {...}}` where url is
/v1/completions or /v1/chat/completions.
"""

import dataclasses
import json
from collections.abc import Mapping
from typing import Any, Literal, NoReturn

from jinfer.config.sampling import SamplingParams
from jinfer.config.service import ServiceParams
from jinfer.errors import RequestError
from jinfer.prompts import is_conversation, is_one_prompt

Kind = Literal["plain", "completion", "chat"]

_URLS: dict[str, Kind] = {"/v1/completions": "completion", "/v1/chat/completions": "chat"}
_SAMPLING = frozenset(field.name for field in dataclasses.fields(SamplingParams))
_SERVICE = frozenset(field.name for field in dataclasses.fields(ServiceParams))
_IGNORED = ("model", "user", "metadata", "store")  # they change nothing about the answer


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """A good row. line: its number in the file, from 1. item: text, token ids or a conversation."""

    line: int
    custom_id: str
    kind: Kind
    item: Any
    params: SamplingParams
    service: ServiceParams = dataclasses.field(default_factory=ServiceParams)
    model: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class BadRow:
    """A row that cannot be a request. custom_id: None when it has none of its own."""

    line: int
    custom_id: str | None
    error: RequestError


def is_blank(data: bytes) -> bool:
    """True for a row that is skipped: nothing in it but JSON's white space."""
    return not data.strip(b" \t\r\n")


def parse_row(line: int, data: bytes, defaults: Mapping[str, Any] | None = None) -> Row | BadRow:
    """Reads one row. `defaults` are fields of SamplingParams and ServiceParams for rows that do not set them."""
    custom_id: str | None = None
    try:
        value = _json(data.removeprefix(b"\xef\xbb\xbf") if line == 1 else data)
        if not isinstance(value, dict):
            raise RequestError("row", f"must be a JSON object, got {value!r:.40}")
        named = value.pop("custom_id", None)
        if named is not None:
            custom_id = _custom_id(named)
        openai = not value.keys().isdisjoint(("method", "url", "body"))
        read = _openai if openai else _plain
        return read(line, custom_id, value, dict(defaults or {}))
    except RequestError as error:
        return BadRow(line, custom_id, error)


def _json(data: bytes) -> Any:
    try:
        return json.loads(data.decode("utf-8"), parse_constant=_no_constant)
    except UnicodeDecodeError as error:
        raise RequestError("row", f"not UTF-8 at byte {error.start}") from None
    except RecursionError:
        raise RequestError("row", "nested too deeply") from None
    except ValueError as error:
        raise RequestError("row", f"not valid JSON: {error}") from None


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON value")


def _custom_id(value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise RequestError("custom_id", f"must be a non-empty string, got {value!r:.40}")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise RequestError("custom_id", "holds half a surrogate pair") from None
    return value


def _plain(line: int, custom_id: str | None, fields: dict[str, Any], defaults: dict[str, Any]) -> Row:
    given = [name for name in ("prompt", "messages") if fields.get(name) is not None]
    if len(given) != 1:
        raise RequestError("prompt", "give it or messages, not both" if given else "missing, and no messages")
    item = fields[given[0]]
    _check_item(given[0], item)
    fields = {name: value for name, value in fields.items() if name not in ("prompt", "messages")}
    return Row(line, custom_id or f"line-{line}", "plain", item, *parameters(defaults | fields))


def _openai(line: int, custom_id: str | None, fields: dict[str, Any], defaults: dict[str, Any]) -> Row:
    for name in fields:
        if name not in ("method", "url", "body"):
            raise RequestError(name, "unknown field of a batch row; known: custom_id, method, url, body")
    if custom_id is None:
        raise RequestError("custom_id", "missing")
    if fields.get("method", "POST") != "POST":
        raise RequestError("method", f"must be POST, got {fields['method']!r:.40}")
    url, body = fields.get("url"), fields.get("body")
    if not isinstance(url, str) or url not in _URLS:
        raise RequestError("url", f"must be {' or '.join(_URLS)}, got {url!r:.40}")
    if not isinstance(body, dict):
        raise RequestError("body", "missing" if body is None else f"must be an object, got {body!r:.40}")
    kind = _URLS[url]
    field = "messages" if kind == "chat" else "prompt"
    body = {name: value for name, value in body.items() if value is not None}  # null means the default
    if field not in body:
        raise RequestError(field, "missing")
    item = body.pop(field)
    _check_item(field, item)
    if body.pop("stream", False) is not False:
        raise RequestError("stream", "a batch row cannot stream")
    model = str(body.get("model", ""))
    for name in _IGNORED:
        body.pop(name, None)
    translate = _chat_names if kind == "chat" else _completion_names
    return Row(line, custom_id, kind, item, *parameters(translate(body, defaults)), model)


def parameters(fields: Mapping[str, Any]) -> tuple[SamplingParams, ServiceParams]:
    """Fields of both, told apart by their names. Raises RequestError naming the field that is unknown or invalid."""
    for name in fields:
        if name not in _SAMPLING | _SERVICE:
            raise RequestError(str(name), f"unknown parameter; known: {', '.join(sorted(_SAMPLING | _SERVICE))}")
    service = {name: value for name, value in fields.items() if name in _SERVICE}
    sampling = {name: value for name, value in fields.items() if name in _SAMPLING}
    return SamplingParams.from_dict(sampling), ServiceParams.from_dict(service)


def _completion_names(body: dict[str, Any], defaults: dict[str, Any]) -> dict[str, Any]:
    """OpenAI's completion fields -> SamplingParams fields; max_tokens defaults to 16, as theirs does."""
    if body.pop("echo", False) is not False:
        raise RequestError("echo", "not supported")
    return {"max_tokens": 16} | defaults | body


def _chat_names(body: dict[str, Any], defaults: dict[str, Any]) -> dict[str, Any]:
    """OpenAI's chat fields -> SamplingParams fields; max_tokens defaults to what the context holds."""
    if "max_completion_tokens" in body:
        body["max_tokens"] = body.pop("max_completion_tokens")
    wanted, top = body.pop("logprobs", False), body.pop("top_logprobs", 0)
    if not isinstance(wanted, bool):
        raise RequestError("logprobs", f"must be true or false, got {wanted!r:.40}")
    if wanted:
        body["logprobs"] = top
    elif top:
        raise RequestError("top_logprobs", "needs logprobs to be true")
    return {"max_tokens": None} | defaults | body


def _check_item(field: str, item: Any) -> None:
    if field == "messages" and not is_conversation(item):
        raise RequestError(field, f"must be a list of at least one message, got {item!r:.40}")
    if field == "prompt" and not (is_one_prompt(item) and not is_conversation(item)):
        raise RequestError(field, f"must be text or a list of token ids, got {item!r:.40}")
