"""Simulators for tests: round step times, small pools."""

import dataclasses

from jinfer.bench.jobs import Job, Prompt
from jinfer.config.service import ServiceParams
from jinfer.kv import PagePool
from jinfer.scheduler import Scheduler
from jinfer.simulate.cost import Link
from jinfer.simulate.driver import Simulator
from jinfer.simulate.worker import Worker

S = 16


@dataclasses.dataclass(frozen=True)
class Fixed:
    """A prefill call takes a millisecond a token, a decode step ten, whoever is in it."""

    token: float = 1e-3
    step: float = 10e-3

    def prefill(self, chunks):
        return self.token * sum(chunk.length for chunk in chunks)

    def decode(self, rows, steps):
        return self.step * steps


def job(time, prompt, output, *, name=1, declared=None, service=None, **more):
    return Job(time, Prompt((1000 * name,), (prompt,), prompt), output, 1000 * name + 1,
               output if declared is None else declared, service=service or ServiceParams(), **more)


def simulator(*, pages=4096, rows=8, prefill_tokens=64, context=4096, host_seconds=0.0, stall=0.2, cache=True,
              page_bytes=1000, link_rate=1e6, overlap=True, cost=None, windows=(None,), prefill=0, decode=0,
              lockstep=False, transfer=float("inf"), **options):
    """One worker, or so many that prefill and so many that decode."""
    def worker(role):
        pools = [PagePool(pages, S, window) for window in windows]
        limits = {"decode_rows": 0} if role == "prefill" else {}
        scheduler = Scheduler(pools, max_rows=rows, max_context=context, prefill_tokens=prefill_tokens, max_chunks=rows,
                              **limits, **options)
        return Worker(scheduler, cost or Fixed(), Link((page_bytes,) * len(pools), link_rate, link_rate, 1e12, overlap),
                      role)

    roles = ["prefill"] * prefill + ["decode"] * decode or ["both"]
    return Simulator([worker(role) for role in roles], host_seconds=host_seconds, stall=stall, cache=cache,
                     lockstep=lockstep, transfer=transfer)


def check_idle(sim):
    """Nothing is left behind."""
    for worker in sim.workers:
        assert not worker.scheduler.has_work
        assert not worker.coming
        worker.scheduler.check()
