"""Scheduler: first come, first served; chunked prefill beside decode; preemption by recomputation."""

import heapq
from collections import OrderedDict
from collections.abc import Sequence

from jinfer.errors import CapacityError, RequestError
from jinfer.kv.pool import PagePool
from jinfer.scheduler.pages import RequestPages
from jinfer.scheduler.plan import Chunk, DecodeRow, NewPage, StepPlan
from jinfer.scheduler.request import FinishReason, Request, Status


class Scheduler:
    """Decides what each step computes, and owns slots and pages of every request.

    The loop is plan(t+1), dispatch(t+1), collect(t): a row's next decode is planned before the host knows the
    token it is fed. That works because positions are known ahead: a row advances by the full number of steps
    or it ends, and what a row computes past its end is dropped.

    Slots and pages of a request that finishes, is cancelled or preempted are free at once, although a step in
    flight may still write to them: the device runs calls in the order of dispatch, and whoever gets them
    next is dispatched later, writes before it reads, and so never meets what the old owner left.

    Every active request arrived before every waiting one: admission takes the head of the queue only,
    preemption takes the last active one and puts it back at the head. So the oldest request is never evicted
    and finds room by evicting the others, in whichever page group it lacks a page, which bounds the steps of a run.
    Prompts that wait half computed for pages of a window therefore wait for older requests, never for each other.

    A step costs O(rows); neither the queue nor the pool is ever scanned.
    """

    def __init__(self, pools: Sequence[PagePool], *, max_rows: int, max_context: int, prefill_tokens: int,
                 max_chunks: int, decode_steps: int = 1):
        """Args:
          pools: where pages come from, one a page group, with pages of one size.
          max_rows: B, requests active together; they get slots 1..B.
          max_context: longest sequence, prompt and outputs.
          prefill_tokens: most prompt tokens in a step. max_chunks: most chunks in a step.
          decode_steps: tokens a decode call advances a row; at most a page, so that one new page is enough.
        """
        if min(max_rows, max_context, prefill_tokens, max_chunks, decode_steps) < 1:
            raise ValueError("every limit of a scheduler must be positive")
        if decode_steps > pools[0].page_size:
            raise ValueError(f"decode_steps {decode_steps} is more than page_size {pools[0].page_size}")
        self.pages = RequestPages(pools, decode_steps)
        self.max_rows = max_rows
        self.max_context = max_context
        self.prefill_tokens = prefill_tokens
        self.max_chunks = max_chunks
        self.decode_steps = decode_steps
        self.preemptions = 0
        # Ordered, and any member can leave in O(1): a cancelled request must not be searched for.
        self._waiting: OrderedDict[Request, None] = OrderedDict()
        self._active: list[Request] = []  # in order of arrival
        self._slots = list(range(1, max_rows + 1))  # a heap: low slots first keep the rows dense
        self._in_flight = 0  # plans dispatched and not collected

    @property
    def waiting(self) -> int:
        """Requests without slot and pages, preempted ones included."""
        return len(self._waiting)

    @property
    def running(self) -> int:
        """Requests that hold a slot."""
        return len(self._active)

    @property
    def has_work(self) -> bool:
        """Something is left to plan or to collect."""
        return bool(self._waiting or self._active or self._in_flight)

    def add(self, request: Request) -> None:
        """Queues a request.

        Raises:
          RequestError: the prompt is empty.
          CapacityError: it could not run even alone: too long for the context or for the pool.
        """
        if request.status is not Status.WAITING or request in self._waiting:
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
        self._waiting[request] = None

    def plan(self) -> StepPlan:
        """The next step, with every slot, page and position in it already given away.

        A plan that is not empty must be dispatched, and later handed to `collected`.
        """
        active = self._active
        steps = self.decode_steps
        chunks: list[Chunk] = []
        rows: list[DecodeRow] = []
        budget = self.prefill_tokens
        i = 0
        while i < len(active):  # not a `for`: preemption shortens the list, from its end
            request = active[i]
            i += 1
            if request.status is Status.PREFILLING:
                if budget and len(chunks) < self.max_chunks:
                    while not (length := self._chunk(request, budget, chunks)) and self._make_room(i):
                        pass
                    budget -= length
            else:
                position = request.computed
                ahead = request.max_position - 1 - position  # positions left to sample
                if ahead > 0:
                    stop = position + (steps if steps < ahead else ahead)
                    new = self._grow(request, stop, i) if stop > request.due else ()
                    if new is None:
                        break  # it was the latest arrival itself, so the last of the list
                    rows.append(DecodeRow(request, request.slot, position, new))
                    request.computed = stop
                    request.in_flight += 1
        reserve: list[int] | None = None
        while self._waiting and self._slots and budget and len(chunks) < self.max_chunks:
            request = next(iter(self._waiting))
            reserve = reserve or self.pages.wanted(active)
            if not self._admit(request, reserve):
                break
            budget -= self._chunk(request, budget, chunks)
        plan = StepPlan(tuple(chunks), tuple(rows), steps)
        if chunks or rows:
            self._in_flight += 1
        return plan

    def append(self, request: Request, tokens: Sequence[int]) -> None:
        """Takes the tokens kept of a collected step, also of a request that was preempted meanwhile."""
        if request.status is Status.FINISHED or request.length + len(tokens) > request.max_position:
            raise ValueError(f"request {request.id} takes no {len(tokens)} more tokens")
        request.outputs.extend(tokens)

    def collected(self, plan: StepPlan) -> None:
        """The results of a dispatched plan are in, and appended."""
        for chunk in plan.chunks:
            chunk.request.in_flight -= 1
        for row in plan.rows:
            row.request.in_flight -= 1
        if not plan.empty:
            self._in_flight -= 1

    def finish(self, request: Request, reason: FinishReason) -> None:
        """Ends a request in whatever state it is; a finished one stays as it ended.

        Results of it still in flight are the caller's to drop.
        """
        if request.status is Status.FINISHED:
            return
        if request.status is Status.WAITING:
            self._waiting.pop(request, None)
        else:
            self._active.remove(request)
            self._release(request)
        request.status = Status.FINISHED
        request.finish_reason = reason

    def cancel(self, request: Request, reason: FinishReason = "cancelled") -> None:
        """Ends a request that nobody wants any more, in whatever state it is."""
        self.finish(request, reason)

    def check(self) -> None:
        """Asserts the invariants of slots, pages and states. For tests and idle moments: O(pool)."""
        self.pages.check(self._active)
        slots = self._slots + [request.slot for request in self._active]
        assert sorted(slots) == list(range(1, self.max_rows + 1)), f"slots lost or doubled: {slots}"
        for request in self._waiting:
            assert request.status is Status.WAITING
            assert (request.slot, request.pages, request.gone, request.computed) == (0, [], [], 0)
        for request in self._active:
            if request.status is Status.PREFILLING:
                assert request.computed < request.length
            else:
                assert request.status is Status.RUNNING
                assert request.in_flight or request.length - 1 <= request.computed <= request.length
            assert request.computed <= max(len(request.prompt), request.max_position - 1)
        assert self._in_flight or not any(request.in_flight for request in self._active)

    def _admit(self, request: Request, reserve: list[int]) -> bool:
        """Gives the head of the queue a slot and the pages of all its tokens, if it may start now.

        All pages at once, but for those of a window, where that many are enough to go on with. Beyond them one page
        must be left for every request that will want another (`reserve`, by group), so that who is admitted is not
        evicted by the next page somebody needs. Nor can a request return in the plan that evicted it: that plan found
        no page free in some group, and what it gave up there is less than it asks for now. Alone, a request always
        passes (see `add`).
        """
        if request.in_flight:  # tokens in flight are part of what has to be recomputed
            return False
        if not self.pages.admit(request, reserve):
            return False
        del self._waiting[request]
        request.slot = heapq.heappop(self._slots)
        request.status = Status.PREFILLING
        self._active.append(request)
        return True

    def _chunk(self, request: Request, budget: int, chunks: list[Chunk]) -> int:
        """Plans the next chunk of a prefilling request; returns its length, 0 where no page is left for any."""
        start = request.computed
        length = self.pages.extend(request, min(request.length, start + budget), self._active) - start
        if not length:
            return 0
        final = start + length == request.length
        chunks.append(Chunk(request, request.slot, start, length, final, joins=start == 0))
        request.computed = start + length
        request.in_flight += 1
        if final:
            request.status = Status.RUNNING
        return length

    def _grow(self, request: Request, stop: int, planned: int) -> tuple[NewPage, ...] | None:
        """Pages for a decode call up to `stop`, of whoever holds them; None if it had to be evicted itself."""
        while (new := self.pages.advance(request, stop)) is None:
            if not self._make_room(planned):
                self._preempt()
                return None
        return new

    def _make_room(self, planned: int) -> bool:
        """Frees pages for the last of so many planned requests; False if no later request is left to take them from.

        What the later ones will give back in this plan comes first, then all that the latest of them has.
        """
        later = self._active[planned:]
        if later and not sum(self.pages.leave(request) for request in later):
            self._preempt()
        return bool(later)

    def _preempt(self) -> Request:
        """Evicts the latest arrival; it will compute prompt and outputs again."""
        victim = self._active.pop()
        self._release(victim)
        victim.status = Status.WAITING
        victim.preemptions += 1
        self.preemptions += 1
        self._waiting[victim] = None
        self._waiting.move_to_end(victim, last=False)
        return victim

    def _release(self, request: Request) -> None:
        """Gives slot and pages back; see the class on why that is safe with a step in flight."""
        self.pages.release(request)
        heapq.heappush(self._slots, request.slot)
        request.slot = 0
        request.computed = 0
