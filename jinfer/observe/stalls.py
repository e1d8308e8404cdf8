"""Stalls: gaps between the tokens of a request that are far longer than usual."""

from collections import deque
from typing import Literal

from jinfer.scheduler import Request, StepPlan

FACTOR = 4.0  # times the usual gap
LEAST = 0.02  # seconds: nobody notices a shorter gap
KEPT = 256  # gaps the usual one is the median of
REFRESH = 64  # gaps after which the median is taken anew; before the first time nothing is a stall

Cause = Literal["preemption", "prefill", "other"]  # computed again; a prefill call in the same step; neither


def cause_of(plan: StepPlan, request: Request) -> Cause:
    """Why the tokens that a step brought a request came late, if they did and others were there before."""
    if any(chunk.request is request for chunk in plan.chunks):
        return "preemption"
    return "prefill" if plan.chunks else "other"


class StallMeter:
    """Tells stalls from other gaps, at the cost of a comparison a token.

    A gap is a stall when it is longer than the request's own target, or, where it has none, than FACTOR times the
    running median of all gaps and than LEAST.

    Attributes:
      threshold: seconds, for requests without a target.
    """

    __slots__ = ("_gaps", "_seen", "threshold")

    def __init__(self) -> None:
        self.threshold = float("inf")
        self._gaps: deque[float] = deque(maxlen=KEPT)
        self._seen = 0

    def stalled(self, gap: float, target: float | None = None) -> bool:
        """Takes a gap, and the longest one its request wants, in seconds."""
        self._gaps.append(gap)
        self._seen += 1
        if self._seen % REFRESH == 0:
            self.threshold = max(LEAST, FACTOR * sorted(self._gaps)[len(self._gaps) // 2])
        return gap > (self.threshold if target is None else target)
