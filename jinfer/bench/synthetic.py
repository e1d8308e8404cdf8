"""A WorkloadConfig -> jobs. Everything is drawn from its seed."""

import csv
import dataclasses
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from jinfer.bench.jobs import Job, Prompt
from jinfer.bench.traces import BLOCK, Record, read_trace
from jinfer.config.lines import line_of
from jinfer.config.loading import load_config
from jinfer.config.service import ServiceParams
from jinfer.config.workload import ArrivalConfig, ClassConfig, LengthConfig, WorkloadConfig
from jinfer.errors import ConfigError

DEFAULT_REQUESTS = 1000


def load_workload(source: str | Path, *, speed: float | None = None,
                  **values: int | float | None) -> tuple[WorkloadConfig, list[Job]]:
    """A workload file, the name of one that comes with jinfer, or a trace itself (csv, jsonl).

    Args:
      speed: how many times as fast as the workload says it is sent.
      values: fields of WorkloadConfig in place of the file's; None is no value. `rate` is that of the arrivals where
        there is no trace.
    """
    path = Path(source)
    given: dict[str, Any] = {name: value for name, value in values.items() if value is not None}
    if speed is not None and not 0.0 < speed < float("inf"):
        raise ConfigError(f"speed: must be positive, got {speed!r}")
    if path.suffix in (".csv", ".jsonl"):
        config, folder = WorkloadConfig(trace=str(path), **given), Path()
    else:
        config, folder = _load(source), path.parent
        if "rate" in given and config.trace is None:
            given["arrivals"] = dataclasses.replace(config.arrivals, rate=given.pop("rate"))
        config = dataclasses.replace(config, **given)
    jobs = make_jobs(config, folder)
    if speed is not None:
        for job in jobs:
            job.time /= speed
    return config, jobs


def _load(source: str | Path) -> WorkloadConfig:
    """A workload file; what is wrong in one is reported with its line."""
    try:
        return load_config(WorkloadConfig, source)
    except ConfigError as error:
        path = Path(source)
        line = line_of(path.read_text(encoding="utf-8"), str(error).partition(":")[0]) if path.is_file() else None
        if line is None:
            raise
        raise ConfigError(f"{path}: line {line}: {error}") from None


def make_jobs(config: WorkloadConfig, folder: Path = Path()) -> list[Job]:
    """All jobs; those that wait for nobody come in order of time. folder: where relative paths of files start."""
    draw = Draw(config, folder)
    if config.trace is not None:
        return list(_traced(config, draw, folder))
    return list(itertools.islice(_drawn(config, draw, folder), config.requests or DEFAULT_REQUESTS))


class Draw:
    """The random part of jobs. Each kind of number has a generator of its own, so that none disturbs another."""

    def __init__(self, config: WorkloadConfig, folder: Path):
        self.config = config
        self._generators = iter(np.random.default_rng(config.seed).spawn(64))
        self.declared = None if config.declared is None else self.lengths(config.declared, folder, "declared")
        self._classes, self._cancels, self._delays = (next(self._generators) for _ in range(3))
        weights = np.array([c.weight for c in config.classes])
        self._bounds = np.cumsum(weights / weights.sum())
        self._services = [_service(c) for c in config.classes]

    def generator(self) -> np.random.Generator:
        return next(self._generators)

    def lengths(self, config: LengthConfig, folder: Path, field: str) -> Callable[[], int]:
        """A function that draws one number after the other."""
        draw = _sampler(config, self.generator(), folder, field)
        least, most = config.least, float("inf") if config.most is None else config.most
        return lambda: int(min(max(round(draw()), least), most))

    def job(self, time: float, prompt: Prompt, output: int, name: int, after: Job | None = None) -> Job:
        config = self.config
        group = min(int(np.searchsorted(self._bounds, self._classes.random(), side="right")), len(self._bounds) - 1)
        kind = config.classes[group]
        cancel_after = None
        if kind.cancel:
            leaves, delay = self._cancels.random() < kind.cancel, self._delays.exponential(kind.cancel_after)
            cancel_after = delay if leaves else None
        declared = output
        if self.declared is not None:
            declared = max(output, self.declared())
        elif config.declared_factor is not None:
            declared = max(output, round(output * config.declared_factor))
        return Job(time, prompt, output, name, declared, config.n, self._services[group], group, cancel_after, after)


def _sampler(config: LengthConfig, rng: np.random.Generator, folder: Path, field: str) -> Callable[[], float]:
    match config.kind:
        case "constant":
            value = config.value or 0
            return lambda: value
        case "uniform":
            low, high = config.low or 0, config.high or 0
            return lambda: float(rng.integers(low, high, endpoint=True))
        case "lognormal":
            assert config.mean is not None
            mu = np.log(config.mean) - config.sigma**2 / 2
            return lambda: rng.lognormal(mu, config.sigma)
        case "empirical":
            values = _column(folder, config, field)
            return lambda: values[rng.integers(len(values))]


def _service(config: ClassConfig) -> ServiceParams:
    return ServiceParams(priority=config.priority, ttft_target=config.ttft_target, itl_target=config.itl_target,
                         timeout=config.timeout, cache=config.cache)


def _traced(config: WorkloadConfig, draw: Draw, folder: Path) -> Iterator[Job]:
    assert config.trace is not None
    records = read_trace(folder / config.trace, config.format, config.limit)
    count = config.requests or len(records)
    records = records[:count]  # the rate is that of the part that is used
    last = records[-1].time
    span = last * len(records) / max(1, len(records) - 1) or 1.0  # the next copy begins a mean distance later
    scale = 1.0 if config.rate is None else len(records) / (span * config.rate)
    copies = -(-count // len(records))
    blocks = 1 + max((block for record in records for block in record.blocks), default=0)
    names = itertools.count(1 + copies * blocks, 1 + config.n)  # of texts that are nobody else's
    for index in range(count):
        copy, place = divmod(index, len(records))
        record = records[place]
        name = next(names)
        yield draw.job((record.time + copy * span) * scale, _prompt(record, 1 + copy * blocks, name), record.output,
                       name + 1)


def _prompt(record: Record, base: int, name: int) -> Prompt:
    if not record.blocks:
        return Prompt((name,), (record.prompt,), record.prompt)
    ends = range(BLOCK, BLOCK * (len(record.blocks) + 1), BLOCK)
    return Prompt(tuple(base + block for block in record.blocks), ends, record.prompt)


def _drawn(config: WorkloadConfig, draw: Draw, folder: Path) -> Iterator[Job]:
    """Endless; a conversation's turns come one after the other."""
    assert config.prompt is not None
    assert config.output is not None
    clock = _clock(config.arrivals, draw.generator())
    prompt, output = draw.lengths(config.prompt, folder, "prompt"), draw.lengths(config.output, folder, "output")
    choice = draw.generator()
    names = itertools.count(1)
    shared: list[tuple[int, int]] = []
    if config.sharing:
        tokens = draw.lengths(config.sharing.length, folder, "sharing.length")
        shared = [(next(names), tokens()) for _ in range(config.sharing.groups)]
    chat = config.chat
    turns = draw.lengths(chat.turns, folder, "chat.turns") if chat else lambda: 1
    message = draw.lengths(chat.message, folder, "chat.message") if chat else lambda: 0
    pauses = draw.generator()
    for time in clock:
        opening = Prompt((), (), 0)
        if config.sharing and choice.random() < config.sharing.share:
            opening = opening.followed(shared[choice.integers(len(shared))])
        text = opening.followed((next(names), prompt()))
        job: Job | None = None
        for _ in range(max(1, turns())):
            if job is not None:
                assert chat is not None
                text = job.prompt.followed((job.name, job.output), (next(names), message()))
                time = pauses.exponential(chat.think)
            job = draw.job(time, text, output(), next(names), job)
            names = itertools.count(job.name + config.n)  # the other choices' texts have names too
            yield job


def _clock(config: ArrivalConfig, rng: np.random.Generator) -> Iterator[float]:
    now = 0.0
    while True:
        yield now
        match config.process:
            case "poisson":
                now += rng.exponential(1 / config.rate)
            case "gamma":
                now += rng.gamma(config.burstiness, 1 / (config.burstiness * config.rate))
            case "constant":
                now += 1 / config.rate


def _column(folder: Path, config: LengthConfig, field: str) -> list[int]:
    assert config.file is not None
    path = folder / config.file
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            rows = list(csv.DictReader(file))
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"{field}.file: {path}: cannot be read: {reason}") from None
    values = []
    for number, row in enumerate(rows, 2):
        if config.column not in row:
            raise ConfigError(f"{field}.column: {path}: no column {config.column!r} in {', '.join(row)}")
        try:
            values.append(int(row[config.column]))
        except (TypeError, ValueError):
            raise ConfigError(f"{path}: line {number}: {config.column}: must be an integer, got "
                              f"{row[config.column]!r}") from None
    if not values:
        raise ConfigError(f"{field}.file: {path}: holds no row")
    return values
