"""Runs a batch file through an LLM: any number of rows, some in flight, answers in the order of the rows."""

import dataclasses
import json
import os
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from jinfer.batch.partial import Record, check_partial, job_digest, last_line, partial_path, read_partial
from jinfer.batch.records import error_record, success_record
from jinfer.batch.rows import BadRow, Row, is_blank, parse_row
from jinfer.engine.outputs import Delta, RequestOutput
from jinfer.errors import ConfigError, JinferError, OverloadError, RequestError
from jinfer.llm import LLM

# Rows that may be read ahead of the oldest unfinished one, in units of the rows in flight: bounds the memory
# for answers that wait for their turn, and still keeps the engine full behind one slow row.
WINDOW = 8


@dataclasses.dataclass(slots=True)
class BatchCounts:
    """Lines of the input by what became of them; lines = completed + failed + skipped + left at the end.

    resumed: of the completed and failed, those answered by an earlier run. stopped: the job ended before its rows did.
    left: rows that were read, and have no record because of that.
    """

    lines: int = 0
    completed: int = 0
    failed: int = 0
    skipped: int = 0
    resumed: int = 0
    left: int = 0
    stopped: bool = False


def run_batch(llm: LLM, rows: Iterable[bytes], write: Callable[[Record | None], None], *,
              defaults: Mapping[str, Any] | None = None, in_flight: int | None = None,
              stop: Callable[[], bool] | None = None, earlier: Iterable[Record | None] = (),
              on_output: Callable[[RequestOutput], None] | None = None,
              on_progress: Callable[[BatchCounts], None] | None = None) -> BatchCounts:
    """Answers `rows` (see `jinfer.batch.rows`) and hands each record to `write`, in the order of the rows.

    A bad row gives one error record and disturbs no other. A custom_id that was used before is an error of
    the later row, whose record has a null custom_id, so that no answer is overwritten by it.

    Args:
      rows: one a line feed, as iterating a file opened in binary mode gives them; read no faster than needed.
      defaults: fields of SamplingParams and ServiceParams for rows that do not set them.
      in_flight: rows handed to the engine at a time; None is twice the engine's rows. It changes no answer.
      stop: asked at every turn of the loop. Once it says true, or the engine drains, no row is read any more, rows of
        which nothing is computed are left, and the job ends when those that run are done. Then `write` gets None for a
        row that was left before one that has a record.
      earlier: what `write` got in an earlier run, stopped or not: these rows are not answered again.
      on_output: called with each finished RequestOutput. on_progress: after each row whose record is ready.
    """
    job = _Job(llm, rows, write, defaults or {}, in_flight or 2 * llm.engine.config.max_rows, earlier, on_output,
               on_progress)
    try:
        while True:
            if not job.stopping and (llm.engine.draining or (stop is not None and stop())):
                job.stop()
            if not job.stopping:
                job.read()
            if job.running:
                job.collect()
            elif job.held is None or job.stopping:
                break
            else:
                llm.inbox.turn()  # others fill the queue
    finally:
        for request_id in job.running:
            llm.inbox.drop(request_id)
    job.end()
    return job.counts


class _Job:
    """Rows on their way from the input to the output. A row's place is the number of those before it, blanks apart."""

    def __init__(self, llm: LLM, rows: Iterable[bytes], write: Callable[[Record | None], None],
                 defaults: Mapping[str, Any], limit: int, earlier: Iterable[Record | None],
                 on_output: Callable[[RequestOutput], None] | None,
                 on_progress: Callable[[BatchCounts], None] | None):
        self._llm, self._write, self._defaults, self._limit = llm, write, defaults, limit
        self._on_output, self._on_progress = on_output, on_progress
        self._source, self._earlier = iter(rows), iter(earlier)
        self._box: deque[Delta] = deque()
        self._ready: dict[int, Record] = {}  # place -> record that waits for those before it
        self._lines_of: dict[str, int] = {}  # custom_id -> line
        self._placed = self._written = 0
        self._more = True
        self.running: dict[str, tuple[int, Row]] = {}  # request id -> (place, row)
        self.held: tuple[int, Row] | None = None  # the engine's queue had no room for it
        self.stopping = False
        self.counts = BatchCounts()

    def read(self) -> None:
        """Hands rows to the engine as long as it, and the memory for answers out of order, have room."""
        if self.held is not None:
            self._submit(*self.held)
        while (self._more and self.held is None and len(self.running) < self._limit
               and self._placed - self._written < WINDOW * self._limit):
            data = next(self._source, None)
            if data is None:
                self._more = False
            else:
                self._admit(data)
            self._flush()

    def collect(self) -> None:
        """Waits for the next delta, and settles its row if it is the last one."""
        delta = self._llm.inbox.wait(self._box)
        if not delta.request_finished:
            return
        place, row = self.running.pop(delta.request_id)
        output = delta.output
        if isinstance(output.error, OverloadError):  # handed back by a drain, nothing was computed
            return
        failure = _failure(output)
        if self._on_output is not None:
            self._on_output(output)
        self._settle(place, success_record(row, output, self._llm.tokenizer) if failure is None
                     else error_record(row, failure), good=failure is None)
        self._flush()

    def stop(self) -> None:
        """Reads no more, and takes back what the engine has not begun."""
        self.stopping = True
        self._llm.engine.hand_back(list(self.running))

    def end(self) -> None:
        """Of a job that was stopped: writes what waits behind rows that were left, and what was answered earlier."""
        if not self.stopping:
            return
        for place in range(self._written, self._placed):
            self._write(self._ready.get(place))
        for record in self._earlier:
            self._write(record)
        self.counts.left = self._placed - self._written - len(self._ready)
        self.counts.stopped = self.counts.left > 0 or (self._more and next(self._source, None) is not None)

    def _admit(self, data: bytes) -> None:
        counts = self.counts
        counts.lines += 1
        if is_blank(data):
            counts.skipped += 1
            return
        place, self._placed = self._placed, self._placed + 1
        row = _unique(parse_row(counts.lines, data, self._defaults), self._lines_of)
        before = next(self._earlier, None)
        if before is not None:
            counts.resumed += 1
            self._settle(place, before, good=before.get("error") is None)
        elif isinstance(row, BadRow):
            self._settle(place, error_record(row, row.error), good=False)
        else:
            self._submit(place, row)

    def _submit(self, place: int, row: Row) -> None:
        engine = self._llm.engine
        if engine.has_work and not engine.takes(row.params.n):
            self.held = place, row
            return
        self.held = None
        try:
            self.running[self._llm.inbox.submit(row.item, row.params, self._box, row.service)] = place, row
        except JinferError as error:
            self._settle(place, error_record(row, error), good=False)
            self._flush()

    def _settle(self, place: int, record: Record, good: bool) -> None:
        self._ready[place] = record
        self.counts.completed += good
        self.counts.failed += not good
        if self._on_progress is not None:
            self._on_progress(self.counts)

    def _flush(self) -> None:
        while self._written in self._ready:
            self._write(self._ready.pop(self._written))
            self._written += 1


def run_file(llm: LLM, source: Path, target: Path, *, model: str = "", **options: Any) -> BatchCounts:
    """run_batch from file to file. `target` appears whole when the job is done, not at all if it fails.

    A job that was stopped leaves `partial_path(target)`; the same rows, options and `model`, a name that stands for
    what answers, go on from there.
    """
    part, unfinished = target.with_name(f".{target.name}.{os.getpid()}.part"), partial_path(target)
    try:
        job = job_digest(source, model, options.get("defaults"))
        with source.open("rb") as rows, part.open("wb") as out, read_partial(unfinished, job) as earlier:
            # binary: rows end at LF and nowhere else

            def write(record: Record | None) -> None:
                out.write(json.dumps(record, ensure_ascii=False, allow_nan=False).encode() + b"\n")

            counts = run_batch(llm, rows, write, earlier=earlier, **options)
            if counts.stopped:
                out.write(last_line(job))
            out.flush()
            os.fsync(out.fileno())
        part.replace(unfinished if counts.stopped else target)
        if not counts.stopped:
            unfinished.unlink(missing_ok=True)
    except OSError as error:
        raise JinferError(f"{error.filename or target}: {error.strerror}") from error
    finally:
        part.unlink(missing_ok=True)
    return counts


def check_paths(source: Path, target: Path, *, overwrite: bool, model: str = "",
                defaults: Mapping[str, Any] | None = None) -> None:
    """Refuses, before a model is loaded, what would make a job fail at its end. model, defaults: as for run_file."""
    if not source.is_file():
        raise ConfigError(f"{source}: no such file")
    if target.is_dir() or not target.parent.is_dir() or not os.access(target.parent, os.W_OK):
        raise ConfigError(f"{target}: cannot be written")
    if target.exists() and source.samefile(target):
        raise ConfigError(f"{target}: is the input file")
    if target.exists() and not overwrite:
        raise ConfigError(f"{target}: exists; give --overwrite to replace it")
    if not overwrite:
        check_partial(partial_path(target), job_digest(source, model, defaults))


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
