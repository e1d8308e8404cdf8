"""Recorder: what happened in a simulation, as columns of numbers; the report is made from it."""

import dataclasses
import enum
from array import array
from collections import Counter

from jinfer.bench.jobs import Job


class Outcome(enum.IntEnum):
    """How a job ended."""

    FINISHED = 0
    REJECTED = 1  # it could never fit
    OVERLOADED = 2  # the queue was full
    TIMEOUT = 3
    CANCELLED = 4


class Cause(enum.StrEnum):
    """Why a token came late: what the gap before it would have been short enough without."""

    PREFILL = "prefill beside it"
    PREEMPTION = "preemption"
    SWAP_IN = "swap-in"
    MOVES = "page moves"
    HAND_OVER = "hand-over"
    PAUSED = "paused"
    DECODE = "decode itself"


@dataclasses.dataclass(slots=True)
class JobColumns:
    """One row a job. Seconds; NaN where there is none.

    Attributes:
      arrival: when it came. queue: until its first chunk was dispatched. ttft: until its first token. e2e: until its
        end. itl: mean between the tokens of its first choice. worst: the longest gap. tokens: generated, all choices.
    """

    arrival: array = dataclasses.field(default_factory=lambda: array("d"))
    queue: array = dataclasses.field(default_factory=lambda: array("d"))
    ttft: array = dataclasses.field(default_factory=lambda: array("d"))
    e2e: array = dataclasses.field(default_factory=lambda: array("d"))
    itl: array = dataclasses.field(default_factory=lambda: array("d"))
    worst: array = dataclasses.field(default_factory=lambda: array("d"))
    tokens: array = dataclasses.field(default_factory=lambda: array("q"))
    prompt: array = dataclasses.field(default_factory=lambda: array("q"))
    group: array = dataclasses.field(default_factory=lambda: array("i"))
    outcome: array = dataclasses.field(default_factory=lambda: array("i"))
    ttft_target: array = dataclasses.field(default_factory=lambda: array("d"))
    itl_target: array = dataclasses.field(default_factory=lambda: array("d"))


@dataclasses.dataclass(slots=True)
class StepColumns:
    """One row a collected step.

    Attributes:
      time: when its tokens were known. prefill: prompt tokens computed. rows: decoded. tokens: sampled.
      running, waiting: requests. held, cached: share of the pool's pages, of all groups, 0..1.
    """

    time: array = dataclasses.field(default_factory=lambda: array("d"))
    prefill: array = dataclasses.field(default_factory=lambda: array("i"))
    rows: array = dataclasses.field(default_factory=lambda: array("i"))
    tokens: array = dataclasses.field(default_factory=lambda: array("i"))
    running: array = dataclasses.field(default_factory=lambda: array("i"))
    waiting: array = dataclasses.field(default_factory=lambda: array("i"))
    held: array = dataclasses.field(default_factory=lambda: array("f"))
    cached: array = dataclasses.field(default_factory=lambda: array("f"))


@dataclasses.dataclass(slots=True)
class GapColumns:
    """Gaps between tokens, those of a step that are equal as one row: most rows of a step share the gap to the last.

    Attributes:
      time: of the later token. gap: seconds. count: how many. group: class of the requests.
    """

    time: array = dataclasses.field(default_factory=lambda: array("d"))
    gap: array = dataclasses.field(default_factory=lambda: array("d"))
    count: array = dataclasses.field(default_factory=lambda: array("q"))
    group: array = dataclasses.field(default_factory=lambda: array("i"))


class Recorder:
    """Attributes:
      jobs, steps, gaps: the columns. stalls: gaps longer than `stall`, by cause.
      prefill_tokens: computed, those computed again included; recomputed: those. saved: prompt tokens found in the
        cache on first admission, of `asked`.
      preemptions: how often a request lost its pages; returned_cached, returned_swapped: readmissions that found at
        least half of what they had in the pool, or had some of it loaded from the host.
      swapped_out, swapped_in, received: bytes. evictions: cached pages handed out for other contents.
      busy: seconds the device computed; moving: seconds it waited for pages.
      held, unfilled: positions of held pages, and those of them that are not computed yet, summed over samples.
    """

    def __init__(self, stall: float):
        self.stall = stall
        self.jobs, self.steps, self.gaps = JobColumns(), StepColumns(), GapColumns()
        self.stalls: Counter[Cause] = Counter()
        self.prefill_tokens = self.recomputed = self.saved = self.asked = 0
        self.preemptions = self.returned_cached = self.returned_swapped = 0
        self.swapped_out = self.swapped_in = self.received = self.evictions = 0
        self.busy = self.moving = 0.0
        self.held = self.unfilled = 0

    def gap(self, time: float, gap: float, count: int, group: int) -> None:
        gaps = self.gaps
        gaps.time.append(time)
        gaps.gap.append(gap)
        gaps.count.append(count)
        gaps.group.append(group)

    def job(self, job: Job, outcome: Outcome, *, arrival: float, queue: float, ttft: float, e2e: float, itl: float,
            worst: float, tokens: int) -> None:
        columns = self.jobs
        columns.arrival.append(arrival)
        columns.queue.append(queue)
        columns.ttft.append(ttft)
        columns.e2e.append(e2e)
        columns.itl.append(itl)
        columns.worst.append(worst)
        columns.tokens.append(tokens)
        columns.prompt.append(len(job.prompt))
        columns.group.append(job.group)
        columns.outcome.append(outcome)
        columns.ttft_target.append(job.service.ttft_target or float("nan"))
        columns.itl_target.append(job.service.itl_target or float("nan"))

    def step(self, time: float, prefill: int, rows: int, tokens: int, running: int, waiting: int,
             held: float, cached: float) -> None:
        """held, cached: shares of the pool."""
        columns = self.steps
        columns.time.append(time)
        columns.prefill.append(prefill)
        columns.rows.append(rows)
        columns.tokens.append(tokens)
        columns.running.append(running)
        columns.waiting.append(waiting)
        columns.held.append(held)
        columns.cached.append(cached)
