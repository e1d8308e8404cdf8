"""Handover: KV pages of requests on their way from prefill workers to decode workers."""

import dataclasses
import time
from collections.abc import Iterator

import jax

from jinfer.engine.page_moves import BLOCKS
from jinfer.engine.transfer import InProcess, Payload, Transfer
from jinfer.engine.worker import Worker
from jinfer.kv import pages_for
from jinfer.observe.metrics import Metrics
from jinfer.scheduler import Request


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Transit:
    """KV of a request under way.

    Attributes:
      tokens: positions it is of. sent, arriving: the payload on the devices of source and target.
      started: seconds of a monotonic clock.
    """

    request: Request
    source: Worker
    target: Worker
    tokens: int
    sent: Payload
    arriving: Payload
    started: float


class Handover:
    """Starts transfers and tells when they have arrived.

    A request that has left its prefill worker is in no scheduler until its KV has arrived: a decode step that waited
    for it would hold up all rows. What is under way or waits for admission is bounded by a budget for each decode
    worker; the rest stays in the pages of the prefill worker, which admits less then.
    """

    def __init__(self, budget: int, metrics: Metrics, transfer: Transfer | None = None):
        """budget: bytes for each decode worker; a single payload may exceed it."""
        self._budget = budget
        self._metrics = metrics
        self.transfer: Transfer = transfer or InProcess()
        self._transits: dict[Request, Transit] = {}

    def warm_up(self, source: Worker, target: Worker) -> None:
        """Sends blocks of all sizes once: heads that are cut otherwise at the target take small programs."""
        blocks = source.runner.export([[1] * sum(BLOCKS)] * len(source.page_bytes))
        jax.block_until_ready(self.transfer.receive(self.transfer.send(blocks), target.placement))

    def __len__(self) -> int:
        """Requests whose KV is under way."""
        return len(self._transits)

    @property
    def has_arrived(self) -> bool:
        """The KV of some request is where it is to be."""
        return any(all(x.is_ready() for x in jax.tree.leaves(transit.arriving)) for transit in self._transits.values())

    @staticmethod
    def size(request: Request, worker: Worker) -> int:
        """Bytes of its KV on the devices of a worker that holds it."""
        count = pages_for(request.computed, worker.scheduler.pages.page_size)
        return sum(sum(map(bool, pages[:count])) * each
                   for pages, each in zip(request.pages, worker.page_bytes, strict=True))

    def takes(self, worker: Worker, size: int) -> bool:
        """A decode worker's budget has room for so many bytes more."""
        return not worker.coming or sum(worker.coming.values()) + size <= self._budget

    def export(self, request: Request, source: Worker) -> Payload:
        """Takes a request's KV out of its worker's pages, behind all calls dispatched so far: they are free then."""
        count = pages_for(request.computed, source.scheduler.pages.page_size)
        return source.runner.export([pages[:count] for pages in request.pages])

    def start(self, request: Request, tokens: int, payload: Payload, source: Worker, target: Worker) -> None:
        """Sends the KV of the first `tokens` positions of a request that has left its worker."""
        started = time.perf_counter()
        ticket = self.transfer.send(payload)
        try:
            arriving = self.transfer.receive(ticket, target.placement)
        except BaseException:
            self.transfer.release(ticket)
            raise
        self._transits[request] = Transit(request, source, target, tokens, payload, arriving, started)
        target.coming[request] = sum(x.nbytes for x in jax.tree.leaves(arriving))
        self._metrics.transfers += 1
        self._metrics.transfer_bytes += ticket.nbytes

    def arrived(self, wait: bool) -> Iterator[tuple[Transit, Exception | None]]:
        """Transfers that have ended, each once, with what went wrong; wait: for the oldest of them."""
        for transit in list(self._transits.values()):
            leaves = jax.tree.leaves(transit.arriving)
            if not wait and not all(x.is_ready() for x in leaves):
                continue
            wait = False
            failure = None
            try:
                jax.block_until_ready(leaves)
            except Exception as error:
                failure = error
            del self._transits[transit.request]
            self._metrics.transfer_seconds += time.perf_counter() - transit.started
            yield transit, failure

    def drop(self, request: Request) -> bool:
        """Nobody waits for its KV any more; False if it is not under way."""
        return self._transits.pop(request, None) is not None
