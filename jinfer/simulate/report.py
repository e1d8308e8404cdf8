"""Report: a Recorder in the numbers a capacity plan needs."""

import dataclasses
from typing import Any

import numpy as np

from jinfer.errors import ConfigError
from jinfer.simulate.recorder import Outcome, Recorder


@dataclasses.dataclass(frozen=True, slots=True)
class Quantiles:
    """Seconds; None when there was nothing to take them of."""

    p50: float | None
    p95: float | None
    p99: float | None
    mean: float | None
    most: float | None


@dataclasses.dataclass(frozen=True, slots=True)
class Targets:
    """Seconds; None is no target. A request's own targets go before these.

    Attributes:
      ttft: to the first token. itl: in the mean between a request's tokens.
    """

    ttft: float | None = None
    itl: float | None = None

    def __post_init__(self) -> None:
        for name in ("ttft", "itl"):
            value = getattr(self, name)
            if value is not None and not value > 0.0:
                raise ConfigError(f"{name}: must be a positive number of seconds, got {value!r}")


@dataclasses.dataclass(frozen=True, slots=True)
class ClassReport:
    """One class of requests, or all.

    Attributes:
      jobs: sent. finished, rejected, overloaded, timeout, cancelled: how they ended.
      ttft, queue, e2e: by request. itl: by gap between tokens, of all requests. request_itl: by request, the mean of
        its gaps (time per output token).
      goodput: share of the jobs that finished within their targets, of those nobody cancelled; goodput_rate: those a
        second.
      strict: share that finished with every gap, not only the mean, within the target.
    """

    name: str
    jobs: int
    finished: int
    rejected: int
    overloaded: int
    timeout: int
    cancelled: int
    prompt_tokens: int
    output_tokens: int
    ttft: Quantiles
    queue: Quantiles
    itl: Quantiles
    request_itl: Quantiles
    e2e: Quantiles
    goodput: float
    goodput_rate: float
    strict: float


@dataclasses.dataclass(frozen=True, slots=True)
class Report:
    """Attributes:
      seconds: of virtual time, from the first arrival to the last end. classes: all together, then each.
      steps: of the loop. busy: share of the time the device computed; moving: it waited for pages.
      stall: seconds; stalls: gaps longer than that by cause, stall_rate: of all gaps.
      held, cached: mean share of the pool while something ran; held_peak. unfilled: share of the positions of held
      pages that hold no token yet.
      hit_rate: share of the prompt tokens that were found in the cache; saved: tokens.
    """

    seconds: float
    steps: int
    request_rate: float
    output_rate: float
    prefill_rate: float
    busy: float
    moving: float
    classes: tuple[ClassReport, ...]
    targets: Targets
    stall: float
    stalls: dict[str, int]
    stall_rate: float
    running: float
    running_peak: int
    waiting: float
    waiting_peak: int
    held: float
    held_peak: float
    unfilled: float
    cached: float
    evictions: int
    preemptions: int
    returned_swapped: int
    returned_cached: int
    recomputed: int
    swapped_out: int
    swapped_in: int
    received: int
    hit_rate: float
    saved: int

    @property
    def all(self) -> ClassReport:
        return self.classes[0]

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return dataclasses.asdict(self)


def make_report(recorder: Recorder, names: tuple[str, ...] = ("all",), targets: Targets | None = None) -> Report:
    """names: of the classes, in the order of Job.group."""
    targets = targets or Targets()
    jobs, steps, gaps = recorder.jobs, recorder.steps, recorder.gaps
    arrival, ends = np.asarray(jobs.arrival), np.asarray(jobs.arrival) + np.asarray(jobs.e2e)
    seconds = float(ends.max() - arrival.min()) if len(arrival) else 0.0
    groups, gap_groups = np.asarray(jobs.group), np.asarray(gaps.group)
    every = np.ones(len(groups), bool), np.ones(len(gap_groups), bool)
    classes = [_class(recorder, "all", *every, targets, seconds)]
    if len(names) > 1:
        classes += [_class(recorder, name, groups == i, gap_groups == i, targets, seconds)
                    for i, name in enumerate(names)]
    time = np.asarray(steps.time)
    spans = np.diff(time, prepend=arrival.min() if len(arrival) else 0.0)
    known = int(np.asarray(gaps.count).sum())
    running, waiting = np.asarray(steps.running), np.asarray(steps.waiting)
    held, cached = np.asarray(steps.held), np.asarray(steps.cached)

    def over_time(values: np.ndarray) -> float:
        return float((values * spans).sum() / spans.sum()) if spans.sum() else 0.0

    return Report(
        seconds=seconds, steps=len(time), request_rate=_per(classes[0].finished, seconds),
        output_rate=_per(classes[0].output_tokens, seconds), prefill_rate=_per(recorder.prefill_tokens, seconds),
        busy=_per(recorder.busy, seconds), moving=_per(recorder.moving, seconds), classes=tuple(classes),
        targets=targets, stall=recorder.stall,
        stalls={str(cause): count for cause, count in sorted(recorder.stalls.items(), key=lambda item: -item[1])},
        stall_rate=_per(sum(recorder.stalls.values()), known),
        running=over_time(running), running_peak=int(running.max(initial=0)),
        waiting=over_time(waiting), waiting_peak=int(waiting.max(initial=0)),
        held=over_time(held), held_peak=float(held.max(initial=0.0)),
        unfilled=_per(recorder.unfilled, recorder.held), cached=over_time(cached),
        evictions=recorder.evictions, preemptions=recorder.preemptions, returned_swapped=recorder.returned_swapped,
        returned_cached=recorder.returned_cached, recomputed=recorder.recomputed, swapped_out=recorder.swapped_out,
        swapped_in=recorder.swapped_in, received=recorder.received, hit_rate=_per(recorder.saved, recorder.asked),
        saved=recorder.saved)


def _class(recorder: Recorder, name: str, jobs: np.ndarray, gaps: np.ndarray, targets: Targets,
           seconds: float) -> ClassReport:
    """jobs, gaps: masks of the rows that belong to it."""
    def column(field: str) -> np.ndarray:
        return np.asarray(getattr(recorder.jobs, field))[jobs]

    outcome = column("outcome")
    count = {kind: int((outcome == kind).sum()) for kind in Outcome}
    finished = outcome == Outcome.FINISHED
    ttft_target = _or(column("ttft_target"), targets.ttft)
    itl_target = _or(column("itl_target"), targets.itl)
    ttft, itl, worst = column("ttft"), np.nan_to_num(column("itl")), column("worst")
    prompt = finished & ~(np.nan_to_num(ttft) > ttft_target)  # an output of no token is in time
    good, strict = prompt & (itl <= itl_target), prompt & (worst <= itl_target)
    total, served = len(outcome), len(outcome) - count[Outcome.CANCELLED]
    return ClassReport(
        name=name, jobs=total, finished=count[Outcome.FINISHED], rejected=count[Outcome.REJECTED],
        overloaded=count[Outcome.OVERLOADED], timeout=count[Outcome.TIMEOUT], cancelled=count[Outcome.CANCELLED],
        prompt_tokens=int(column("prompt").sum()), output_tokens=int(column("tokens").sum()),
        ttft=_quantiles(ttft), queue=_quantiles(column("queue")),
        itl=_quantiles(np.asarray(recorder.gaps.gap)[gaps], np.asarray(recorder.gaps.count)[gaps]),
        request_itl=_quantiles(column("itl")), e2e=_quantiles(column("e2e")[finished]),
        goodput=_per(int(good.sum()), served), goodput_rate=_per(int(good.sum()), seconds),
        strict=_per(int(strict.sum()), served))


def weighted_quantiles(values: np.ndarray, weights: np.ndarray, at: tuple[float, ...]) -> list[float]:
    """Smallest values with at least that share of the weight at or below them."""
    order = np.argsort(values, kind="stable")
    sums = np.cumsum(weights[order])
    places = np.searchsorted(sums, np.array(at) * sums[-1], side="left")
    return [float(values[order[min(place, len(order) - 1)]]) for place in places]


def _quantiles(values: np.ndarray, weights: np.ndarray | None = None) -> Quantiles:
    known = ~np.isnan(values)
    values = values[known]
    if not len(values):
        return Quantiles(None, None, None, None, None)
    if weights is None:
        marks = [float(x) for x in np.quantile(values, (0.5, 0.95, 0.99))]
        return Quantiles(marks[0], marks[1], marks[2], float(values.mean()), float(values.max()))
    weights = weights[known]
    marks = weighted_quantiles(values, weights, (0.5, 0.95, 0.99))
    return Quantiles(marks[0], marks[1], marks[2], float(np.average(values, weights=weights)), float(values.max()))


def _or(targets: np.ndarray, default: float | None) -> np.ndarray:
    return np.where(np.isnan(targets), np.inf if default is None else default, targets)


def _per(amount: float, of: float) -> float:
    return amount / of if of else 0.0
