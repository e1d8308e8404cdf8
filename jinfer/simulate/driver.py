"""Simulator: the engine's loop around production schedulers, with a clock that jumps instead of a device."""

import dataclasses
import gc
import heapq
import math
from collections.abc import Iterable, Sequence

from jinfer.bench.jobs import Job
from jinfer.config.sampling import SamplingParams
from jinfer.errors import CapacityError, JinferError, OverloadError
from jinfer.scheduler import FinishReason, Request, Status, StepPlan, position_limit
from jinfer.scheduler.request import Given
from jinfer.simulate.recorder import Cause, Outcome, Recorder
from jinfer.simulate.track import Sent, Track
from jinfer.simulate.worker import NAN, Dispatched, Host, Worker

SAMPLE = 32  # steps: how often what costs O(rows) is looked at


@dataclasses.dataclass(frozen=True, slots=True)
class Transit:
    """A request whose pages are on their way to another worker."""

    track: Track
    tokens: int


class Simulator:
    """Runs jobs to their ends: plan the next step, dispatch it, collect the one before, as Engine.step does.

    The device works back to back; the host plans a step while the one before computes, so it learns everything one
    step late. Time passes on the host for planning, and on the device for moves, prefill and decode.

    With workers that prefill and workers that decode a request begins at one of the former; when its first token is
    known its pages go to the decode worker that expects to hold least, as Fleet does.
    """

    def __init__(self, workers: Sequence[Worker], *, host_seconds: float = 0.0, stall: float = 0.2, cache: bool = True,
                 lockstep: bool = False, transfer: float = math.inf):
        """Args:
          host_seconds: that the host takes for a step.
          stall: seconds; longer gaps between tokens are counted by their cause.
          cache: requests may use the prefix cache.
          lockstep: one loop for all workers, which waits for all their steps in each turn; else each has its own.
          transfer: bytes that may be on their way to a decode worker or wait there.
        """
        self.workers = list(workers)
        self.recorder = Recorder(stall)
        self._hosts = [Host(self.workers)] if lockstep else [Host([worker]) for worker in self.workers]
        self._host_of = {worker: host for host in self._hosts for worker in host.workers}
        self._entrances = [worker for worker in self.workers if worker.role != "decode"]
        self._exits = [worker for worker in self.workers if worker.role == "decode"]
        self._host_seconds, self._cache, self._transfer = host_seconds, cache, transfer
        self._ready: dict[Request, None] = {}  # prefilled, in order; what is not true any more is found out when asked
        self._tracks: dict[Request, Track] = {}
        self._params: dict[int, SamplingParams] = {}
        self._events: list[tuple[float, int, Job | Sent | Transit]] = []  # a heap
        self._count = self._groups = self._sent = 0
        self._following: dict[Job, list[Job]] = {}
        self._pages = sum(worker.pages for worker in self.workers)

    def run(self, jobs: Iterable[Job]) -> Recorder:
        """Sends the jobs at their times and returns what happened; a simulator runs once."""
        for job in jobs:
            self._groups = max(self._groups, job.group + 1)
            if job.after is None:
                self._at(job.time, job)
            else:
                self._following.setdefault(job.after, []).append(job)
        enabled = gc.isenabled()
        gc.disable()  # nothing here is cyclic, and the collector would walk through every request again and again
        try:
            self._loop()
        finally:
            if enabled:
                gc.enable()
        for worker in self.workers:
            self.recorder.preemptions += worker.scheduler.preemptions
            self.recorder.evictions += sum(pool.evictions for pool in worker.scheduler.pages.pools)
        return self.recorder

    def _loop(self) -> None:
        events, hosts = self._events, self._hosts
        while True:
            host = hosts[0] if len(hosts) == 1 else min(hosts, key=lambda h: math.inf if h.wake is None else h.wake)
            wake = host.wake
            if events and (wake is None or events[0][0] <= wake):
                time, _, what = heapq.heappop(events)
                self._happen(what, time)
            elif wake is not None:
                self._turn(host, wake)
            else:
                break
        if self._tracks:
            raise JinferError(f"the scheduler plans nothing although {len(self._tracks)} requests wait")

    def _turn(self, host: Host, now: float) -> None:
        """Collects what was waited for, plans and dispatches, and says how long to wait."""
        for worker in host.workers:
            if worker.before is not None:
                self._collect(worker, worker.before, now)
        host.wake, started = None, now
        for worker in host.workers:
            for request in worker.scheduler.expired(now):
                track = self._tracks.get(request)
                if track is not None:
                    self._end(track, Outcome.TIMEOUT, now)
            plan = worker.scheduler.plan(now)
            worker.before, worker.last = worker.last, None
            if not plan.empty:
                started += self._host_seconds
                worker.last = self._dispatch(worker, plan, started)
                host.wake = started
        for worker in host.workers:
            if worker.before is not None:
                host.wake = max(started, host.wake or 0.0, worker.before.end)

    def _at(self, time: float, what: Job | Sent | Transit) -> None:
        self._count += 1  # equal times keep their order
        heapq.heappush(self._events, (time, self._count, what))

    def _happen(self, what: Job | Sent | Transit, now: float) -> None:
        match what:
            case Job():
                self._send(what, now)
            case Sent():
                for track in list(what.open):
                    self._end(track, Outcome.CANCELLED, now)
            case Transit():
                self._arrive(what, now)

    def _send(self, job: Job, now: float) -> None:
        worker = self._entrances[0]
        if len(self._entrances) > 1:
            worker = min(self._entrances, key=lambda w: w.scheduler.waiting + w.scheduler.running)
        scheduler, prompt = worker.scheduler, len(job.prompt)
        service = job.service if self._cache else dataclasses.replace(job.service, cache=False)
        params = self._params.get(job.declared)
        if params is None:
            params = self._params[job.declared] = SamplingParams(max_tokens=job.declared)
        limit = max(prompt, position_limit(prompt, job.declared, scheduler.max_context))
        sent = Sent(job, now)
        self._sent += 1
        requests = [Request(f"job-{self._sent}", i, job.prompt, params, limit, arrival=now,  # type: ignore[arg-type]
                            service=service) for i in range(job.n)]
        for request in requests:
            if job.n > 1:
                request.siblings = requests
            sent.tracks.append(Track(request, sent, min(job.output, limit - prompt), (job.name + request.index,),
                                     job.group, worker))
        added: list[Request] = []
        try:
            for request in requests:
                scheduler.add(request)
                added.append(request)
        except (CapacityError, OverloadError) as error:
            for request in added:
                scheduler.finish(request, "cancelled")
            self._record(sent, Outcome.OVERLOADED if isinstance(error, OverloadError) else Outcome.REJECTED, now)
            return
        sent.open = list(sent.tracks)
        self._tracks.update(zip(requests, sent.tracks, strict=True))
        self._host_of[worker].rouse(now)
        if job.cancel_after is not None:
            self._at(now + job.cancel_after, sent)

    def _dispatch(self, worker: Worker, plan: StepPlan, now: float) -> Dispatched:
        recorder = self.recorder
        if plan.outs or plan.ins:
            for moved, name in zip(worker.link.bytes(plan), ("swapped_out", "swapped_in"), strict=True):
                if moved:
                    setattr(recorder, name, getattr(recorder, name) + moved)
                    worker.scheduler.observe_swap(moved, moved / worker.link.ranks / worker.link.rate)
        loaded = {(move.group, move.page) for move in plan.ins}
        for chunk in plan.chunks:
            recorder.prefill_tokens += chunk.length
            if chunk.joins:
                self._joined(self._tracks[chunk.request], chunk.start, loaded, now)
        step = worker.start(plan, now)
        recorder.busy += ((step.prefill or 0.0) + (step.decode or 0.0)) / len(self.workers)
        recorder.moving += step.moving / len(self.workers)
        return step

    def _joined(self, track: Track, start: int, loaded: set[tuple[int, int]], now: float) -> None:
        """It begins to be computed, behind `start` positions that were found."""
        recorder, request = self.recorder, track.request
        if math.isnan(track.scheduled):
            track.scheduled = now
            recorder.saved += start
            recorder.asked += len(request.prompt)
            return
        if request.given is not None:  # what another worker computed
            return
        recorder.recomputed += request.length - start
        if loaded and any((g, page) in loaded for g, pages in enumerate(request.pages) for page in pages):
            track.swapped = True
            recorder.returned_swapped += 1
        elif 2 * start >= request.length:
            recorder.returned_cached += 1

    def _collect(self, worker: Worker, step: Dispatched, now: float) -> None:
        """Takes the tokens of a step. The loop over rows is all that a token costs, so it calls as little as it can."""
        scheduler, tracks, recorder, plan = worker.scheduler, self._tracks, self.recorder, step.plan
        append, lookup = scheduler.append, tracks.get
        shared = now - worker.collected  # gap of every row that got a token in the step before
        before = worker.collected if plan.steps == 1 else NAN  # equal to nothing: its tokens come at once
        equal = [0] * self._groups
        done: list[Track] = []
        sampled = 0
        for chunk in plan.chunks:
            track = lookup(chunk.request)
            if track is not None and chunk.final:
                if chunk.samples:
                    sampled += 1
                    self._take(track, 1, now, step)
                if not track.left:
                    done.append(track)
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
                track.left = left = track.left - 1
            else:
                count = min(plan.steps, track.left)
                sampled += count
                self._take(track, count, now, step)
                left = track.left
            if not left:
                done.append(track)
        for group, count in enumerate(equal):
            if count:
                sampled += count
                recorder.gap(now, shared, count, group)
                if shared > recorder.stall:
                    recorder.stalls[self._cause(step, shared)] += count
        for track in done:
            self._end(track, Outcome.FINISHED, now)
        scheduler.collected(plan)
        scheduler.observe(plan, step.prefill, step.decode)
        worker.collected = now
        for received in plan.received:
            worker.coming.pop(received.request, None)
        if self._exits:
            if worker.role == "prefill":
                self._ready.update((chunk.request, None) for chunk in plan.chunks if chunk.samples)
            self._hand_over(now)
        if not len(recorder.steps.time) % SAMPLE:
            recorder.held += sum(one.held for one in self.workers) * scheduler.pages.page_size
            recorder.unfilled += sum(sum(one.scheduler.unfilled()) for one in self.workers)
        running = waiting = held = cached = 0
        for one in self.workers:
            running, waiting = running + one.scheduler.running, waiting + one.scheduler.waiting
            held, cached = held + one.held, cached + one.cached
        recorder.step(now, sum([chunk.length for chunk in plan.chunks]), len(plan.rows), sampled, running, waiting,
                      held / self._pages, cached / self._pages)

    def _take(self, track: Track, count: int, now: float, step: Dispatched) -> None:
        """Tokens of a row, with whatever came before the first of them; the others arrive with it."""
        recorder, request, worker = self.recorder, track.request, track.worker
        worker.scheduler.append(request, track.token * count)
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
                if track.moved:
                    cause = Cause.HAND_OVER
                elif request.preemptions > track.preemptions:
                    cause = Cause.SWAP_IN if track.swapped else Cause.PREEMPTION
                elif track.last != worker.collected:
                    cause = Cause.PAUSED
                recorder.stalls[cause] += 1
        track.preemptions, track.swapped, track.moved = request.preemptions, False, False
        track.last = now

    def _cause(self, step: Dispatched, gap: float) -> Cause:
        """What a gap of one step would have been short enough without; else what took most of it."""
        parts = {Cause.PREFILL: step.prefill or 0.0, Cause.MOVES: step.moving, Cause.DECODE: step.decode or 0.0}
        for cause in (Cause.PREFILL, Cause.MOVES):
            if parts[cause] and gap - parts[cause] <= self.recorder.stall:
                return cause
        return max(parts, key=lambda cause: parts[cause])

    def _hand_over(self, now: float) -> None:
        """Requests that have got their first token leave for a decode worker, in order, as far as there is room."""
        for request in list(self._ready):
            track = self._tracks.get(request)
            if track is None or request.status is not Status.RUNNING or request.in_flight:
                del self._ready[request]  # it has ended, or was preempted and will be prefilled again
                continue
            source = track.worker
            size = source.size(request)
            exits = [w for w in self._exits if not w.coming or sum(w.coming.values()) + size <= self._transfer]
            if not exits:
                break
            del self._ready[request]
            track.worker, track.moved = min(exits, key=lambda w: w.expected), True
            track.worker.coming[request] = size
            self.recorder.received += size
            there, tokens = source.send(size, track.worker, now), request.computed
            source.scheduler.withdraw(request)
            self._host_of[source].rouse(now)
            self._at(there, Transit(track, tokens))

    def _arrive(self, transit: Transit, now: float) -> None:
        track = transit.track
        if track.request in self._tracks:
            track.request.given = Given(transit.tokens, None)
            track.worker.scheduler.add(track.request, again=True)
            self._host_of[track.worker].rouse(now)

    def _end(self, track: Track, outcome: Outcome, now: float) -> None:
        """The one way a choice ends."""
        request, sent = track.request, track.sent
        reason: FinishReason = "length" if request.length == request.max_position else "stop"
        if outcome is not Outcome.FINISHED:
            reason = "timeout" if outcome is Outcome.TIMEOUT else "cancelled"
        track.worker.scheduler.finish(request, reason)
        track.worker.coming.pop(request, None)
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
        for following in self._following.pop(job, ()):
            self._at(now + following.time, following)
