"""What the JSON files beside a tokenizer say: special tokens, end tokens, BOS switch, chat template."""

import dataclasses
import json
from pathlib import Path
from typing import Any

from jinfer.errors import TokenizerError
from jinfer.tokenizer.chat import ChatTemplate

_NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_LISTED = ("additional_special_tokens", "extra_special_tokens")


@dataclasses.dataclass(frozen=True, slots=True)
class AddedToken:
    """A token of `added_tokens_decoder`, matched in the text before anything else.

    rstrip: it takes the whitespace after it with it.
    """

    id: int
    text: str
    special: bool
    rstrip: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class FolderConfig:
    """Merged view of tokenizer_config.json, special_tokens_map.json, generation_config.json and config.json.

    Attributes:
      named: bos_token, eos_token, ... -> text, for those that are set.
      special_texts: all texts declared special, the named ones included.
      added: tokens of `added_tokens_decoder`.
      add_bos: the `add_bos_token` switch, None if it is not given.
      legacy: sentencepiece's `legacy` switch: a space is put before the text after each special token.
      bos_id: `bos_token_id` of the generation or model config, if any.
      eos_ids: `eos_token_id` of both, in that order, without repeats.
      templates: chat templates by name.
    """

    named: dict[str, str]
    special_texts: tuple[str, ...]
    added: tuple[AddedToken, ...]
    add_bos: bool | None
    legacy: bool
    bos_id: int | None
    eos_ids: tuple[int, ...]
    templates: dict[str, str]

    def chat(self, **variables: str | None) -> ChatTemplate | None:
        """The chat template with the named tokens (`variables` where those are not set), None without one."""
        if not self.templates:
            return None
        given = {name: text for name, text in variables.items() if text is not None}
        return ChatTemplate(self.templates, {**given, **self.named})


def read_folder(path: Path) -> FolderConfig:
    """Reads the files in the folder `path`; each of them may be absent. TokenizerError if one is broken."""
    tokens = _read(path / "tokenizer_config.json")
    special_map = _read(path / "special_tokens_map.json")
    generation, model = _read(path / "generation_config.json"), _read(path / "config.json")
    inner = model.get("text_config")
    configs = [generation, model, *([inner] if isinstance(inner, dict) else [])]

    declared = {**special_map, **{k: v for k, v in tokens.items() if v is not None}}
    named = {name: text for name in _NAMED if (text := _text(declared.get(name)))}
    added = tuple(_added(path, tokens.get("added_tokens_decoder")))
    special_texts = dict.fromkeys([*named.values(), *(token.text for token in added if token.special)])
    for name in _LISTED:
        listed = declared.get(name)
        values = listed.values() if isinstance(listed, dict) else listed or []
        special_texts.update(dict.fromkeys(text for value in values if (text := _text(value))))

    add_bos = tokens.get("add_bos_token")
    bos_id = next((config["bos_token_id"] for config in configs if _is_id(config.get("bos_token_id"))), None)
    eos_ids = dict.fromkeys(i for config in configs for i in _ids(config.get("eos_token_id")))
    return FolderConfig(
        named, tuple(special_texts), added, add_bos if isinstance(add_bos, bool) else None,
        tokens.get("legacy") is not False, bos_id, tuple(eos_ids), _templates(path, tokens))


def _read(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise TokenizerError(f"{path}: cannot be read as JSON: {error}") from None
    if not isinstance(values, dict):
        raise TokenizerError(f"{path}: must hold a JSON object, got {type(values).__name__}")
    return values


def _text(value: Any) -> str | None:
    """A token is spelled as a string or as an object with a `content`."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) and value else None


def _is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _ids(value: Any) -> list[int]:
    return [i for i in (value if isinstance(value, list) else [value]) if _is_id(i)]


def _added(path: Path, decoder: Any) -> list[AddedToken]:
    if not isinstance(decoder, dict):
        return []
    tokens: list[AddedToken] = []
    for key, value in decoder.items():
        text = _text(value)
        if not str(key).isdigit() or text is None:
            raise TokenizerError(f"{path}: tokenizer_config.json: added_tokens_decoder[{key!r}] is malformed")
        special, rstrip = (isinstance(value, dict) and bool(value.get(name)) for name in ("special", "rstrip"))
        tokens.append(AddedToken(int(key), text, special, rstrip))
    return tokens


def _templates(path: Path, tokens: dict[str, Any]) -> dict[str, str]:
    """chat_template.jinja wins, then chat_template.json, then tokenizer_config.json, as in transformers."""
    file = path / "chat_template.jinja"
    try:
        return {"default": file.read_text("utf-8")}
    except FileNotFoundError:
        pass
    except (OSError, ValueError) as error:
        raise TokenizerError(f"{file}: cannot be read: {error}") from None
    value = _read(path / "chat_template.json").get("chat_template") or tokens.get("chat_template")
    if not value:
        return {}
    if isinstance(value, str):
        return {"default": value}
    named = {item.get("name"): item.get("template") for item in value if isinstance(item, dict)} \
        if isinstance(value, list) else value
    if not isinstance(named, dict) or not all(isinstance(x, str) for pair in named.items() for x in pair):
        raise TokenizerError(f"{path}: chat_template must be a string or a list of named templates")
    return named
