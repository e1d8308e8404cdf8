"""What a stopped job leaves beside its target: the answers so far, from which the same job goes on.

One line a row: its record, or null where a later row was answered first; then a line that says whose job it is.
"""

import contextlib
import hashlib
import json
from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from jinfer.errors import ConfigError

Record = dict[str, Any]


def partial_path(target: Path) -> Path:
    return target.with_name(f"{target.name}.partial")


def job_digest(source: Path, model: str, defaults: Mapping[str, Any] | None) -> str:
    """Changes with everything that makes an answer of a job another one: its rows, model and parameters."""
    with source.open("rb") as rows:
        digest = hashlib.file_digest(rows, "sha256")
    digest.update(json.dumps([model, dict(defaults or {})], sort_keys=True).encode())
    return digest.hexdigest()


def last_line(job: str) -> bytes:
    """What ends the file of a stopped job."""
    return json.dumps({"job": job}).encode() + b"\n"


def check_partial(path: Path, job: str) -> None:
    """Raises ConfigError if the file exists and was left by another job."""
    if path.exists() and not _belongs(path, job):
        raise ConfigError(f"{path}: left by a job with other rows, model or options; delete it or give --overwrite")


@contextlib.contextmanager
def read_partial(path: Path, job: str) -> Iterator[Iterator[Record | None]]:
    """The records of the same job in order of its rows; none if it left no such file."""
    if not path.exists() or not _belongs(path, job):
        yield iter(())
        return
    end = last_line(job)
    with path.open("rb") as lines:
        yield (json.loads(line) for line in lines if line != end)


def _belongs(path: Path, job: str) -> bool:
    with path.open("rb") as lines:
        return bool(last := deque(lines, maxlen=1)) and last[0] == last_line(job)
