"""Runs a batch file through an LLM: any number of rows, some in flight, answers in the order of the rows."""

import dataclasses
import json
import os
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from jinfer.batch.records import error_record, success_record
from jinfer.batch.rows import BadRow, Row, is_blank, parse_row
from jinfer.engine.outputs import Delta, RequestOutput
from jinfer.errors import ConfigError, JinferError, RequestError
from jinfer.llm import LLM

# Rows that may be read ahead of the oldest unfinished one, in units of the rows in flight: bounds the memory
# for answers that wait for their turn, and still keeps the engine full behind one slow row.
WINDOW = 8


@dataclasses.dataclass(slots=True)
class BatchCounts:
    """Lines of the input by what became of them; lines = completed + failed + skipped at the end."""

    lines: int = 0
    completed: int = 0
    failed: int = 0
    skipped: int = 0


def run_batch(llm: LLM, rows: Iterable[bytes], write: Callable[[dict[str, Any]], None], *,
              defaults: Mapping[str, Any] | None = None, in_flight: int | None = None,
              on_output: Callable[[RequestOutput], None] | None = None,
              on_progress: Callable[[BatchCounts], None] | None = None) -> BatchCounts:
    """Answers `rows` (see `jinfer.batch.rows`) and hands each record to `write`, in the order of the rows.

    A bad row gives one error record and disturbs no other. A custom_id that was used before is an error of
    the later row, whose record has a null custom_id, so that no answer is overwritten by it.

    Args:
      rows: one a line feed, as iterating a file opened in binary mode gives them; read no faster than needed.
      defaults: SamplingParams fields for rows that do not set them.
      in_flight: rows handed to the engine at a time; None is twice the engine's rows. It changes no answer.
      on_output: called with each finished RequestOutput. on_progress: after each row whose record is ready.
    """
    limit = in_flight or 2 * llm.engine.config.max_rows
    counts = BatchCounts()
    box: deque[Delta] = deque()
    running: dict[str, tuple[int, Row]] = {}  # request id -> (place in the output, row)
    ready: dict[int, dict[str, Any]] = {}  # place -> record that waits for those before it
    lines_of: dict[str, int] = {}  # custom_id -> line
    placed = written = 0
    source = iter(rows)
    more = True

    def settle(place: int, record: dict[str, Any], good: bool) -> None:
        ready[place] = record
        counts.completed += good
        counts.failed += not good
        if on_progress is not None:
            on_progress(counts)

    def flush() -> None:
        nonlocal written
        while written in ready:
            write(ready.pop(written))
            written += 1

    def admit(data: bytes) -> None:
        nonlocal placed
        counts.lines += 1
        if is_blank(data):
            counts.skipped += 1
            return
        place, placed = placed, placed + 1
        row = _unique(parse_row(counts.lines, data, defaults), lines_of)
        if isinstance(row, BadRow):
            settle(place, error_record(row, row.error), good=False)
            return
        try:
            running[llm.inbox.submit(row.item, row.params, box)] = place, row
        except JinferError as error:
            settle(place, error_record(row, error), good=False)

    try:
        while more or running:
            while more and len(running) < limit and placed - written < WINDOW * limit:
                data = next(source, None)
                if data is None:
                    more = False
                else:
                    admit(data)
                flush()
            if not running:
                continue
            delta = llm.inbox.wait(box)
            if not delta.request_finished:
                continue
            place, row = running.pop(delta.request_id)
            output = delta.output
            failure = _failure(output)
            if on_output is not None:
                on_output(output)
            settle(place, success_record(row, output, llm.tokenizer) if failure is None
                   else error_record(row, failure), good=failure is None)
            flush()
    finally:
        for request_id in running:
            llm.inbox.drop(request_id)
    return counts


def run_file(llm: LLM, source: Path, target: Path, **options: Any) -> BatchCounts:
    """run_batch from file to file. `target` appears whole when the job is done, not at all if it fails."""
    partial = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        with source.open("rb") as rows, partial.open("wb") as out:  # binary: rows end at LF and nowhere else

            def write(record: dict[str, Any]) -> None:
                out.write(json.dumps(record, ensure_ascii=False, allow_nan=False).encode() + b"\n")

            counts = run_batch(llm, rows, write, **options)
            out.flush()
            os.fsync(out.fileno())
        partial.replace(target)
    except OSError as error:
        raise JinferError(f"{error.filename or target}: {error.strerror}") from error
    finally:
        partial.unlink(missing_ok=True)
    return counts


def check_paths(source: Path, target: Path, *, overwrite: bool) -> None:
    """Refuses, before a model is loaded, what would make a job fail at its end."""
    if not source.is_file():
        raise ConfigError(f"{source}: no such file")
    if target.is_dir() or not target.parent.is_dir() or not os.access(target.parent, os.W_OK):
        raise ConfigError(f"{target}: cannot be written")
    if target.exists() and source.samefile(target):
        raise ConfigError(f"{target}: is the input file")
    if target.exists() and not overwrite:
        raise ConfigError(f"{target}: exists; give --overwrite to replace it")


def count_rows(source: Path) -> int:
    """Rows of a file that will get a record."""
    with source.open("rb") as rows:
        return sum(not is_blank(row) for row in rows)


def _unique(row: Row | BadRow, lines_of: dict[str, int]) -> Row | BadRow:
    if row.custom_id is None:
        return row
    first = lines_of.setdefault(row.custom_id, row.line)
    if first == row.line:
        return row
    return BadRow(row.line, None, RequestError("custom_id", f"{row.custom_id!r} was used on line {first}"))


def _failure(output: RequestOutput) -> Exception | None:
    """Why a request that was accepted has no answer, or None."""
    if output.error is not None:
        return output.error
    for choice in output.completions:
        if choice.finish_reason in ("error", "cancelled"):
            return JinferError(f"the request ended as {choice.finish_reason}")
    return None
