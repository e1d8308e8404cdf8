"""Worker: one device group. A scheduler and the runner that carries out its plans, one step ahead of the host."""

import time

from jinfer.engine.results import StepResults
from jinfer.engine.runner import Pending, Runner
from jinfer.scheduler import Scheduler


class Worker:
    """Plans and dispatches a step, and collects the one before it.

    A turn of the loop calls `dispatch`, `collect` and, when the results are appended, `collected`. Between dispatch
    and collect other workers dispatch theirs, so that device groups overlap.

    Attributes:
      scheduler, runner: its parts.
    """

    def __init__(self, scheduler: Scheduler, runner: Runner):
        self.scheduler = scheduler
        self.runner = runner
        self._last: Pending | None = None  # dispatched in this turn
        self._before: Pending | None = None  # in the turn before

    @property
    def has_work(self) -> bool:
        """Something to plan or to collect."""
        return bool(self.scheduler.has_work or self._last)

    def dispatch(self) -> Pending | None:
        """Plans the next step and starts it; None if there is nothing to compute."""
        plan = self.scheduler.plan(time.perf_counter())
        self._before, self._last = self._last, None if plan.empty else self.runner.dispatch(plan)
        return self._last

    def collect(self) -> StepResults | None:
        """Waits for the step before the one `dispatch` started; None if there was none."""
        pending, self._before = self._before, None
        if pending is None:
            return None
        results = StepResults(pending.plan, *self.runner.collect(pending))
        self.scheduler.observe(pending.plan, pending.prefill_seconds, pending.decode_seconds)
        for transfer in self.runner.transfers():
            self.scheduler.observe_swap(transfer.bytes, transfer.seconds)
        return results

    def collected(self, results: StepResults) -> None:
        """Its tokens are appended."""
        self.scheduler.collected(results.plan)

    def close(self) -> None:
        """Frees the device arrays."""
        self._last = self._before = None
        self.runner.close()
