"""Typed access to the metadata of one architecture in a GGUF file; every complaint names the file and the key."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from jinfer.errors import ConfigError


def as_written(value: float) -> float:
    """The shortest decimal of a number kept in float32: what the converter was given."""
    return float(str(np.float32(value))) if float(np.float32(value)) == value else value


class Keys:
    """The `ARCHITECTURE.*` metadata.

    Args:
      path: for messages.
      architecture: the prefix.
      metadata: of the whole file.
    """

    def __init__(self, path: Path, architecture: str, metadata: dict[str, Any]):
        self.path, self.metadata, self._prefix = path, metadata, f"{architecture}."

    def fail(self, name: str, message: str) -> NoReturn:
        raise ConfigError(f"{self.path}: {self._prefix}{name}: {message}")

    def get(self, name: str) -> Any:
        return self.metadata.get(self._prefix + name)

    def integer(self, name: str, default: int | None = None) -> int:
        return self._typed(name, default, int, "a whole number")

    def number(self, name: str, default: float | None = None) -> float:
        return as_written(float(self._typed(name, default, int | float, "a number")))

    def flag(self, name: str, default: bool) -> bool:
        value = self.get(name)
        if value is not None and not isinstance(value, bool):
            self.fail(name, f"must be true or false, got {value!r}")
        return default if value is None else value

    def refuse_all_but(self, known: Iterable[str]) -> None:
        """ConfigError for a key that is none of `known` and does not say that something is switched off."""
        names = set(known)
        for key, value in self.metadata.items():
            name = key.removeprefix(self._prefix)
            if not key.startswith(self._prefix) or name in names or not value:
                continue  # absent, false, zero and empty mean: not used
            if not (name.endswith("_scale") and value == 1.0):
                shown = repr(value) if len(repr(value)) < 80 else f"{repr(value)[:80]}..."
                self.fail(name, f"{shown} is not supported")

    def _typed(self, name: str, default: Any, kind: Any, what: str) -> Any:
        value = self.get(name)
        if isinstance(value, list) and value and len(set(value)) == 1:
            value = value[0]  # a value a layer, all the same
        if value is None:
            if default is None:
                self.fail(name, "is missing")
            return default
        if not isinstance(value, kind) or isinstance(value, bool) or value < 0:
            self.fail(name, f"must be {what}, got {value!r}")
        return value
