"""What a step takes: the interface of step-time models, the measured one, and the link that pages move over."""

import dataclasses
from collections.abc import Sequence
from typing import Protocol

from jinfer.config.device import ProfileConfig
from jinfer.engine.buckets import Buckets
from jinfer.scheduler.plan import Chunk, DecodeRow, StepPlan
from jinfer.scheduler.step_time import attended_positions


class StepTime(Protocol):
    """Seconds of the calls of a step (plan.roofline.Roofline, Measured)."""

    def prefill(self, chunks: Sequence[Chunk]) -> float: ...

    def decode(self, rows: Sequence[DecodeRow], steps: int) -> float: ...


@dataclasses.dataclass(frozen=True, slots=True)
class Measured:
    """Step times by the coefficients of a profile (scripts/profile_engine.py), terms as of scheduler.StepTime.

    buckets: that calls are padded to, tokens and rows; None: to no size.
    """

    profile: ProfileConfig
    buckets: Buckets | None = None

    def prefill(self, chunks: Sequence[Chunk]) -> float:
        constant, token, position = self.profile.prefill
        tokens = sum(chunk.length for chunk in chunks)
        attended = sum(attended_positions(chunk.length, chunk.start) for chunk in chunks)
        if self.buckets is not None:
            tokens = self.buckets.prefill_size(tokens)
        return constant + token * tokens + position * attended

    def decode(self, rows: Sequence[DecodeRow], steps: int) -> float:
        constant, each, position = self.profile.decode
        seen = sum([row.position for row in rows]) + (steps - 1) / 2 * len(rows)
        size = len(rows) if self.buckets is None else self.buckets.decode_size(len(rows))
        return steps * (constant + each * size + position * seen)


@dataclasses.dataclass(slots=True)
class Link:
    """Copies of pages between device and host memory, in two directions of their own, beside the computation.

    Pages that come in are on their way from dispatch on, while the step before computes; the step that needs them
    waits for the rest. Pages that go out are copied aside when their step begins, and leave while it computes; the
    next step that sends some waits until they are gone, since there is one place to put them aside.

    Attributes:
      page_bytes: of a page on a device, by group. ranks: devices, each with a link and its part of every page.
      rate: bytes a second of a device, one way. network: of a device, to one of another worker.
      copy: bytes a second of copies within device memory (read and written).
      overlap: else the device waits for every copy.
    """

    page_bytes: tuple[int, ...]
    rate: float
    network: float
    copy: float
    overlap: bool = True
    ranks: int = 1
    _in_free: float = 0.0
    _out_free: float = 0.0

    def start(self, plan: StepPlan, now: float, free: float) -> tuple[float, float]:
        """(when the device can begin to compute, seconds of that its moves have cost).

        Args:
          now: when the plan is dispatched. free: when the device is done with the step before.
        """
        begin = max(now, free)
        if not (plan.outs or plan.ins or plan.copies or plan.received):
            return begin, 0.0
        start, size = begin, self.page_bytes
        out = sum(size[move.group] for move in plan.outs)
        if out:
            start = max(start, self._out_free) + 2 * out / self.copy
            self._out_free = start + out / self.rate
            if not self.overlap:
                start = self._out_free
        coming = sum(size[move.group] for move in plan.ins)
        if coming:
            self._in_free = max(now if self.overlap else start, self._in_free) + coming / self.rate
            start = max(start, self._in_free)
        written = sum(size[move.group] for move in plan.copies)
        written += sum(each * sum(1 for page in pages if page) for received in plan.received
                       for each, pages in zip(size, received.pages, strict=True))
        start += 2 * written / self.copy
        return start, start - begin

    def bytes(self, plan: StepPlan) -> tuple[int, int]:
        """(to the host, from the host) of all devices together."""
        size = self.page_bytes
        return (self.ranks * sum(size[move.group] for move in plan.outs),
                self.ranks * sum(size[move.group] for move in plan.ins))
