"""Folders that appear whole or not at all."""

import contextlib
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from jinfer.errors import CheckpointError
from jinfer.weights.orbax import FOLDER

CONFIG = "config.json"  # no folder is a model without it, so it is written last


@contextlib.contextmanager
def new_folder(target: Path, *, need: int, overwrite: bool) -> Iterator[Path]:
    """A temporary sibling of `target`, renamed to it if the block ends well and removed if it raises.

    A process that is killed leaves only the sibling (`.NAME.*.incomplete`), which has no config.json before
    the last moment. Replacing an existing folder takes two renames: between them there is none.

    Args:
      need: bytes that will be written; refused here if the disk has less.
    Raises CheckpointError naming the path: it exists (and `overwrite` is false, or it is no model), no space, no
    permission, and for every OSError of the block.
    """
    check_target(target, overwrite=overwrite)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(target.parent).free
        if need > free:
            raise CheckpointError(f"{target}: no space: {need / 1e6:,.0f} MB needed, {free / 1e6:,.0f} MB free")
        scratch = Path(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=".incomplete", dir=target.parent))
    except OSError as error:
        raise CheckpointError(f"{target}: cannot be written: {error.strerror or error}") from None
    try:
        yield scratch
        _sync_files(scratch)
        scratch.chmod(0o777 & ~_umask())  # mkdtemp's folder is private
        _replace(scratch, target)
    except OSError as error:
        raise CheckpointError(f"{target}: cannot be written: {error.strerror or error}") from None
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


@contextlib.contextmanager
def synced(path: Path) -> Iterator[BinaryIO]:
    """A new file, on the disk when the block ends: a rename must not overtake its data."""
    with path.open("xb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


def check_target(target: Path, *, overwrite: bool) -> None:
    """CheckpointError if `target` exists and may not be replaced."""
    try:
        _check_target(target, overwrite=overwrite)
    except OSError as error:
        raise CheckpointError(f"{target}: cannot be written: {error.strerror or error}") from None


def _check_target(target: Path, *, overwrite: bool) -> None:
    if not target.exists() and not target.is_symlink():
        return
    if not overwrite:
        raise CheckpointError(f"{target}: exists; choose another place or overwrite it")
    if not target.is_dir() or target.is_symlink():
        raise CheckpointError(f"{target}: is no folder, and only folders are replaced")
    weights = any(path.suffix == ".safetensors" or path.name == FOLDER for path in target.iterdir())
    if any(target.iterdir()) and not (weights and (target / CONFIG).is_file()):
        raise CheckpointError(f"{target}: holds no {CONFIG} or no weights, so it is no model that may be replaced")


def _sync_files(folder: Path) -> None:
    """The small ones, whoever wrote them: large ones are on the disk already, and Orbax syncs its own."""
    for path in folder.iterdir():
        if path.is_file():
            with path.open("r+b") as file:
                os.fsync(file.fileno())


def _replace(scratch: Path, target: Path) -> None:
    if not target.exists():
        os.rename(scratch, target)
        return
    aside = Path(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=".replaced", dir=target.parent))
    try:
        os.rename(target, aside)  # onto an empty folder
    except OSError:
        aside.rmdir()
        raise
    try:
        os.rename(scratch, target)
    except OSError:
        os.rename(aside, target)
        raise
    shutil.rmtree(aside, ignore_errors=True)


def _umask() -> int:
    value = os.umask(0)
    os.umask(value)
    return value


def reason(error: BaseException) -> str:
    """The system's own words, where TensorStore wraps its error in a page of context."""
    code = re.search(r"os_error_code='(\d+)'", str(error))
    return os.strerror(int(code[1])) if code else " ".join(str(error).split())
