"""Worker: one engine's device group in virtual time, a scheduler and when its device is done."""

import dataclasses
from typing import Literal

from jinfer.scheduler import Request, Scheduler, StepPlan
from jinfer.simulate.cost import Link, StepTime

NAN = float("nan")
Role = Literal["both", "prefill", "decode"]


@dataclasses.dataclass(frozen=True, slots=True)
class Dispatched:
    """A step that was started.

    Attributes:
      end: when its results are there. prefill, decode: seconds of its calls; None where there is none.
      moving: seconds the device waited for pages.
    """

    plan: StepPlan
    end: float
    prefill: float | None
    decode: float | None
    moving: float


class Worker:
    """Attributes:
      scheduler: the production one. cost: step times. link: to host memory and to other workers. role: what it is for.
      before, last: steps started in the last turn but one and the last one, not collected.
      collected: when the tokens of its last collected step were known.
      coming: bytes of requests on their way to it, or here and waiting for admission.
    """

    __slots__ = ("before", "collected", "coming", "cost", "free", "last", "link", "pages", "role", "scheduler", "sent")

    def __init__(self, scheduler: Scheduler, cost: StepTime, link: Link, role: Role = "both"):
        self.scheduler, self.cost, self.link, self.role = scheduler, cost, link, role
        self.before: Dispatched | None = None
        self.last: Dispatched | None = None
        self.collected = NAN
        self.free = 0.0  # when the device is done with everything dispatched
        self.sent = 0.0  # when the last hand-over has left
        self.coming: dict[Request, int] = {}
        self.pages = sum(pool.num_pages - 1 for pool in scheduler.pages.pools)

    @property
    def held(self) -> int:
        """Pages of all groups that requests hold."""
        held = 0
        for pool in self.scheduler.pages.pools:
            held += pool.held
        return held

    @property
    def expected(self) -> int:
        """Bytes that requests hold, or will once they are admitted."""
        pools = self.scheduler.pages.pools
        held = sum(pool.held * each for pool, each in zip(pools, self.link.page_bytes, strict=True))
        return held * self.link.ranks + sum(self.coming.values())

    @property
    def cached(self) -> int:
        """Pages of all groups that are only cached."""
        cached = 0
        for pool in self.scheduler.pages.pools:
            cached += pool.cached
        return cached

    def start(self, plan: StepPlan, now: float) -> Dispatched:
        """The device runs a plan as soon as it can."""
        begin, moving = self.link.start(plan, now, self.free)
        prefill = self.cost.prefill(plan.chunks) if plan.chunks else None
        decode = self.cost.decode(plan.rows, plan.steps) if plan.rows else None
        self.free = begin + (prefill or 0.0) + (decode or 0.0)
        return Dispatched(plan, self.free, prefill, decode, moving)

    def size(self, request: Request) -> int:
        """Bytes of the pages a request holds, on all devices."""
        return self.link.ranks * sum(each * sum(1 for page in pages if page)
                                     for each, pages in zip(self.link.page_bytes, request.pages, strict=True))

    def send(self, size: int, target: "Worker", now: float) -> float:
        """So many bytes leave for another worker, one request after the other; returns when they are there."""
        lanes = min(self.link.ranks, target.link.ranks)
        self.sent = max(now, self.sent) + size / (lanes * self.link.network)
        return self.sent


class Host:
    """A loop that plans, dispatches and collects for its workers, all of them in each turn, as Engine.step does.

    Attributes:
      workers: in one loop. wake: when the next turn begins; None: there is nothing to do.
    """

    __slots__ = ("wake", "workers")

    def __init__(self, workers: list[Worker]):
        self.workers = workers
        self.wake: float | None = None

    def rouse(self, now: float) -> None:
        """There is something to do."""
        if self.wake is None:
            self.wake = now
