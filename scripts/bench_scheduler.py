#!/usr/bin/env python
"""Host cost of a step: the production scheduler before a device that answers at once.

    .venv/bin/python scripts/bench_scheduler.py [--rows 256] [--policy longest-prefix] [--profile]

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

from jinfer.config import SamplingParams, ServiceParams
from jinfer.kv import PagePool
from jinfer.kv.host import HostTier
from jinfer.scheduler import Request, Scheduler, StepPlan
from jinfer.scheduler.policy import POLICIES, find_policy

VOCAB, FAMILIES, SHARED, PAGE, CONTEXT = 32_000, 64, 256, 16, 8192
PARTS = ("plan", "append", "collected")


class Load:
    """Requests without end: a beginning that many share, an own end, an output of an own length."""

    def __init__(self, classes: int):
        self._rng = random.Random(0)
        self._words = list(range(VOCAB))  # one integer object a token, however many prompts hold it
        self._heads = [self._rng.choices(self._words, k=SHARED) for _ in range(FAMILIES)]
        self._names = itertools.count()
        self._services = [ServiceParams(priority=priority) for priority in range(classes)]

    def next(self) -> Request:
        prompt = self._rng.choice(self._heads) + self._rng.choices(self._words, k=self._rng.randint(1, 256))
        return self._request(prompt, self._rng.randint(16, 256))

    def filler(self, length: int) -> Request:
        """A prompt that ends with its first token and leaves its pages behind."""
        return self._request(self._rng.choices(self._words, k=length), 1)

    def _request(self, prompt: list[int], max_tokens: int) -> Request:
        return Request(f"r{next(self._names)}", 0, prompt, SamplingParams(max_tokens=max_tokens),
                       len(prompt) + max_tokens, arrival=time.thread_time(), service=self._rng.choice(self._services))


class Loop:
    """plan(t+1), then collect(t): every row gets a token, and ends at its last one."""

    def __init__(self, scheduler: Scheduler):
        self.scheduler = scheduler
        self.pending: StepPlan | None = None

    def step(self) -> tuple[float, float, float]:
        """Seconds of plan, of append and finish, of collected."""
        scheduler, clock = self.scheduler, time.thread_time
        start = clock()
        plan = scheduler.plan(start)
        plan_seconds = clock() - start
        pending, self.pending = self.pending, plan
        if pending is None:
            return plan_seconds, 0.0, 0.0
        requests = [chunk.request for chunk in pending.chunks if chunk.samples] + [row.request for row in pending.rows]
        answered = clock()
        for request in requests:
            scheduler.append(request, (7,))
        append = clock() - answered
        ended = [request for request in requests if request.length == request.max_position]
        start = clock()
        for request in ended:
            scheduler.finish(request, "length")
        finished = clock()
        scheduler.collected(pending)
        return plan_seconds, append + finished - start, clock() - finished


class Bench:
    """A scheduler in steady state; the pool was filled once, the queue is kept at its length."""

    def __init__(self, options: argparse.Namespace, queued: int, pages: int):
        self.queued, self.load, self.adds = queued, Load(options.classes), [0.0]
        host = HostTier(options.host_pages, [1]) if options.host_pages else None
        self.scheduler = Scheduler(
            [PagePool(pages, PAGE)], max_rows=options.rows, max_context=CONTEXT, prefill_tokens=options.prefill_tokens,
            max_chunks=options.max_chunks, policy=find_policy(options.policy, options.ageing), host=host)
        self.loop = Loop(self.scheduler)
        length = min(CONTEXT - 1, pages * PAGE // 4)
        for _ in range((pages + options.host_pages) * PAGE // length):
            self.scheduler.add(self.load.filler(length))
        while self.scheduler.has_work:
            self.loop.step()
        for _ in range(options.warmup):
            self.step()

    def step(self) -> tuple[float, float, float]:
        fresh = [self.load.next() for _ in range(self.queued - self.scheduler.waiting)]
        for request in fresh:
            start = time.thread_time()
            self.scheduler.add(request)
            self.adds.append(time.thread_time() - start)
        return self.loop.step()

    def measure(self, steps: int) -> dict[str, str]:
        """Costs of so many steps, and what they did."""
        index, preemptions = self.scheduler.pages.index, self.scheduler.preemptions
        queried, hit = index.queried, index.hit
        gc.collect()
        times: list[tuple[float, float, float]] = []
        work: Counter[str] = Counter()
        self.adds.clear()
        for _ in range(steps):
            times.append(self.step())
            plan = self.loop.pending
            assert plan is not None
            work.update({"rows": len(plan.rows), "chunks": len(plan.chunks),
                         "tokens": sum(chunk.length for chunk in plan.chunks)})
        self.scheduler.check()
        columns = dict(zip(PARTS, zip(*times, strict=True), strict=True)) | {"step": [sum(parts) for parts in times]}
        row = {name: quantiles(values) for name, values in columns.items()} | {"add": quantiles(self.adds)}
        row |= {f"{name}/step": f"{total / steps:.1f}" for name, total in work.items()}
        row["hits"] = f"{(index.hit - hit) / max(1, index.queried - queried):.0%}"
        return row | {"preempted": str(self.scheduler.preemptions - preemptions)}

    def profile(self, steps: int) -> None:
        """Prints where the time of so many steps goes."""
        profile = cProfile.Profile()
        profile.runcall(lambda: [self.step() for _ in range(steps)])
        pstats.Stats(profile).sort_stats("tottime").print_stats(30)


def quantiles(seconds: list[float]) -> str:
    """Median and 99th percentile in microseconds."""
    ordered = sorted(seconds)
    return f"{statistics.median(ordered) * 1e6:.0f} / {ordered[int(0.99 * len(ordered))] * 1e6:.0f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--prefill-tokens", type=int, default=2048)
    parser.add_argument("--max-chunks", type=int, default=16)
    parser.add_argument("--policy", default="priority", help=f"{', '.join(POLICIES)} or package.module:name")
    parser.add_argument("--ageing", type=float, default=60.0)
    parser.add_argument("--classes", type=int, default=1, help="priority classes of the requests")
    parser.add_argument("--host-pages", type=int, default=0, help="pages of the host tier")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--warmup", type=int, default=500, help="steps before, until rows end as often as they start")
    parser.add_argument("--sizes", nargs="*", default=["1000:10000", "100000:1000000"], metavar="QUEUED:PAGES")
    parser.add_argument("--profile", action="store_true", help="print where the time goes, too")
    options = parser.parse_args()
    table = Table(title="host microseconds, median / p99")
    for size in options.sizes:
        queued, pages = map(int, size.split(":"))
        bench = Bench(options, queued, pages)
        row = {"queued": f"{queued:,}", "pages": f"{pages:,}"} | bench.measure(options.steps)
        if options.profile:
            bench.profile(options.steps)
        if not table.columns:
            for name in row:
                table.add_column(name, justify="right")
        table.add_row(*row.values())
    Console(width=170).print(table)


if __name__ == "__main__":
    main()
