"""What a user calls a model -> a path on disk: a folder, a .gguf file, an embedded model, a Hub id."""

import errno
import os
import re
import sys
from pathlib import Path
from typing import Literal

from jinfer.errors import CacheError, CheckpointError
from jinfer.weights.embedded import EMBEDDED, Progress, fetch

_HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*")
_HUB_FILES = ["*.json", "*.safetensors", "*.model", "*.jinja", "*.txt"]
_NOT_HUB_FILES = ["*/*", "consolidated*"]  # the same weights once more, in other formats


def resolve_model(model: str | Path, *, cache_dir: Path | None = None,
                  on_progress: Progress | None = None) -> Path:
    """The folder or .gguf file that `model` stands for, downloaded into the cache if it has to be.

    Args:
      model: an existing folder, an existing .gguf file, the name of an embedded model (`smollm2-135m`,
        `gemma3-270m`) or a Hugging Face Hub id (`org/name`). A path that exists wins over a name.
      cache_dir: holds downloads; None is `user_cache_dir()`.
      on_progress: told how a download gets on.

    Raises CheckpointError if there is no such model or the download fails, CacheError if the cache cannot be
    written. Neither leaves anything half-written.
    """
    name = str(model)
    path, kind = _on_disk(model)
    if name and (kind == "folder" or (kind == "file" and path.suffix == ".gguf")):
        return path
    if kind == "file":
        raise CheckpointError(f"model {name!r}: this file is no .gguf file; {_accepted()}")
    if name in EMBEDDED:
        return fetch(name, cache_dir or user_cache_dir(), on_progress)
    if isinstance(model, str) and _HUB_ID.fullmatch(name):
        return _from_hub(name, cache_dir)
    raise CheckpointError(f"model {name!r}: not found; {_accepted()}")


def _on_disk(model: str | Path) -> tuple[Path, Literal["folder", "file", "nothing"]]:
    path = Path(model)
    try:
        path = path.expanduser()
        return path, "folder" if path.is_dir() else "file" if path.is_file() else "nothing"
    except PermissionError as error:
        raise CheckpointError(f"model {str(model)!r}: {error.strerror}") from None
    except (OSError, RuntimeError):  # a name too long for a path; the home of somebody unknown
        return path, "nothing"


def user_cache_dir() -> Path:
    """jinfer's folder in the user's cache, as the platform places it. Not created."""
    if sys.platform == "darwin":
        return Path.home() / "Library/Caches/jinfer"
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData/Local") / "jinfer"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jinfer"


def _accepted() -> str:
    return f"give a model folder, a .gguf file, a Hub id like org/name, or one of: {', '.join(EMBEDDED)}"


def _from_hub(name: str, cache_dir: Path | None) -> Path:
    """A snapshot of a Hub repository: configuration, tokenizer and safetensors; the library caches it."""
    from huggingface_hub import snapshot_download  # slow to import, and most models are local

    hub = None if cache_dir is None else cache_dir / "hub"
    try:
        folder = Path(snapshot_download(name, allow_patterns=_HUB_FILES, ignore_patterns=_NOT_HUB_FILES,
                                        cache_dir=hub))
    except Exception as error:  # the library raises its own, its HTTP client's and OS errors, by version
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EACCES, errno.EROFS):
            raise CacheError(f"cache of the Hub: cannot be written: {error.strerror}") from None
        cause = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise CheckpointError(f"model {name!r}: not a local path, and the Hub said: {cause[:300]}; "
                              f"{_accepted()}") from None
    if not (folder / "config.json").exists():
        raise CheckpointError(f"model {name!r}: the Hub repository has no config.json")
    return folder
