#!/usr/bin/env python
"""Host cost of a step: the production scheduler before a device that answers at once.

    .venv/bin/python scripts/bench_scheduler.py [--rows 256] [--profile]

Prints microseconds of `plan`, `append`, `collected` and their sum, for a small queue and pool and for large ones:
nothing may scan either, so both lines should be the same. CPU time of the thread, so that others on the machine do not
count. Steady state: every row is taken, rows end and are replaced, prompts begin like others before them, and the pool
is full of pages of ended requests.
"""

import argparse
import cProfile
import gc
import itertools
import pstats
import random
import statistics
import time
from collections import Counter

from rich.console import Console
from rich.table import Table

from jinfer.config import SamplingParams
from jinfer.kv import PagePool
from jinfer.scheduler import Request, Scheduler, StepPlan

VOCAB, FAMILIES, SHARED, PAGE = 32_000, 64, 256, 16
PARTS = ("plan", "append", "collected")


class Load:
    """Requests without end: a beginning that many share, an own end, an output of an own length."""

    def __init__(self, seed: int, max_context: int):
        self._rng = random.Random(seed)
        self._words = list(range(VOCAB))  # one integer object a token, however many prompts hold it
        self._heads = [self._rng.choices(self._words, k=SHARED) for _ in range(FAMILIES)]
        self._names = itertools.count()
        self._max_context = max_context

    def next(self) -> Request:
        prompt = self._rng.choice(self._heads) + self._rng.choices(self._words, k=self._rng.randint(1, 256))
        return self._request(prompt, self._rng.randint(16, 256))

    def filler(self) -> Request:
        """A long prompt that ends with its first token and leaves its pages behind."""
        return self._request(self._rng.choices(self._words, k=self._max_context - 1), 1)

    def _request(self, prompt: list[int], max_tokens: int) -> Request:
        name = f"r{next(self._names)}"
        return Request(name, 0, prompt, SamplingParams(max_tokens=max_tokens), len(prompt) + max_tokens)


class Loop:
    """plan(t+1), then collect(t): every row gets a token, and ends at its last one."""

    def __init__(self, scheduler: Scheduler):
        self.scheduler = scheduler
        self.pending: StepPlan | None = None
        self.finished = 0

    def step(self) -> tuple[float, float, float]:
        """Seconds of plan, of append and finish, of collected."""
        scheduler, clock = self.scheduler, time.thread_time
        start = clock()
        plan = scheduler.plan()
        planned = clock()
        pending, self.pending = self.pending, plan
        if pending is None:
            return planned - start, 0.0, 0.0
        requests = [chunk.request for chunk in pending.chunks if chunk.samples] + [row.request for row in pending.rows]
        answered = clock()
        for request in requests:
            scheduler.append(request, (7,))
            if request.length == request.max_position:
                scheduler.finish(request, "length")
                self.finished += 1
        appended = clock()
        scheduler.collected(pending)
        return planned - start, appended - answered, clock() - appended


def build(options: argparse.Namespace, queued: int, pages: int) -> tuple[Loop, Load]:
    """A scheduler in steady state: the pool was filled once, the queue is full."""
    scheduler = Scheduler([PagePool(pages, PAGE)], max_rows=options.rows, max_context=8192,
                          prefill_tokens=options.prefill_tokens, max_chunks=options.max_chunks)
    loop, load = Loop(scheduler), Load(queued, min(8192, pages * PAGE // 4))
    for _ in range(pages * PAGE // 8192):
        scheduler.add(load.filler())
    while scheduler.waiting or scheduler.running:
        loop.step()
    for _ in range(queued):
        scheduler.add(load.next())
    return loop, load


def measure(options: argparse.Namespace, queued: int, pages: int,
            profile: cProfile.Profile | None = None) -> dict[str, object]:
    """Costs of options.steps steps, the queue kept at its length."""
    loop, load = build(options, queued, pages)
    scheduler = loop.scheduler
    times: list[tuple[float, ...]] = []
    adds, sizes = [], Counter()
    gc.collect()
    for index in range(options.warmup + options.steps):
        fresh = [load.next() for _ in range(queued - scheduler.waiting)]
        if profile and index >= options.warmup:
            profile.enable()
        for request in fresh:
            start = time.thread_time()
            scheduler.add(request)
            adds.append(time.thread_time() - start)
        spent = loop.step()
        if profile:
            profile.disable()
        if index >= options.warmup:
            times.append((*spent, sum(spent)))
            assert loop.pending is not None
            sizes.update(rows=len(loop.pending.rows), chunks=len(loop.pending.chunks),
                         tokens=sum(chunk.length for chunk in loop.pending.chunks))
    scheduler.check()
    columns = dict(zip((*PARTS, "step"), map(sorted, zip(*times, strict=True)), strict=True))
    columns["add"] = sorted(adds)
    row: dict[str, object] = {"queued": f"{queued:,}", "pages": f"{pages:,}"}
    for name, values in columns.items():
        row[name] = f"{statistics.median(values) * 1e6:.0f} / {values[int(0.99 * len(values))] * 1e6:.0f}"
    row |= {f"{name} a step": f"{total / len(times):.1f}" for name, total in sizes.items()}
    row["preemptions"] = scheduler.preemptions
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--prefill-tokens", type=int, default=2048)
    parser.add_argument("--max-chunks", type=int, default=16)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--warmup", type=int, default=500, help="steps before, until rows end as often as they start")
    parser.add_argument("--sizes", nargs="*", default=["1000:10000", "100000:1000000"], metavar="QUEUED:PAGES")
    parser.add_argument("--profile", action="store_true", help="print where the time of the last size goes")
    options = parser.parse_args()
    table = Table(title="host microseconds, median / p99")
    profile = None
    for size in options.sizes:
        profile = cProfile.Profile() if options.profile and size == options.sizes[-1] else None
        row = measure(options, *map(int, size.split(":")), profile)
        if not table.columns:
            for name in row:
                table.add_column(name, justify="right")
        table.add_row(*map(str, row.values()))
    Console(width=150).print(table)
    if profile:
        pstats.Stats(profile).sort_stats("tottime").print_stats(30)


if __name__ == "__main__":
    main()
