"""Recorded traces -> records: Azure's csv, Mooncake's jsonl with prefix blocks, ShareGPT lengths as jsonl."""

import dataclasses
import datetime
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from jinfer.errors import ConfigError

BLOCK = 512  # tokens of a prompt that one of Mooncake's ids stands for
AZURE = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


@dataclasses.dataclass(frozen=True, slots=True)
class Record:
    """Attributes:
      time: seconds after the first record. prompt, output: tokens.
      blocks: ids of the prompt's blocks of BLOCK tokens, equal for equal beginnings; none: nothing is shared.
    """

    time: float
    prompt: int
    output: int
    blocks: tuple[int, ...] = ()


def read_trace(path: Path, form: str = "auto", limit: int | None = None) -> list[Record]:
    """The records of a trace in order of time, which starts at 0.

    Raises ConfigError naming file, line and field.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from None
    lines = [(number, line) for number, line in enumerate(text.splitlines(), 1) if line.strip()]
    if not lines:
        raise ConfigError(f"{path}: holds no request")
    read = _READERS[_format(path, lines[0][1]) if form == "auto" else form]
    records = list(read(path, lines, limit))
    if not records:
        raise ConfigError(f"{path}: holds no request")
    first = min(record.time for record in records)
    shifted = [dataclasses.replace(record, time=record.time - first) for record in records]
    return sorted(shifted, key=lambda record: record.time)  # stable: equal times stay in the file's order


def _format(path: Path, line: str) -> str:
    if line.startswith("TIMESTAMP"):
        return "azure"
    for field, form in (("hash_ids", "mooncake"), ("input_toks", "sharegpt"), ("input_length", "mooncake")):
        if line.lstrip().startswith("{") and f'"{field}"' in line:
            return form
    raise ConfigError(f"{path}: line 1: format: neither Azure's csv ({','.join(AZURE)}) nor Mooncake's or ShareGPT's "
                      f"jsonl, got {line:.60}")


Lines = list[tuple[int, str]]


def _azure(path: Path, lines: Lines, limit: int | None) -> Iterator[Record]:
    number, header = lines[0]
    columns = [name.strip() for name in header.split(",")]
    for name in AZURE:
        if name not in columns:
            raise ConfigError(f"{path}: line {number}: {name}: no such column in {header:.60}")
    places = [columns.index(name) for name in AZURE]
    for number, line in lines[1:][:limit]:
        cells = line.split(",")
        if len(cells) != len(columns):
            raise ConfigError(f"{path}: line {number}: {len(cells)} columns, the header has {len(columns)}")
        stamp, prompt, output = (cells[i].strip() for i in places)
        yield Record(_timestamp(path, number, stamp), _count(path, number, AZURE[1], prompt, 1),
                     _count(path, number, AZURE[2], output, 0))


def _timestamp(path: Path, number: int, stamp: str) -> float:
    """Seconds since the epoch; fractions have seven digits, one more than datetime reads."""
    whole, _, fraction = stamp.partition(".")
    try:
        moment = datetime.datetime.fromisoformat(whole).replace(tzinfo=datetime.UTC)
        return moment.timestamp() + (float(f"0.{fraction}") if fraction else 0.0)
    except ValueError:
        raise ConfigError(f"{path}: line {number}: {AZURE[0]}: not a time, got {stamp!r}") from None


def _mooncake(path: Path, lines: Lines, limit: int | None) -> Iterator[Record]:
    for number, line in lines[:limit]:
        row = _row(path, number, line)
        prompt = _count(path, number, "input_length", row.get("input_length"), 1)
        blocks = row.get("hash_ids", [])
        if not isinstance(blocks, list) or not all(isinstance(b, int) and 0 <= b < 2**31 for b in blocks):
            raise ConfigError(f"{path}: line {number}: hash_ids: must be a list of ids, got {blocks!r:.60}")
        if blocks and len(blocks) != -(-prompt // BLOCK):
            raise ConfigError(f"{path}: line {number}: hash_ids: {len(blocks)} blocks of {BLOCK} tokens do not make "
                              f"input_length {prompt}")
        yield Record(_number(path, number, "timestamp", row.get("timestamp")) / 1e3, prompt,
                     _count(path, number, "output_length", row.get("output_length"), 0), tuple(blocks))


def _sharegpt(path: Path, lines: Lines, limit: int | None) -> Iterator[Record]:
    for number, line in lines[:limit]:
        row = _row(path, number, line)
        yield Record(_number(path, number, "arrival_time_ns", row.get("arrival_time_ns")) / 1e9,
                     _count(path, number, "input_toks", row.get("input_toks"), 1),
                     _count(path, number, "output_toks", row.get("output_toks"), 0))


_READERS: dict[str, Callable[[Path, Lines, int | None], Iterator[Record]]] = {
    "azure": _azure, "mooncake": _mooncake, "sharegpt": _sharegpt}


def _row(path: Path, number: int, line: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path}: line {number}: not JSON: {error.msg}") from None
    if not isinstance(row, dict):
        raise ConfigError(f"{path}: line {number}: must be an object, got {line:.60}")
    return row


def _count(path: Path, number: int, field: str, value: object, least: int) -> int:
    if isinstance(value, str) and value.isascii() and value.isdigit():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value < 2**31:
        raise ConfigError(f"{path}: line {number}: {field}: must be an integer of at least {least}, got {value!r}")
    return value


def _number(path: Path, number: int, field: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
        raise ConfigError(f"{path}: line {number}: {field}: must be a number of at least 0, got {value!r}")
    return value
