"""Worker: one device group. A scheduler and the runner that carries out its plans, one step ahead of the host."""

import contextlib
from typing import Literal

import jax

from jinfer.engine.results import StepResults
from jinfer.engine.runner import Pending, Runner
from jinfer.scheduler import Request, Scheduler, StepPlan
from jinfer.sharding.heads import HeadPlacement

Role = Literal["both", "prefill", "decode"]


class Worker:
    """Plans and dispatches a step, and collects the one before it.

    A turn of the loop calls `plan` and `dispatch` unless it is `full`, then, if it is `due`, `collect` and, when the
    results are appended, `collected`. Between dispatch and collect other workers dispatch theirs, so that device groups
    overlap; with several, one is collected when it is `ready`, so that none keeps pace with another.

    Attributes:
      scheduler, runner: its parts. role: what it is for; one for decode is a complete engine all the same.
      placement: of its KV. page_bytes: of a page of each page group, on all its devices.
      coming: bytes of KV on their way to a request here, or here already and waiting for its admission.
      failure: why it was given up; None while it works.
    """

    def __init__(self, scheduler: Scheduler, runner: Runner, role: Role = "both"):
        self.scheduler = scheduler
        self.runner = runner
        self.role = role
        programs = runner.catalog.programs
        self.placement = HeadPlacement.of(programs.layout, programs.config)
        self.page_bytes = tuple(sum(x.nbytes for x in jax.tree.leaves(group)) // count
                                for group, count in zip(runner.kv, runner.pages, strict=True))
        self.coming: dict[Request, int] = {}
        self.failure: Exception | None = None
        self._pending: list[Pending] = []  # dispatched and not collected, two at most
        self._idle = False  # there was nothing to dispatch in the last turn
        self._plans: list[StepPlan] = []  # not collected

    @property
    def has_work(self) -> bool:
        """Something to plan or to collect."""
        return bool(self.scheduler.has_work or self._pending)

    @property
    def full(self) -> bool:
        """It is one step ahead: nothing more is planned before a step is collected."""
        return len(self._pending) == 2

    @property
    def due(self) -> bool:
        """Nothing is left to do here but to collect a step."""
        return self.full or (self._idle and bool(self._pending))

    @property
    def eager(self) -> bool:
        """It may have another step to start at once."""
        return not self.full and not self._idle

    @property
    def ready(self) -> bool:
        """The step to collect is done: `collect` will not wait."""
        return self._pending[0].is_ready()

    @property
    def expected_bytes(self) -> int:
        """KV that is held here, or will be as soon as those it is for are admitted."""
        held = sum(pool.held * size for pool, size in zip(self.scheduler.pages.pools, self.page_bytes, strict=True))
        return held + sum(self.coming.values())

    def plan(self, now: float) -> StepPlan:
        """The next step; now: seconds of a monotonic clock. One that is not empty is to be dispatched."""
        plan = self.scheduler.plan(now)
        if not plan.empty:
            self._plans.append(plan)
        return plan

    def dispatch(self, plan: StepPlan) -> Pending | None:
        """Starts a step; None if there is nothing to compute."""
        self._idle = plan.empty
        if plan.empty:
            return None
        self._pending.append(self.runner.dispatch(plan))
        return self._pending[-1]

    def collect(self) -> StepResults:
        """Waits for the oldest step that was not collected."""
        pending = self._pending.pop(0)
        results = StepResults(pending.plan, *self.runner.collect(pending))
        self.scheduler.observe(pending.plan, pending.prefill_seconds, pending.decode_seconds)
        for transfer in self.runner.transfers():
            self.scheduler.observe_swap(transfer.bytes, transfer.seconds)
        return results

    def collected(self, plan: StepPlan) -> None:
        """Its tokens are appended."""
        assert self._plans.pop(0) is plan, "collected out of order"
        self.scheduler.collected(plan)
        for received in plan.received:
            self.coming.pop(received.request, None)

    def forget(self, request: Request) -> None:
        """A request left, or ended; what is kept for it goes."""
        self.coming.pop(request, None)
        self.runner.forget(request)

    def give_up(self, failure: Exception) -> None:
        """The device group is lost, with all that is in flight; requests can still be withdrawn from the scheduler."""
        self.failure = failure
        for plan in self._plans:
            self.scheduler.collected(plan)
        self._plans.clear()
        self.coming.clear()
        with contextlib.suppress(Exception):  # what a lost device says to that is of no interest
            self.close()

    def close(self) -> None:
        """Frees the device arrays."""
        self._pending.clear()
        self.runner.close()
