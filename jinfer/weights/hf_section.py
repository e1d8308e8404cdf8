"""A JSON object with typed access: what the readers of Hugging Face configurations are written with."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

from jinfer.errors import ConfigError

REQUIRED: Any = object()


class Section:
    """Keys of a JSON object; every complaint names the file and the key.

    A key that is absent gives the default; so does null, but where `null` is given it is the value of a null.
    """

    def __init__(self, path: Path, data: Mapping[str, Any] | None = None):
        """path: the file, for messages and, where data is not given, to read."""
        self.path = path
        self.data = _load(path) if data is None else data

    def fail(self, key: str, message: str) -> NoReturn:
        raise ConfigError(f"{self.path}: {key}: {message}")

    def inner(self, key: str) -> "Section":
        """The object at `key`, empty where it is absent or null."""
        value = self.data.get(key)
        if value is not None and not isinstance(value, dict):
            self.fail(key, f"must be an object, got {value!r}")
        return Section(Path(f"{self.path}: {key}"), value or {})

    def integer(self, key: str, default: Any = REQUIRED, null: Any = REQUIRED) -> Any:
        """A positive integer."""
        return self._get(key, default, null, lambda v: _whole(v) and v > 0, "a positive integer")

    def count(self, key: str, default: Any = REQUIRED, null: Any = REQUIRED) -> Any:
        """An integer of at least 0."""
        return self._get(key, default, null, lambda v: _whole(v) and v >= 0, "a whole number")

    def number(self, key: str, default: Any = REQUIRED, null: Any = REQUIRED) -> Any:
        value = self._get(key, default, null, _number, "a number")
        return float(value) if _number(value) else value

    def flag(self, key: str, default: Any = REQUIRED) -> Any:
        return self._get(key, default, REQUIRED, lambda v: isinstance(v, bool), "true or false")

    def numbers(self, key: str) -> tuple[float, ...]:
        """A list of numbers, all positive."""
        value = self._get(key, REQUIRED, REQUIRED, lambda v: isinstance(v, list) and
                          all(_number(item) and item > 0 for item in v), "a list of positive numbers")
        return tuple(float(item) for item in value)

    def either(self, new: str, old: str) -> str:
        """Which of two spellings of a key the object uses."""
        return old if self.data.get(new) is None and self.data.get(old) is not None else new

    def token_ids(self, key: str) -> tuple[int, ...]:
        """One token id, a list of them, or none."""
        value = self.data.get(key)
        values = [] if value is None else value if isinstance(value, list) else [value]
        for item in values:
            if not _whole(item) or item < 0:
                self.fail(key, f"must be a token id or a list of them, got {value!r}")
        return tuple(values)

    def _get(self, key: str, default: Any, null: Any, valid: Callable[[Any], bool], what: str) -> Any:
        value = self.data.get(key)
        if value is None:
            value = null if key in self.data and null is not REQUIRED else default
            if value is REQUIRED:
                self.fail(key, "is missing")
            return value
        if not valid(value):
            self.fail(key, f"must be {what}, got {value!r}")
        return value


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _load(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from None
    except ValueError as error:
        raise ConfigError(f"{path}: is not valid JSON: {error}") from None
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: must hold a JSON object")
    return data
