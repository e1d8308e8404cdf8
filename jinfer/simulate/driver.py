"""Simulator: the engine's loop around the production scheduler, with a clock that jumps instead of a device."""

import dataclasses
import gc
import heapq
import math
from collections.abc import Iterable

from jinfer.bench.jobs import Job
from jinfer.config.sampling import SamplingParams
from jinfer.errors import CapacityError, JinferError, OverloadError
from jinfer.scheduler import Request, Scheduler, StepPlan, position_limit
from jinfer.simulate.cost import Link, StepTime
from jinfer.simulate.recorder import Cause, Outcome, Recorder

NAN = float("nan")


@dataclasses.dataclass(slots=True, eq=False)
class Track:
    """What is known of a request beyond what the scheduler knows: its future, and its past.

    Attributes:
      left: tokens it will still sample. token: what they are. last: when it got one. first: when the first.
      worst: longest gap. preemptions: of the request, when it last got a token. swapped: since then.
    """

    request: Request
    sent: "Sent"
    left: int
    token: tuple[int]
    group: int
    last: float = NAN
    first: float = NAN
    scheduled: float = NAN
    worst: float = 0.0
    preemptions: int = 0
    swapped: bool = False


@dataclasses.dataclass(slots=True, eq=False)
class Sent:
    """A job that was sent, and its choices that have not ended."""

    job: Job
    arrival: float
    open: list[Track]
    tracks: list[Track]


@dataclasses.dataclass(frozen=True, slots=True)
class Dispatched:
    plan: StepPlan
    end: float
    prefill: float | None
    decode: float | None
    moving: float


class Simulator:
    """Runs jobs to their ends: plan the next step, dispatch it, collect the one before, as Engine.step does.

    The device works back to back; the host plans a step while the one before computes, so it learns everything one
    step late. Time passes on the host for planning, and on the device for moves, prefill and decode.
    """

    def __init__(self, scheduler: Scheduler, cost: StepTime, link: Link, *, host_seconds: float = 0.0,
                 stall: float = 0.2, cache: bool = True, ranks: int = 1):
        """Args:
          host_seconds: that the host takes for a step.
          stall: seconds; longer gaps between tokens are counted by their cause.
          cache: requests may use the prefix cache. ranks: devices, each with its part of every page.
        """
        self.scheduler = scheduler
        self.recorder = Recorder(stall)
        self._cost, self._link, self._host = cost, link, host_seconds
        self._cache, self._ranks = cache, ranks
        self._tracks: dict[Request, Track] = {}
        self._params: dict[int, SamplingParams] = {}
        self._events: list[tuple[float, int, Job | Sent]] = []  # a heap: jobs to come, jobs to be cancelled
        self._count = self._groups = 0
        self._waiting_for: dict[Job, list[Job]] = {}
        self._collected = NAN  # when the last step's tokens were known
        pools = scheduler.pages.pools
        self._pages = sum(pool.num_pages - 1 for pool in pools)

    def run(self, jobs: Iterable[Job]) -> Recorder:
        """Sends the jobs at their times and returns what happened; a simulator runs once."""
        for job in jobs:
            self._groups = max(self._groups, job.group + 1)
            if job.after is None:
                self._at(job.time, job)
            else:
                self._waiting_for.setdefault(job.after, []).append(job)
        enabled = gc.isenabled()
        gc.disable()  # nothing here is cyclic, and the collector would walk through every request again and again
        try:
            self._loop()
        finally:
            if enabled:
                gc.enable()
        self.recorder.preemptions = self.scheduler.preemptions
        self.recorder.evictions = sum(pool.evictions for pool in self.scheduler.pages.pools)
        return self.recorder

    def _loop(self) -> None:
        scheduler, events = self.scheduler, self._events
        now = free = 0.0  # free: when the device is done with what was dispatched
        pending: Dispatched | None = None
        while True:
            while events and events[0][0] <= now:
                self._happen(*heapq.heappop(events), now)
            for request in scheduler.expired(now):
                self._end(self._tracks[request], Outcome.TIMEOUT, now)
            plan = scheduler.plan(now)
            dispatched = None
            if not plan.empty:
                now += self._host
                dispatched = self._dispatch(plan, now, free)
                free = dispatched.end
            if pending is not None:
                now = max(now, pending.end)
                self._collect(pending, now)
            elif dispatched is None:
                if not events:
                    break
                now = events[0][0]
            pending = dispatched
        if self._tracks:
            raise JinferError(f"the scheduler plans nothing although {len(self._tracks)} requests wait")

    def _at(self, time: float, what: Job | Sent) -> None:
        self._count += 1  # equal times keep their order
        heapq.heappush(self._events, (time, self._count, what))

    def _happen(self, time: float, _: int, what: Job | Sent, now: float) -> None:
        if isinstance(what, Sent):
            for track in list(what.open):
                self._end(track, Outcome.CANCELLED, now)
        else:
            self._send(what, time)

    def _send(self, job: Job, arrival: float) -> None:
        scheduler, prompt = self.scheduler, len(job.prompt)
        service = job.service if self._cache else dataclasses.replace(job.service, cache=False)
        params = self._params.get(job.declared)
        if params is None:
            params = self._params[job.declared] = SamplingParams(max_tokens=job.declared)
        limit = max(prompt, position_limit(prompt, job.declared, scheduler.max_context))
        sent = Sent(job, arrival, [], [])
        requests = [Request(str(self._count), i, job.prompt, params, limit, arrival=arrival,  # type: ignore[arg-type]
                            service=service) for i in range(job.n)]
        if job.n > 1:
            for request in requests:
                request.siblings = requests
        for request in requests:
            output = min(job.output, limit - prompt)
            sent.tracks.append(Track(request, sent, output, (job.name + request.index,), job.group))
        added: list[Request] = []
        try:
            for request in requests:
                scheduler.add(request)
                added.append(request)
        except (CapacityError, OverloadError) as error:
            for request in added:
                scheduler.finish(request, "cancelled")
            outcome = Outcome.OVERLOADED if isinstance(error, OverloadError) else Outcome.REJECTED
            self._record(sent, outcome, arrival)
            return
        sent.open = list(sent.tracks)
        self._tracks.update(zip(requests, sent.tracks, strict=True))
        if job.cancel_after is not None:
            self._at(arrival + job.cancel_after, sent)

    def _dispatch(self, plan: StepPlan, now: float, free: float) -> Dispatched:
        recorder, tracks = self.recorder, self._tracks
        start, moving = self._link.start(plan, now, free)
        if plan.outs or plan.ins:
            out, coming = self._link.bytes(plan)
            recorder.swapped_out += out * self._ranks
            recorder.swapped_in += coming * self._ranks
            for moved in filter(None, (out, coming)):
                self.scheduler.observe_swap(moved * self._ranks, moved / self._link.rate)
        loaded = {(move.group, move.page) for move in plan.ins}
        for chunk in plan.chunks:
            recorder.prefill_tokens += chunk.length
            if chunk.joins:
                self._joined(tracks[chunk.request], chunk.start, loaded, now)
        prefill = self._cost.prefill(plan.chunks) if plan.chunks else None
        decode = self._cost.decode(plan.rows, plan.steps) if plan.rows else None
        computing = (prefill or 0.0) + (decode or 0.0)
        recorder.busy += computing
        recorder.moving += moving
        return Dispatched(plan, start + computing, prefill, decode, moving)

    def _joined(self, track: Track, start: int, loaded: set[tuple[int, int]], now: float) -> None:
        """It begins to be computed, behind `start` positions that were found."""
        recorder, request = self.recorder, track.request
        if math.isnan(track.scheduled):
            track.scheduled = now
            recorder.saved += start
            recorder.asked += len(request.prompt)
            return
        recorder.recomputed += request.length - start
        if loaded and any((g, page) in loaded for g, pages in enumerate(request.pages) for page in pages):
            track.swapped = True
            recorder.returned_swapped += 1
        elif 2 * start >= request.length:
            recorder.returned_cached += 1

    def _collect(self, step: Dispatched, now: float) -> None:
        """Takes the tokens of a step. The loop over rows is all that a token costs, so it calls as little as it can."""
        scheduler, tracks, recorder, plan = self.scheduler, self._tracks, self.recorder, step.plan
        append, lookup = scheduler.append, tracks.get
        before = self._collected
        shared = now - before  # gap of every row that got a token in the step before
        equal = [0] * self._groups
        done: list[Track] = []
        sampled = 0
        for chunk in plan.chunks:
            if chunk.final:
                track = lookup(chunk.request)
                if track is not None:
                    if chunk.samples:
                        sampled += 1
                        self._take(track, 1, now, step)
                    if not track.left:
                        done.append(track)
        if plan.steps == 1:
            for row in plan.rows:
                request = row.request
                track = lookup(request)
                if track is None:  # it ended after it was planned
                    continue
                if track.last == before:
                    append(request, track.token)
                    track.last = now
                    if shared > track.worst:
                        track.worst = shared
                    equal[track.group] += 1
                    left = track.left = track.left - 1
                    if not left:
                        done.append(track)
                else:
                    sampled += 1
                    self._take(track, 1, now, step)
                    if not track.left:
                        done.append(track)
        else:
            for row in plan.rows:
                track = lookup(row.request)
                if track is not None:
                    sampled += min(plan.steps, track.left)
                    self._take(track, min(plan.steps, track.left), now, step)
                    if not track.left:
                        done.append(track)
        for group, count in enumerate(equal):
            if not count:
                continue
            sampled += count
            recorder.gap(now, shared, count, group)
            if shared > recorder.stall:
                recorder.stalls[self._cause(step, shared)] += count
        for track in done:
            self._end(track, Outcome.FINISHED, now)
        scheduler.collected(plan)
        scheduler.observe(plan, step.prefill, step.decode)
        self._collected = now
        held = cached = 0
        for pool in scheduler.pages.pools:
            held += pool.held
            cached += pool.cached
        recorder.step(now, sum([chunk.length for chunk in plan.chunks]), len(plan.rows), sampled, scheduler.running,
                      scheduler.waiting, (held / self._pages, cached / self._pages))

    def _take(self, track: Track, count: int, now: float, step: Dispatched) -> None:
        """Tokens of a row, with whatever came before the first of them; the others arrive with it."""
        recorder, request = self.recorder, track.request
        self.scheduler.append(request, track.token * count)
        track.left -= count
        rest = count
        if math.isnan(track.first):
            track.first = track.last = now
            rest -= 1
        if rest:
            gap = now - track.last
            recorder.gap(now, gap, 1, track.group)
            if rest > 1:
                recorder.gap(now, 0.0, rest - 1, track.group)
            track.worst = max(track.worst, gap)
            if gap > recorder.stall:
                cause = self._cause(step, gap)
                if request.preemptions > track.preemptions:
                    cause = Cause.SWAP_IN if track.swapped else Cause.PREEMPTION
                elif gap > 1.5 * (now - self._collected) and not math.isnan(self._collected):
                    cause = Cause.PAUSED
                recorder.stalls[cause] += 1
        track.preemptions, track.swapped = request.preemptions, False
        track.last = now

    def _cause(self, step: Dispatched, gap: float) -> Cause:
        """What a gap of one step would have been short enough without; else what took most of it."""
        parts = {Cause.PREFILL: step.prefill or 0.0, Cause.MOVES: step.moving, Cause.DECODE: step.decode or 0.0}
        for cause in (Cause.PREFILL, Cause.MOVES):
            if parts[cause] and gap - parts[cause] <= self.recorder.stall:
                return cause
        return max(parts, key=lambda cause: parts[cause])

    def _end(self, track: Track, outcome: Outcome, now: float) -> None:
        """The one way a choice ends."""
        request, sent = track.request, track.sent
        reason = {Outcome.TIMEOUT: "timeout", Outcome.CANCELLED: "cancelled"}.get(outcome)
        if reason is None:
            reason = "length" if request.length == request.max_position else "stop"
        self.scheduler.finish(request, reason)  # type: ignore[arg-type]
        del self._tracks[request]
        sent.open.remove(track)
        if not sent.open:
            self._record(sent, outcome, now)

    def _record(self, sent: Sent, outcome: Outcome, now: float) -> None:
        first, job = sent.tracks[0], sent.job
        gaps = len(first.request.outputs) - 1
        self.recorder.job(
            job, outcome, arrival=sent.arrival, queue=first.scheduled - sent.arrival, ttft=first.first - sent.arrival,
            e2e=now - sent.arrival, itl=(first.last - first.first) / gaps if gaps > 0 else NAN,
            worst=max(track.worst for track in sent.tracks),
            tokens=sum(len(track.request.outputs) for track in sent.tracks))
        for following in self._waiting_for.pop(job, ()):
            self._at(now + following.time, following)
