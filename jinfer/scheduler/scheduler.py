"""Scheduler: ranked requests; chunked prefill beside decode; memory-aware admission and bounded preemption."""

import heapq
import math
from bisect import insort
from collections.abc import Iterator, Sequence
from operator import attrgetter

from jinfer.errors import CapacityError, ConfigError, OverloadError, RequestError
from jinfer.kv.cost import SwapCost
from jinfer.kv.host import HostTier
from jinfer.kv.pool import PagePool
from jinfer.kv.sizing import pages_for
from jinfer.scheduler.estimate import OutputEstimate
from jinfer.scheduler.pace import Pace
from jinfer.scheduler.pages import RequestPages
from jinfer.scheduler.plan import Chunk, DecodeRow, NewPage, StepPlan
from jinfer.scheduler.policy import Candidate, Policy, Snapshot, priority
from jinfer.scheduler.queue import RequestQueue
from jinfer.scheduler.request import FinishReason, Request, Status
from jinfer.scheduler.sharing import Found
from jinfer.scheduler.step_time import StepTime

RANK = attrgetter("rank")
UNDECLARED = 1024  # output tokens admission reckons with, at most, where a request names no limit but the context


class Scheduler:
    """Decides what each step computes, and owns slots and pages of every request.

    The loop is plan(t+1), dispatch(t+1), collect(t): a row's next decode is planned before the host knows the
    token it is fed. That works because positions are known ahead: a row advances by the full number of steps
    or it ends, and what a row computes past its end is dropped.

    Slots and pages of a request that finishes, is cancelled or preempted are free at once, although a step in
    flight may still write to them: the device runs calls in the order of dispatch, and whoever gets them
    next is dispatched later, writes before it reads, and so never meets what the old owner left.

    Every request has a rank, its policy's key and then the order of arrival, which never changes. The queue, the
    rows of a step and the choice of victims all follow it:
    - Admission takes the first of the queue. It may pass over those that wait a turn for a prefix in the making, and
      over nothing else: who does not fit holds up the rest, so a long prompt is not starved by short ones.
    - Who lacks a page takes those of the worst-ranked active request, its own if none is worse. So the best-ranked
      is never evicted for a page, and moves on.
    - Prompt tokens of a step go to the best-ranked, too: who waits and could be admitted does not first wait for the
      rest of a prompt that ranks behind it.
    - A waiting request may evict only rows that rank behind it and are of a strictly less urgent class, never an equal
      one.
    - After `max_preemptions` a request is protected: admitted only with all pages it can ever need kept for it, and
      never a victim again.
    So every request is evicted at most max_preemptions times, and waits at most for those that its policy lets
    overtake it (see scheduler.policy), each of which ends.

    A step costs O(rows); neither the queue nor the pool is ever scanned.
    """

    def __init__(self, pools: Sequence[PagePool], *, max_rows: int, max_context: int, prefill_tokens: int,
                 max_chunks: int, decode_steps: int = 1, decode_rows: int | None = None,
                 step_tokens: int | None = None, itl_target: float | None = None, policy: Policy | None = None,
                 reserving: bool = False, max_preemptions: int = 3, max_waiting: int | None = None,
                 host: HostTier | None = None, step_time: StepTime | None = None, swap_cost: SwapCost | None = None,
                 prefill_sizes: Sequence[int] = ()):
        """Args:
          pools: where pages come from, one a page group, with pages of one size. host: where they go when evicted.
          max_rows: B, requests active together; they get slots 1..B.
          max_context: longest sequence, prompt and outputs.
          prefill_tokens: most prompt tokens in a step. max_chunks: most chunks in a step.
          decode_steps: tokens a decode call advances a row; at most a page, so that one new page is enough.
          decode_rows: most rows of a decode call; 0 is a scheduler that only prefills.
          step_tokens: most tokens of a step, prefill and decode together.
          itl_target: seconds a step with decoding rows should take at most; prefill chunks shrink to keep it.
          policy: ranks requests. reserving: admission keeps the declared output lengths, not the expected ones.
          max_preemptions: how often a request may be evicted. max_waiting: requests the queue takes.
          prefill_sizes: that prefill calls are padded to, ascending, up to prefill_tokens; none: to no size.
          step_time, swap_cost: what steps and swaps take, to start from; they learn from `observe`.
        """
        if min(max_rows, max_context, prefill_tokens, max_chunks, decode_steps) < 1:
            raise ValueError("every limit of a scheduler must be positive")
        if decode_steps > pools[0].page_size:
            raise ValueError(f"decode_steps {decode_steps} is more than page_size {pools[0].page_size}")
        self.pages = RequestPages(pools, decode_steps, host)
        self.max_rows = max_rows
        self.max_context = max_context
        self.max_chunks = max_chunks
        self.decode_steps = decode_steps
        self.decode_rows = max_rows if decode_rows is None else min(decode_rows, max_rows)
        self.pace = Pace(prefill_tokens, step_tokens, itl_target, step_time or StepTime(), prefill_sizes)
        self.policy = policy or priority(60.0)
        self.max_preemptions = max_preemptions
        self.max_waiting = max_waiting
        self.reserving = reserving
        self.undeclared = UNDECLARED
        self.estimate = OutputEstimate(reserving)
        self.swap_cost = swap_cost or SwapCost()
        self.draining = False
        self.preemptions = self.rejections = 0
        self.swaps = 0  # returns from preemption for which pages came back from the host tier
        self._queue = RequestQueue()
        self._active: list[Request] = []  # in order of rank
        self._slots = list(range(1, max_rows + 1))  # a heap: low slots first keep the rows dense
        self._in_flight = 0  # plans dispatched and not collected
        self._stuck = False  # the last plan had nothing to compute
        self._order = 0
        self._running = 0  # active requests that decode
        self._timeouts = RequestQueue(1)  # of those that have one, by the end of their time
        self._blocked: tuple[Request | None, int, int] | None = None  # who found no room, and what must change first

    @property
    def waiting(self) -> int:
        """Requests without slot and pages, preempted ones included."""
        return len(self._queue)

    @property
    def running(self) -> int:
        """Requests that hold a slot."""
        return len(self._active)

    @property
    def has_work(self) -> bool:
        """Something is left to plan or to collect."""
        return bool(self._queue or self._active or self._in_flight)

    def add(self, request: Request, again: bool = False) -> None:
        """Queues a request; `request.arrival` counts. again: another scheduler has had it, it is not refused now.

        Raises:
          RequestError: the prompt is empty.
          CapacityError: it could not run even alone: too long for the context or for the pool.
          OverloadError: the queue is full, or the scheduler drains.
        """
        if request.status is not Status.WAITING or request in self._queue:
            raise ValueError(f"request {request.id} was added before")
        prompt = len(request.prompt)
        if not prompt:
            raise RequestError("prompt", "must hold at least one token, got none")
        if prompt > self.max_context:
            raise CapacityError("prompt", f"{prompt} tokens are more than the context of {self.max_context}")
        if prompt == self.max_context and request.params.max_tokens != 0:
            raise CapacityError("prompt", f"{prompt} tokens leave no room to generate in the context of "
                                          f"{self.max_context}")
        if not prompt <= request.max_position <= self.max_context:
            raise ValueError(f"max_position {request.max_position} is outside {prompt}..{self.max_context}")
        # The last token sampled needs no KV; the last token of a prompt does.
        self.pages.check_fits(request, max(prompt, request.max_position - 1))
        declared = self._declared(request)
        request.page_goal = min(request.page_limit, pages_for(prompt + declared, self.pages.page_size))
        if self.draining and not again:
            self.rejections += 1
            raise OverloadError("the engine drains and takes no more requests")
        if self.max_waiting is not None and len(self._queue) >= self.max_waiting and not again:
            self.rejections += 1
            raise OverloadError(f"{len(self._queue)} requests wait already, the queue takes {self.max_waiting}")
        service, self._order = request.service, self._order + 1
        request.rank = (self._key(request), self._order)
        request.protected = request.preemptions >= self.max_preemptions
        self._queue.add(request, request.rank)
        if service.timeout is not None:
            self._timeouts.add(request, (request.arrival + service.timeout, self._order))

    def plan(self, now: float) -> StepPlan:
        """The next step, with every slot, page and position in it already given away.

        A plan that is not empty must be dispatched, and later handed to `collected`. now: seconds of the clock of
        `Request.arrival`.
        """
        self.pages.begin()
        preemptions = self.preemptions
        admit, decode = self._phase(now)
        if admit and self._queue:
            self._make_way()
        active, steps = self._active, self.decode_steps
        chunks: list[Chunk] = []
        rows: list[DecodeRow] = []
        room = self.pace.decode_rows(self.decode_rows, steps) if decode else 0
        budget = self.pace.prefill_budget(min(room, self._running), steps, active)
        context = i = 0
        running, make = Status.RUNNING, tuple.__new__  # DecodeRow(..) is this, by way of a function of Python's
        while i < len(active):  # not a `for`: preemption shortens the list
            request = active[i]
            i += 1
            if request.status is running:
                position = request.computed
                ahead = request.max_position - 1 - position  # positions left to sample
                if ahead > 0 and room:
                    stop = position + (steps if steps < ahead else ahead)
                    new = self._grow(request, stop, i) if stop > request.due else ()
                    if new is None:
                        i -= 1  # it was evicted itself
                        continue
                    rows.append(make(DecodeRow, (request, request.slot, position, new)))
                    request.computed = stop
                    request.advanced = True
                    request.in_flight += 1
                    context += position
                    room -= 1
            elif budget and len(chunks) < self.max_chunks:
                while not (length := self._chunk(request, budget, chunks)) and self._make_room(request, i):
                    pass
                budget -= length
        if admit and self._queue and self.preemptions == preemptions:  # who was just evicted must not come back at once
            self._admit_waiting(now, budget, chunks)
        self.pace.context = context
        plan = StepPlan(tuple(chunks), tuple(rows), steps, *self.pages.moves())
        for chunk in chunks:  # not before: who finds these blocks must be in a later plan
            self.pages.sharing.publish(chunk.request, (chunk.start + chunk.length) // self.pages.page_size)
        self._stuck = not chunks and not rows
        if not plan.empty:
            self._in_flight += 1
        return plan

    def append(self, request: Request, tokens: Sequence[int]) -> None:
        """Takes the tokens kept of a collected step, also of a request that was preempted meanwhile."""
        outputs = request.outputs
        outputs += tokens
        length = request.prompt_tokens + len(outputs)
        if length > request.max_position or request.status is Status.FINISHED:
            del outputs[len(outputs) - len(tokens):]
            raise ValueError(f"request {request.id} takes no {len(tokens)} more tokens")
        # The last token may never have been fed; all before it were.
        if length > (request.blocks + 1) * self.pages.page_size and request.slot:
            self.pages.sharing.publish(request, (length - 1) // self.pages.page_size)

    def collected(self, plan: StepPlan) -> None:
        """The results of a dispatched plan are in, and appended."""
        for chunk in plan.chunks:
            chunk.request.in_flight -= 1
        for row in plan.rows:
            row.request.in_flight -= 1
        for received in plan.received:
            received.request.given = None
        if not plan.empty:
            self._in_flight -= 1

    def observe(self, plan: StepPlan, prefill_seconds: float | None, decode_seconds: float | None) -> None:
        """What the calls of a plan took on the device; None for one that was not made or not measured."""
        self.pace.observe(plan, prefill_seconds, decode_seconds)

    def observe_swap(self, moved: int, seconds: float) -> None:
        """So many bytes went to or came from the host tier in so many seconds."""
        self.swap_cost.observe(moved, seconds)
        host, rate = self.pages.index.host, self.pace.step_time.prefill_rate
        if host is not None and rate:
            blocks = self.max_context // self.pages.page_size // 2 + 1  # as many as a typical request may have
            worth = self.swap_cost.prefers_load(blocks * sum(host.page_bytes), blocks * self.pages.page_size / rate)
            self.pages.index.worth = worth

    def expired(self, now: float) -> list[Request]:
        """Requests whose timeout has passed, each once; the caller ends them."""
        late: list[Request] = []
        while (request := self._timeouts.first) is not None:
            if request.arrival + (request.service.timeout or 0.0) > now:
                break
            self._timeouts.remove(request)
            late.append(request)
        return late

    def drain(self) -> list[Request]:
        """Takes no more requests from now on; returns those that wait and have not begun, in no order."""
        self.draining = True
        return [request for request in self._queue if not request.outputs and not request.preemptions]

    def finish(self, request: Request, reason: FinishReason) -> None:
        """Ends a request in whatever state it is; a finished one stays as it ended.

        Results of it still in flight are the caller's to drop.
        """
        if request.status is Status.FINISHED:
            return
        self._take_out(request)
        request.status = Status.FINISHED
        request.finish_reason = reason
        self._forget(request)
        if reason == "error":
            self.pages.sharing.forget(request, 0)  # whatever made its logits no numbers must not be found by others
        request.given = None
        declared = self._declared(request)
        if reason in ("stop", "length") and declared:
            self.estimate.finished(declared, min(declared, len(request.outputs)))

    def cancel(self, request: Request, reason: FinishReason = "cancelled") -> None:
        """Ends a request that nobody wants any more, in whatever state it is."""
        self.finish(request, reason)

    def withdraw(self, request: Request) -> None:
        """Takes a request out for another scheduler to go on with; nothing of it may be in flight.

        It keeps its outputs. What it shares with its siblings stays here.
        """
        assert not request.in_flight, f"request {request.id} is in flight"
        self._take_out(request)
        self._forget(request)
        for other in request.siblings:
            other.siblings = [choice for choice in other.siblings if choice is not request]
        request.siblings, request.keys = [], []

    def pin(self, request: Request) -> int | None:
        """Keeps the full pages of a request's prompt from eviction; None if they are not in the prefix cache.

        Returns what `unpin` takes. Raises CapacityError if one request of max_context would not fit any more.
        """
        return self.pages.pin(request, self.max_context)

    def unpin(self, pin: int) -> None:
        """Raises KeyError if there is no such pin."""
        self.pages.pins.remove(pin)

    def unfilled(self) -> list[int]:
        """Positions of each page group in the pages of active requests that are not computed yet. O(rows)."""
        size, counts = self.pages.page_size, [0] * len(self.pages.pools)
        for request in self._active:
            for g, pages in enumerate(request.pages):
                counts[g] += len(pages) * size - request.computed
        return counts

    def check(self) -> None:
        """Asserts the invariants of slots, pages and states. For tests and idle moments: O(pool)."""
        self.pages.check(self._active)
        self._queue.check()
        slots = self._slots + [request.slot for request in self._active]
        assert sorted(slots) == list(range(1, self.max_rows + 1)), f"slots lost or doubled: {slots}"
        for request in self._queue:
            assert request.status is Status.WAITING
            assert (request.slot, request.pages, request.gone, request.computed) == (0, [], [], 0)
        for request in self._active:
            if request.status is Status.PREFILLING:
                assert request.computed < request.length
            else:
                assert request.status is Status.RUNNING
                assert request.in_flight or request.length - 1 <= request.computed <= request.length
            assert request.computed <= max(len(request.prompt), request.max_position - 1)
            assert request.preemptions <= self.max_preemptions
        assert self._active == sorted(self._active, key=RANK), "rows out of order"
        assert self._running == sum(request.status is Status.RUNNING for request in self._active)
        assert self._in_flight or not any(request.in_flight for request in self._active)

    def _phase(self, now: float) -> tuple[bool, bool]:
        """What the policy lets this step do: (admit, decode)."""
        if self.policy.phase is None:
            return True, True
        advanced = sum(r.status is Status.RUNNING and r.advanced for r in self._active)
        prefilling = len(self._active) - self._running
        full = self._blocked is not None and self._blocked == self._blockade(self._queue.first)
        phase = self.policy.phase(Snapshot(now, len(self._queue), prefilling, self._running, advanced, self.max_rows,
                                           full))
        # What is missing for a prompt that was begun, rows that stand still may hold.
        return phase.admit, phase.decode or self._stuck

    def _blockade(self, request: Request | None) -> tuple[Request | None, int, int]:
        """As long as this does not change, a request that found no room finds none, nor whom a policy chose instead."""
        return request, self.pages.returns, len(self._active)

    def _declared(self, request: Request) -> int:
        """Output tokens a request is taken to want at most: what it said, or what hardly any exceeds."""
        most = request.max_position - len(request.prompt)
        return min(most, self.undeclared) if request.params.max_tokens is None and not self.reserving else most

    def _candidate(self, request: Request, cached: int) -> Candidate:
        """What a policy may know of a request."""
        service, prompt = request.service, len(request.prompt)
        due = None if service.ttft_target is None else request.arrival + service.ttft_target
        return Candidate(service.priority, request.arrival, due, prompt, request.max_position - prompt, cached,
                         self.pace.prompt_seconds(prompt))

    def _key(self, request: Request) -> float:
        """What the policy ranks a request by. Raises ConfigError if the policy does not give a finite number."""
        try:
            key = self.policy.key(self._candidate(request, 0))
            finite = math.isfinite(key)
        except Exception as error:  # whatever a user's function raises
            raise ConfigError(f"policy: the key of {self.policy.name!r} failed: {error}") from error
        if not finite:
            raise ConfigError(f"policy: the key of {self.policy.name!r} must be a finite number, got {key!r}")
        return key

    def _lookup(self, now: float) -> Iterator[tuple[Request, Found]]:
        """Waiting requests in the order in which they are to be admitted, the front of the queue only."""
        front, choose = list(self._queue.front), self.policy.choose
        views = [] if choose is None else [
            self._candidate(request, self.pages.sharing.find(request, confirm=False).start) for request in front]
        while front:
            chosen = 0
            if choose is not None and len(front) > 1:
                chosen = choose(views, now)
                del views[chosen]
            request = front.pop(chosen)
            yield request, self.pages.sharing.find(request)

    def _admit_waiting(self, now: float, budget: int, chunks: list[Chunk]) -> None:
        """Admits as many as rows, pages and the budget of this step take."""
        if self._blocked == self._blockade(self._queue.first):
            return  # nothing has become free since
        lookup = self._lookup(now)
        while self._slots and budget > 0 and len(chunks) < self.max_chunks:
            request, found = next(lookup, (None, None))
            if request is None or found is None:
                return
            if request.in_flight:  # tokens in flight are part of what has to be recomputed
                return
            if self.pages.sharing.waits(request, found):
                continue
            if any(short > 0 for short in self._lacks(request, found)):
                self._blocked = self._blockade(request if self.policy.choose is None else self._queue.first)
                return
            self._admit(request, found)
            budget -= self._chunk(request, budget, chunks)

    def _lacks(self, request: Request, found: Found) -> list[int]:
        share = self.estimate.ratio if self.decode_rows else 0.0  # outputs grow elsewhere
        return self.pages.lacks(request, found, share, not self._active)

    def _admit(self, request: Request, found: Found) -> None:
        self._queue.remove(request)
        if self.pages.admit(request, found) and request.preemptions:
            self.swaps += 1
        request.slot = heapq.heappop(self._slots)
        request.status = Status.PREFILLING
        request.joined = request.advanced = False
        insort(self._active, request, key=RANK)
        self.pace.join(request)

    def _chunk(self, request: Request, budget: int, chunks: list[Chunk]) -> int:
        """Plans the next chunk of a prefilling request; returns its length, 0 where no page is left for any."""
        start = request.computed
        length = self.pages.extend(request, min(request.length, start + budget)) - start
        if not length:
            return 0
        final = start + length == request.length
        chunks.append(Chunk(request, request.slot, start, length, final, not request.joined))
        request.joined = True
        request.computed = start + length
        request.in_flight += 1
        if final:
            request.status = Status.RUNNING
            request.ready = self.pages.sharing.step
            self._running += 1
        return length

    def _grow(self, request: Request, stop: int, planned: int) -> tuple[NewPage, ...] | None:
        """Pages for a decode call up to `stop`, of whoever holds them; None if it had to be evicted itself."""
        while (new := self.pages.advance(request, stop)) is None:
            if not self._make_room(request, planned):
                self._run_short(request)
                return None
        return new

    def _make_room(self, request: Request, planned: int) -> bool:
        """Frees pages for the last of so many planned requests; False if nobody ranks behind it to take them from.

        What those will give back in this plan comes first, then all that the worst-ranked of them has.
        """
        later = self._active[planned:]
        victim = next((other for other in reversed(later) if not other.protected), None)
        if not sum(self.pages.leave(other) for other in later):
            if victim is None:
                return False
            self._run_short(victim)
        return True

    def _make_way(self) -> None:
        """Admits the first of the queue before this step's prompt tokens go to requests that rank behind it.

        Where it finds no row or no pages it takes those of less urgent classes among them.
        """
        head = self._queue.first
        assert head is not None
        if not self._active or self._active[-1].rank < head.rank or head.in_flight:
            return
        mine, choose = head.service.priority, self.policy.choose
        behind = [r for r in reversed(self._active) if r.rank > head.rank]
        victims = [r for r in behind if r.service.priority > mine and not r.protected]
        # Within a class it is not the rank alone that says who is admitted first, where a policy chooses.
        sooner = any(r.status is Status.PREFILLING for r in behind if choose is None or r.service.priority > mine)
        if not victims and (not sooner or self._blocked == self._blockade(head)):
            return
        found = self.pages.sharing.find(head)
        if self.pages.sharing.waits(head, found):
            return
        short = self._lacks(head, found)
        if self._slots and all(lack <= 0 for lack in short):
            if sooner:
                self._admit(head, found)
            return
        for g, lack in enumerate(short):  # not for nothing
            if lack > sum(len(r.pages[g]) - r.gone[g] for r in victims):
                return
        for victim in victims:
            if self._slots and all(lack <= 0 for lack in self._lacks(head, found)):
                break
            self._preempt(victim)
            found = self.pages.sharing.find(head)
        if self._slots and all(lack <= 0 for lack in self._lacks(head, found)):
            self._admit(head, found)

    def _run_short(self, victim: Request) -> None:
        """Evicts a request because more was admitted than there are pages for."""
        self._preempt(victim)
        self.estimate.preempted()

    def _preempt(self, victim: Request) -> None:
        """Evicts a request. It will compute prompt and outputs again, but for what stays cached."""
        self._active.remove(victim)
        self._release(victim)
        victim.preemptions += 1
        self.preemptions += 1
        victim.protected = victim.preemptions >= self.max_preemptions
        self._queue.add(victim, victim.rank)

    def _take_out(self, request: Request) -> None:
        if request in self._timeouts:
            self._timeouts.remove(request)
        if request.status is Status.WAITING:
            if request in self._queue:
                self._queue.remove(request)
        elif request.status is not Status.FINISHED:
            self._active.remove(request)
            self._release(request)

    def _forget(self, request: Request) -> None:
        """Nobody will look for what a request that has left kept to itself; siblings still want the prompt."""
        if not request.service.cache:
            wanted = any(other is not request and other.status is not Status.FINISHED for other in request.siblings)
            self.pages.sharing.forget(request, len(request.prompt) // self.pages.page_size if wanted else 0)

    def _release(self, request: Request) -> None:
        """Gives slot and pages back; see the class on why that is safe with a step in flight."""
        if request.status is Status.RUNNING:
            self._running -= 1
        self.pages.release(request)
        heapq.heappush(self._slots, request.slot)
        request.slot = request.computed = 0
        request.status = Status.WAITING
        self.pace.leave(request)
