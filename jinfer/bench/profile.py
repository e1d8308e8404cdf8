"""Step times of an engine, measured call by call, and the coefficients of a ProfileConfig fitted to them."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jinfer.config import SamplingParams
from jinfer.config.device import ProfileConfig
from jinfer.engine.engine import Engine
from jinfer.scheduler import StepPlan
from jinfer.scheduler.step_time import attended_positions

Call = tuple[float, float, float, float]  # the three terms of StepTime, seconds
TRIM = 4.0  # median deviations; calls further off were disturbed by something else


class Profiler:
    """Watches an engine's collected plans and what its metrics say their calls took.

    Tokens and rows are those computed, padding included.

    Attributes:
      prefill, decode: calls seen so far.
    """

    def __init__(self, engine: Engine):
        self.engine = engine
        self.prefill: list[Call] = []
        self.decode: list[Call] = []

    def watch(self, work: Callable[[], None]) -> None:
        """Runs `work`, which steps the engine, and keeps the calls made meanwhile."""
        scheduler: Any = self.engine.workers[0].scheduler
        buckets = self.engine.workers[0].runner.catalog.buckets
        collected, metrics = scheduler.collected, self.engine.metrics
        last = [metrics.prefill_seconds, metrics.decode_seconds]

        def keep(plan: StepPlan) -> None:
            now = [metrics.prefill_seconds, metrics.decode_seconds]
            seconds = [after - before for after, before in zip(now, last, strict=True)]
            last[:] = now
            if plan.chunks:
                tokens = sum(chunk.length for chunk in plan.chunks)
                attended = sum(attended_positions(chunk.length, chunk.start) for chunk in plan.chunks)
                self.prefill.append((1.0, buckets.prefill_size(tokens), attended, seconds[0]))
            if plan.rows:
                n, rows = plan.steps, len(plan.rows)
                size = buckets.decode_size(rows)
                context = sum(row.position for row in plan.rows)
                self.decode.append((n, n * size, n * (context + rows * (n - 1) / 2), seconds[1]))
            collected(plan)

        scheduler.collected = keep
        try:
            work()
        finally:
            del scheduler.collected  # the method of its class again

    def measure(self, *, rows: Sequence[int], lengths: Sequence[int], outputs: int, repeat: int, vocab: int,
                seed: int = 0) -> None:
        """Runs batches of so many rows with prompts of so many random tokens, each combination `repeat` times."""
        rng = np.random.default_rng(seed)
        params = SamplingParams(temperature=0.0, max_tokens=outputs, ignore_eos=True)

        def work(count: int, length: int) -> None:
            for _ in range(count):
                self.engine.submit(rng.integers(0, vocab, length).tolist(), params)
            while self.engine.has_work:
                self.engine.step()

        combinations = list(itertools.product(rows, lengths))
        for count, length in combinations:  # compiles what is not compiled yet
            work(count, length)
        for count, length in combinations * repeat:
            self.watch(lambda count=count, length=length: work(count, length))  # type: ignore[misc]

    def profile(self) -> ProfileConfig:
        """The coefficients."""
        config = self.engine.config
        words = f"{config.quantization or config.dtype}, KV {config.kv_dtype}, page_size {config.page_size}"
        return ProfileConfig(prefill=fit(self.prefill), decode=fit(self.decode), engine=words)


def fit(calls: Sequence[Call]) -> tuple[float, float, float]:
    """Coefficients of at least 0 with the least squares of relative errors, of all calls but the disturbed ones."""
    table = np.asarray(calls, float)
    kept = table
    coefficients = np.zeros(3)
    for _ in range(5):
        coefficients = _non_negative(kept)
        errors = relative_errors(table, coefficients)
        spread = np.median(np.abs(errors - np.median(errors)))
        kept = table[np.abs(errors - np.median(errors)) <= TRIM * spread + 1e-12]
    a, b, c = coefficients.tolist()
    return a, b, c


def relative_errors(calls: np.ndarray, coefficients: Sequence[float] | np.ndarray) -> np.ndarray:
    """Predicted over measured, less 1, of rows of (three terms, seconds)."""
    return calls[:, :3] @ np.asarray(coefficients) / calls[:, 3] - 1.0


def _non_negative(calls: np.ndarray) -> np.ndarray:
    """The best of the fits with some terms left out whose coefficients are all at least 0: there are seven."""
    best, least = np.zeros(3), float("inf")
    for used in itertools.chain.from_iterable(itertools.combinations(range(3), n) for n in (1, 2, 3)):
        terms = calls[:, used] / calls[:, 3:]
        found, *_ = np.linalg.lstsq(terms, np.ones(len(calls)), rcond=None)
        error = float(((terms @ found - 1.0) ** 2).sum())
        if (found >= 0).all() and error < least:
            best, least = np.zeros(3), error
            best[list(used)] = found
    return best
