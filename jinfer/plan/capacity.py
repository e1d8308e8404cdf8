"""Capacity: how many engines of which configuration hold a load within latency targets, by simulating them."""

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from jinfer.bench.jobs import Job
from jinfer.errors import ConfigError
from jinfer.simulate.machine import Machine
from jinfer.simulate.report import Report, Targets, make_report

MOST_LOAD = 4.0  # times the load: no more headroom than that is looked for
HALVINGS = 5  # of the intervals in which headroom and page budget are looked for


@dataclasses.dataclass(frozen=True, slots=True)
class Setting:
    """What is searched.

    Attributes:
      devices: of one engine, tensor parallel. rows: B. chunk: prefill tokens of a step.
      replicas: engines the load is divided among. pages: share of the pages that fit.
    """

    devices: int
    rows: int
    chunk: int
    replicas: int = 1
    pages: float = 1.0

    @property
    def cost(self) -> int:
        """Devices of all replicas."""
        return self.devices * self.replicas


@dataclasses.dataclass(frozen=True, slots=True)
class Point:
    """A setting that was tried.

    Attributes:
      load: times the asked rate. meets: goodput is reached. report: of one replica; None: `problem` says why not.
    """

    setting: Setting
    load: float
    meets: bool
    report: Report | None
    problem: str | None = None

    @property
    def strain(self) -> float:
        """How far the latencies of the slow ones are from the targets: 1 is at them, less is better."""
        if self.report is None:
            return float("inf")
        row, targets = self.report.all, self.report.targets
        pairs = ((row.ttft.p99, targets.ttft), (row.request_itl.p99, targets.itl))
        return max((value / target for value, target in pairs if value is not None and target), default=0.0)


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """Attributes:
      points: everything tried, in order. answer: the cheapest that meets the targets; None: nothing does.
      headroom: times the asked load the answer still holds (at most MOST_LOAD).
      least_pages: share of its pages it needs.
    """

    points: list[Point]
    answer: Point | None
    headroom: float = 1.0
    least_pages: float = 1.0

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return dataclasses.asdict(self)


class CapacitySearch:
    """Tries settings by simulating one of the replicas, which gets every k-th request (every k-th conversation).

    More replicas, more load or fewer pages are taken to be monotone, so each is found by bisection.

    A queue that grows slowly, or conversations whose later turns are still to come, show only after a while: a point
    that holds for the first requests is tried again with as many as arrive in `span` seconds.
    """

    def __init__(self, machine: Callable[[Setting], Machine], jobs: Callable[[float, int], list[Job]],
                 targets: Targets, *, goodput: float = 0.99, requests: int = 1000, span: float = 300.0, most: int = 64,
                 progress: Callable[[Point], None] | None = None):
        """Args:
          machine: an engine of a setting; raises ConfigError where it does not fit.
          jobs: (times the asked load, how many) -> the requests of all replicas.
          goodput: share of the requests that must meet the targets. requests: simulated for a point at first.
          span: seconds of arrivals, at least, of a point that holds. most: replicas. progress: told every point.
        """
        if not 0.0 < goodput <= 1.0:
            raise ConfigError(f"goodput: must be in (0, 1], got {goodput!r}")
        if targets.ttft is None and targets.itl is None:
            raise ConfigError("ttft: give a target for it or for itl")
        self.points: list[Point] = []
        self._machine, self._jobs, self._targets = machine, jobs, targets
        self._goodput, self._requests, self._most, self._span = goodput, requests, most, span
        self._progress = progress or (lambda point: None)

    def run(self, settings: Iterable[Setting]) -> Plan:
        """The cheapest of the settings, each with as few replicas as meet the targets."""
        best: Point | None = None
        for setting in settings:
            most = self._most if best is None else min(self._most, best.setting.cost // setting.devices)
            found = self._fewest(setting, most, guess=None if best is None else most) if most else None
            if found and (best is None or (found.setting.cost, found.strain) < (best.setting.cost, best.strain)):
                best = found
        if best is None:
            return Plan(self.points, None)
        return Plan(self.points, best, self._headroom(best.setting), self._least_pages(best.setting))

    def try_point(self, setting: Setting, load: float = 1.0) -> Point:
        """Simulates one replica."""
        report, problem = None, None
        try:
            machine = self._machine(setting)
        except ConfigError as error:
            problem = str(error)
        else:
            count, enough = self._requests * setting.replicas, False
            while not enough:
                jobs = share(self._jobs(load, count), setting.replicas)
                report = make_report(machine.simulate(jobs), targets=self._targets)
                last = max(job.time for job in jobs if job.after is None)
                enough = report.all.goodput < self._goodput or not 0 < last < self._span
                count = int(count * 1.1 * self._span / last) + 1 if last else count
        point = Point(setting, load, report is not None and report.all.goodput >= self._goodput, report, problem)
        self.points.append(point)
        self._progress(point)
        return point

    def _fewest(self, setting: Setting, most: int, guess: int | None) -> Point | None:
        """With the fewest replicas that meet the targets, up to `most`; guess: where to begin."""
        low, found, count = 0, None, guess or 1  # low: too few
        while found is None:
            point = self.try_point(dataclasses.replace(setting, replicas=count))
            if point.meets:
                found = point
            elif count == most or point.report is None:
                return None
            else:
                low, count = count, min(2 * count, most)
        if guess:  # a better configuration than those before: most often there is none
            fewer = self.try_point(dataclasses.replace(setting, replicas=count - 1)) if count > 1 else None
            if fewer is None or not fewer.meets:
                return found
            found, count = fewer, count - 1
        while count - low > 1:
            middle = (low + count) // 2
            point = self.try_point(dataclasses.replace(setting, replicas=middle))
            if point.meets:
                found, count = point, middle
            else:
                low = middle
        return found

    def _headroom(self, setting: Setting) -> float:
        low, high = 1.0, MOST_LOAD
        for _ in range(HALVINGS):
            middle = (low * high) ** 0.5
            low, high = (middle, high) if self.try_point(setting, middle).meets else (low, middle)
        return low

    def _least_pages(self, setting: Setting) -> float:
        low, high = 0.0, 1.0
        for _ in range(HALVINGS):
            middle = (low + high) / 2
            meets = self.try_point(dataclasses.replace(setting, pages=middle)).meets
            low, high = (low, middle) if meets else (middle, high)
        return high


def share(jobs: Sequence[Job], replicas: int) -> list[Job]:
    """What the first replica gets: every k-th job, and those that follow it."""
    mine: set[Job] = set()
    heads = itertools.count()
    for job in jobs:
        if (job.after is None and next(heads) % replicas == 0) or job.after in mine:
            mine.add(job)
    return [job for job in jobs if job in mine]


def settings(devices: Sequence[int], rows: Sequence[int], chunks: Sequence[int]) -> list[Setting]:
    """All combinations; the middle ones first, since the first sets how many replicas the others have to beat."""
    def middle_first(values: Sequence[int]) -> list[int]:
        ordered = sorted(set(values))
        return sorted(ordered, key=lambda value: abs(ordered.index(value) - len(ordered) // 2))
    return [Setting(d, r, c) for d in sorted(set(devices)) for r in middle_first(rows) for c in middle_first(chunks)]
