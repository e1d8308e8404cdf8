"""Pace: how many prompt tokens a step may compute beside its decoding rows."""

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Sequence
from operator import attrgetter

from jinfer.scheduler.plan import StepPlan
from jinfer.scheduler.request import Request, Status
from jinfer.scheduler.step_time import StepTime, attended_positions

POSITION = attrgetter("position")
LEAST_CHUNK = 32  # tokens a step prefills whatever its time budget: prompts must move on


class Pace:
    """The budgets of a step, and the model of step times that keeps them.

    Attributes:
      prefill_tokens: most prompt tokens of a step. step_tokens: most tokens, prefill and decode together.
      itl_target: seconds a step with decoding rows should take at most; requests may want less.
      sizes: that prefill calls are padded to, ascending; none: they take what their tokens take.
      step_time: what calls take, learned from `observe`.
    """

    def __init__(self, prefill_tokens: int, step_tokens: int | None, itl_target: float | None, step_time: StepTime,
                 sizes: Sequence[int] = ()):
        self.prefill_tokens = prefill_tokens
        self.step_tokens = step_tokens
        self.itl_target = itl_target
        self.sizes = tuple(sizes)
        self.step_time = step_time
        self.context = 0  # positions of the rows of the last plan
        self._targets: Counter[float] = Counter()  # of the active requests that have one

    def join(self, request: Request) -> None:
        """A request is active from now on: its target counts."""
        if request.service.itl_target is not None:
            self._targets[request.service.itl_target] += 1

    def leave(self, request: Request) -> None:
        target = request.service.itl_target
        if target is not None:
            self._targets[target] -= 1
            if not self._targets[target]:
                del self._targets[target]

    def decode_rows(self, most: int, steps: int) -> int:
        """Rows of a decode call of so many steps, at most `most`."""
        return most if self.step_tokens is None else min(most, max(1, self.step_tokens // steps))

    def prefill_budget(self, rows: int, steps: int, active: Sequence[Request]) -> int:
        """Prompt tokens of a step in which so many rows decode for so many steps."""
        budget = self.prefill_tokens
        if self.step_tokens is not None:
            budget = max(0, min(budget, self.step_tokens - rows * steps))
        target = min(self._targets, default=self.itl_target)
        if self.itl_target is not None:
            target = min(self.itl_target, target or self.itl_target)
        if target is None or not rows or budget <= LEAST_CHUNK:
            return budget
        left = target - self.step_time.decode_seconds(rows, self.context, steps)
        start = next((r.computed for r in active if r.status is Status.PREFILLING), 0)
        tokens = self.step_time.chunk_tokens(left, start, budget, LEAST_CHUNK)
        if tokens == budget:
            return tokens
        # A call of more would be padded to the next size, and take what that takes.
        return max(LEAST_CHUNK, self.sizes[bisect_right(self.sizes, tokens) - 1]) if self.sizes else tokens

    def prompt_seconds(self, tokens: int) -> float:
        """Expected time of the prefill of a whole prompt."""
        return self.step_time.prefill_seconds(tokens, attended_positions(tokens, 0))

    def observe(self, plan: StepPlan, prefill_seconds: float | None, decode_seconds: float | None) -> None:
        """What the calls of a plan took on the device; None for one that was not made or not measured."""
        if prefill_seconds is not None and plan.chunks:
            tokens = sum(chunk.length for chunk in plan.chunks)
            attended = sum(attended_positions(chunk.length, chunk.start) for chunk in plan.chunks)
            if self.sizes and tokens < self.sizes[-1]:
                tokens = self.sizes[bisect_left(self.sizes, tokens)]
            self.step_time.observe_prefill(tokens, attended, prefill_seconds)
        if decode_seconds is not None and plan.rows:
            context = sum(map(POSITION, plan.rows))
            self.step_time.observe_decode(len(plan.rows), context, plan.steps, decode_seconds)
