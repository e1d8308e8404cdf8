"""Fleet: the workers of an engine, which of them has which request, and what becomes of those of one that is lost."""

import time
from collections.abc import Iterator, Sequence

import jax

from jinfer.engine.handover import Handover, Transit
from jinfer.engine.results import StepResults
from jinfer.engine.runner import Pending
from jinfer.engine.worker import Worker
from jinfer.observe.metrics import Metrics
from jinfer.scheduler import FinishReason, Request, Scheduler, Status
from jinfer.scheduler.request import Given

POLL = 2e-4  # seconds between looks at several workers none of which is done; a decode step takes ten times as long


class Fleet:
    """One worker, or several that prefill and several that decode.

    With several, a request starts at a prefill worker. When its first token is there, its KV goes to the decode worker
    that expects to hold least, which computes the last token known and goes on from it: a chunk of one token. Whatever
    happens to it there, it stays: preempted, it is computed again by the decode worker.

    A worker whose runner raises is lost, and its requests start again elsewhere with the tokens they have. Without a
    worker for decode the others decode themselves, without one for prefill those for decode take new requests. Only the
    last one's error goes out to the caller. Interrupts are nobody's failure and always go out.

    Attributes:
      workers: all of them, those that are lost too.
    """

    def __init__(self, workers: Sequence[Worker], handover: Handover, metrics: Metrics):
        self.workers = list(workers)
        self.handover = handover
        self._metrics = metrics
        self._home: dict[Request, Worker] = {}
        self._ready: dict[Request, None] = {}  # prefilled, in order; what is not true any more is found out when asked

    def warm_up(self) -> None:
        """Compiles what transfers need between any two workers that may hand over."""
        for source in self.workers:
            for target in self.workers:
                if (source.role, target.role) == ("prefill", "decode"):
                    self.handover.warm_up(source, target)

    @property
    def alive(self) -> list[Worker]:
        """Workers that are not lost."""
        return [worker for worker in self.workers if worker.failure is None]

    @property
    def has_work(self) -> bool:
        """Something to plan, to collect or to hand over."""
        return bool(len(self.handover)) or any(worker.has_work for worker in self.alive)

    @property
    def entrance(self) -> Worker:
        """Where the next request begins."""
        alive = self.alive
        entrances = [worker for worker in alive if worker.role != "decode"] or alive
        return min(entrances, key=lambda worker: worker.scheduler.waiting + worker.scheduler.running)

    def scheduler_of(self, request: Request) -> Scheduler:
        """Of the worker that has a request, or that its KV is on the way to."""
        return self._home[request].scheduler

    def gauge(self, unfilled: bool) -> None:
        """Brings the metrics up to date; unfilled: also the gauge that costs O(rows)."""
        metrics, alive = self._metrics, self.alive
        metrics.requests_waiting = sum(worker.scheduler.waiting for worker in alive) + len(self.handover)
        metrics.requests_running = sum(worker.scheduler.running for worker in alive)
        metrics.page_bytes = tuple([size for worker in alive for size in worker.page_bytes])
        metrics.count_scheduling([worker.scheduler for worker in self.workers], unfilled=unfilled)
        metrics.count_pages([pool for worker in alive for pool in worker.scheduler.pages.pools])

    def add(self, requests: Sequence[Request]) -> None:
        """Queues the choices of one prompt, all at one worker. Raises as `Scheduler.add`; then none is queued."""
        worker = self.entrance
        for request in requests:
            try:
                worker.scheduler.add(request)
            except Exception:  # a policy is the user's, and may raise anything
                for other in requests:
                    worker.scheduler.finish(other, "cancelled")
                raise
        self._home.update((request, worker) for request in requests)

    def append(self, request: Request, tokens: Sequence[int]) -> None:
        """Tokens of a collected step that its request keeps."""
        self._home[request].scheduler.append(request, tokens)

    def finish(self, request: Request, reason: FinishReason) -> None:
        """Ends a request in whatever state it is."""
        worker = self._home.pop(request)
        self._ready.pop(request, None)
        self.handover.drop(request)
        worker.scheduler.finish(request, reason)
        worker.forget(request)

    def expired(self, now: float) -> list[Request]:
        """Requests whose timeout has passed, each once."""
        late = [request for worker in self.alive for request in worker.scheduler.expired(now)]
        return list(dict.fromkeys(late))  # who has moved is known to several

    def dispatch(self, now: float) -> list[Pending]:
        """Every worker that is not ahead already plans and starts a step; returns those started."""
        started = []
        for worker in self.alive:
            if worker.full:
                continue
            plan = worker.plan(now)
            try:
                pending = worker.dispatch(plan)
            except Exception as error:
                self._lose(worker, error)
                continue
            if pending is not None:
                started.append(pending)
        return started

    def collect(self) -> Iterator[StepResults]:
        """Results of steps, in order for each worker; the caller has appended one's tokens when it asks on.

        One worker is waited for. Of several those that are done are collected, and some are waited for only when there
        is nothing else to do: decode must not keep pace with prefill.
        """
        for worker in self._collectable():
            if worker.failure is not None:
                continue
            try:
                results = worker.collect()
            except Exception as error:
                self._lose(worker, error)
                continue
            yield results
            worker.collected(results.plan)
            if worker.role == "prefill":
                prefilled = [chunk.request for chunk in results.plan.chunks if chunk.samples]
                self._ready.update((request, None) for request in prefilled if request in self._home)

    def _collectable(self) -> list[Worker]:
        alive = self.alive
        due = [worker for worker in alive if worker.due]
        if len(alive) == 1:
            return due
        while True:
            ready = [worker for worker in due if worker.ready]
            if ready or not due or any(worker.eager for worker in alive) or self.handover.has_arrived:
                return ready
            time.sleep(POLL)

    def hand_over(self, wait: bool) -> None:
        """Requests whose KV has arrived join their decode worker, prefilled ones leave for one.

        wait: nothing else is going on, so wait for a transfer.
        """
        for transit, failure in self.handover.arrived(wait and not self.handover.has_arrived):
            self._arrive(transit, failure)
        for request in list(self._ready):
            exits = [worker for worker in self.alive if worker.role == "decode"]
            source = self._home[request]
            if not exits or source.role != "prefill" or request.status is not Status.RUNNING or request.in_flight:
                del self._ready[request]  # it decodes where it is, or was preempted and will be prefilled again
                continue
            size = self.handover.size(request, source)
            exits = [worker for worker in exits if self.handover.takes(worker, size)]
            if not exits:
                break
            del self._ready[request]
            self._leave(request, source, min(exits, key=lambda worker: worker.expected_bytes))

    def check(self) -> None:
        """Asserts the invariants of all schedulers, and that each request is in one place."""
        for worker in self.alive:
            worker.scheduler.check()
        if not self._home:
            assert not self._ready
            assert not len(self.handover)
            assert not any(worker.coming for worker in self.alive), "bytes on their way to nobody"

    def close(self) -> None:
        """Frees the device arrays of all workers."""
        for worker in self.alive:
            worker.close()

    def _leave(self, request: Request, source: Worker, target: Worker) -> None:
        tokens = request.computed
        try:
            payload = self.handover.export(request, source)
        except Exception as error:
            self._lose(source, error)
            return
        source.scheduler.withdraw(request)
        source.forget(request)
        self._home[request] = target
        try:
            self.handover.start(request, tokens, payload, source, target)
        except Exception as error:
            self._lose(target, error)

    def _arrive(self, transit: Transit, failure: Exception | None) -> None:
        request, target = transit.request, transit.target
        if failure is None:
            request.given = Given(transit.tokens, transit.arriving)
            target.scheduler.add(request, again=True)
            return
        culprit = target
        try:
            jax.block_until_ready(transit.sent)
        except Exception as error:
            culprit, failure = transit.source, error
        if culprit.failure is None:
            self._lose(culprit, failure)
        if self._home[request] is target and target.failure is None:  # and not moved with the others
            self._restart(request)

    def _lose(self, worker: Worker, failure: Exception) -> None:
        """Gives a worker up; its requests begin again where there is one left."""
        if self.alive == [worker]:
            raise failure
        self._metrics.workers_lost += 1
        worker.give_up(failure)
        if worker.role == "decode" and not any(other.role == "decode" for other in self.alive):
            for other in self.alive:  # they decode themselves now
                other.role = "both"
                other.scheduler.decode_rows = worker.scheduler.decode_rows
        for request in [request for request, home in self._home.items() if home is worker]:
            self.handover.drop(request)
            self._ready.pop(request, None)
            worker.scheduler.withdraw(request)
            self._restart(request)

    def _restart(self, request: Request) -> None:
        self._home[request].forget(request)
        request.given = None
        worker = self._home[request] = self.entrance
        worker.scheduler.add(request, again=True)
