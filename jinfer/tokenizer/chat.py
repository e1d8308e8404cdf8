"""Chat templates: messages to one prompt string, by sandboxed Jinja2 as Hugging Face templates expect it."""

import datetime
import json
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from jinfer.errors import RequestError, TokenizerError


class ChatTemplate:
    """A model's chat template.

    Args:
      source: the Jinja source, or several by name ("default", "tool_use").
      variables: what templates may name besides the messages: bos_token, eos_token and the like.
    Raises TokenizerError if a source is not valid Jinja.
    """

    def __init__(self, source: str | Mapping[str, str], variables: Mapping[str, Any] | None = None):
        sources = {"default": source} if isinstance(source, str) else dict(source)
        environment = _environment()
        self._variables = dict(variables or {})
        self._templates: dict[str, jinja2.Template] = {}
        for name, text in sources.items():
            try:
                self._templates[name] = environment.from_string(text)
            except jinja2.TemplateSyntaxError as error:
                reason = f"chat template {name!r}, line {error.lineno}: {error.message}"
                raise TokenizerError(reason) from None
        if not self._templates:
            raise TokenizerError("chat template: none given")

    def render(self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True,
               **kwargs: Any) -> str:
        """The prompt for `messages`; encode it with add_special=False, for the template holds every special
        token.

        Content given as a list of text parts is joined in order; a missing content of an assistant message
        (one that only calls tools) becomes "". Further keywords (tools, documents, enable_thinking, ...) go
        to the template. Raises RequestError naming a malformed message, TokenizerError if the template fails
        or refuses.
        """
        name = "tool_use" if kwargs.get("tools") and "tool_use" in self._templates else "default"
        template = self._templates.get(name) or next(iter(self._templates.values()))
        values = {"tools": None, "documents": None, **self._variables, **kwargs}
        flat = [_flatten(i, message) for i, message in enumerate(_checked(messages))]
        try:
            return template.render(messages=flat, add_generation_prompt=add_generation_prompt, **values)
        except Exception as error:  # a template is a program: anything can come out of it
            reason = " ".join(str(error).split()) or type(error).__name__
            raise TokenizerError(f"chat template: {reason}") from None


def _checked(messages: Any) -> Sequence[Any]:
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence):
        raise RequestError("messages", f"must be a list of messages, got {type(messages).__name__}")
    if not messages:
        raise RequestError("messages", "must hold at least one message")
    return messages


def _flatten(index: int, message: Any) -> dict[str, Any]:
    field = f"messages[{index}]"
    if not isinstance(message, Mapping):
        raise RequestError(field, f"must be an object with role and content, got {type(message).__name__}")
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise RequestError(f"{field}.role", f"must be a non-empty string, got {role!r}")
    content = message.get("content")
    if content is None:
        if role != "assistant":
            raise RequestError(f"{field}.content", f"only an assistant message may go without, not {role!r}")
        content = ""
    elif not isinstance(content, str):
        content = _join_parts(f"{field}.content", content)
    return {**message, "content": content}


def _join_parts(field: str, parts: Any) -> str:
    if not isinstance(parts, Sequence) or isinstance(parts, bytes):
        raise RequestError(field, f"must be a string or a list of text parts, got {type(parts).__name__}")
    texts: list[str] = []
    for i, part in enumerate(parts):
        kind = part.get("type", "text") if isinstance(part, Mapping) else type(part).__name__
        if kind != "text" or not isinstance(part, Mapping):
            raise RequestError(f"{field}[{i}].type", f"only text parts are supported, got {kind!r}")
        text = part.get("text")
        if not isinstance(text, str):
            raise RequestError(f"{field}[{i}].text", f"must be a string, got {type(text).__name__}")
        texts.append(text)
    return "".join(texts)


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %} ... {% endgeneration %}` marks text to train on; it renders as its body."""

    tags = {"generation"}  # noqa: RUF012 (jinja2's own declaration)

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols])
    # Jinja's own tojson escapes HTML characters, which are no danger in a prompt and would change it.
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None,
             separators: tuple[str, str] | None = None, sort_keys: bool = False) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(form)
