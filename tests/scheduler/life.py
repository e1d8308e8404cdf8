"""Life: what may happen to the requests of a scheduler, or of a pair of them, on devices that compute nothing.

Each operation holds the scheduler against its promises: who overtakes whom, how long the first of the queue waits, and
that every request gets the tokens it would get alone. Whoever drives it, Hypothesis or a random number generator, says
what happens next.
"""

import functools
from random import Random

import pytest

from jinfer.errors import CapacityError, OverloadError
from jinfer.kv import HostTier, PagePool, pages_for, window_pages
from jinfer.scheduler import Request, Scheduler, Status
from jinfer.scheduler.policy import find_policy
from jinfer.scheduler.request import Given
from tests.scheduler.fake_device import VOCAB, Loop, Share, alone, make_choices, make_request, most_steps

CONTEXT = 48
AGEING = 10.0
ENDS = [(), (0,), tuple(range(0, VOCAB, 8))]
WINDOWS = [(None,), (1,), (7,), (None, 8), (None, 3, 16), (5, 12)]


class Life:
    """Attributes:
      loops: of each scheduler; the first of two only prefills, and hands its requests to the second.
      requests: all there ever were. pins: and whose they are.
    """

    def __init__(self, *, page_size, windows, pages, rows, prefill_tokens, max_chunks, steps, decode_first, share, evictions,
                 host, policy, decode_rows, step_tokens, itl_target, keys, pair):
        """pages: of each group. host: bytes of the host tier. keys: how many hashes there are; None is a usual hash."""
        self.steps = min(steps, page_size)
        self.policy = policy
        self.loops: list[Loop] = []
        for most in ([0, decode_rows] if pair else [decode_rows]):
            pools = [PagePool(count + 1, page_size, window) for count, window in zip(pages, windows, strict=True)]
            tier = None if host is None else HostTier(host, [1 + g for g in range(len(windows))])
            scheduler = Scheduler(
                pools, max_rows=rows, max_context=CONTEXT, prefill_tokens=prefill_tokens, max_chunks=max_chunks,
                decode_steps=self.steps, decode_rows=most, max_preemptions=evictions, host=tier,
                policy=find_policy(policy, AGEING), step_tokens=step_tokens, itl_target=itl_target)
            scheduler.estimate = Share(share)
            if keys is not None:
                scheduler.pages.index.next_key = lambda key, tokens: hash((key, tokens)) % keys
            loop = Loop(scheduler, decode_first=decode_first)
            loop.scored = functools.partial(self._pin, scheduler)
            self.loops.append(loop)
        self.requests: list[Request] = []
        self.pins: list[tuple[Scheduler, int]] = []
        self._queued = [Queued(loop) for loop in self.loops]

    @property
    def scheduler(self) -> Scheduler:
        """Where requests arrive."""
        return self.loops[0].scheduler

    @property
    def now(self) -> float:
        return self.loops[0].now

    def add(self, *, prompt, kind, max_tokens, n, seed, ends, host_stop, **service):
        """kind: prompts of one kind all begin alike."""
        tokens = [(kind + i * i) % VOCAB for i in range(prompt)]
        requests = make_choices(n, f"r{len(self.requests)}", tokens, max_tokens=max_tokens, context=CONTEXT, seed=seed,
                                stop_ids=ends, arrival=self.now, **service)
        if not self._fits(max(prompt, requests[0].max_position - 1)):
            for request in requests:
                with pytest.raises(CapacityError):
                    self.scheduler.add(request)
            return
        for request in requests:
            self.scheduler.add(request)
            self.requests.append(request)
            if host_stop is not None:
                for loop in self.loops:
                    loop.host_stops[request] = host_stop

    def again(self, old: Request):
        """A conversation goes on: the next prompt holds what was said."""
        tokens = [*old.tokens(0, old.length), 7, 8, 9]
        request = make_request(f"r{len(self.requests)}", tokens[:44], max_tokens=6, context=CONTEXT, seed=1,
                               arrival=self.now)
        if self._fits(request.max_position - 1):
            self.scheduler.add(request)
            self.requests.append(request)

    def step(self, random: Random):
        """A turn of the engine's loop; the seconds that calls took are random."""
        for queued in self._queued:
            loop, scheduler = queued.loop, queued.loop.scheduler
            for request in scheduler.expired(loop.now + 1.0):
                assert request.arrival + request.service.timeout <= loop.now + 1.0
                scheduler.finish(request, "timeout")
            assert not any(self._late(request, loop.now + 1.0) for request in [*scheduler._active, *scheduler._queue])
            queued.before()
            plan = loop.step()
            queued.after()
            if random.random() < 0.7:
                scheduler.observe(plan, random.choice([None, 0.0, random.random()]), random.choice([None, random.random()]))
                scheduler.observe_swap(random.randint(0, 10), random.random())
            scheduler.check()

    def hand_over(self, request: Request):
        """What the first of a pair has prefilled goes to the second, as soon as nothing of it is in flight."""
        if len(self.loops) == 1 or request.status is not Status.RUNNING or request.in_flight:
            return
        first, second = (loop.scheduler for loop in self.loops)
        if request not in first._active:
            return
        tokens = request.computed
        first.withdraw(request)
        request.given = Given(tokens, request.tokens(0, tokens))
        second.add(request, again=True)

    def restart(self, request: Request):
        """A request is withdrawn and begins again, with all it knows."""
        scheduler = self._home(request)
        if scheduler is None or request.in_flight:
            return
        scheduler.withdraw(request)
        request.given = None
        assert (request.slot, request.pages, request.status) == (0, [], Status.WAITING)
        self.scheduler.add(request, again=True)

    def collect(self):
        for loop in self.loops:
            loop.collect()

    def end(self, request: Request, reason):
        before = request.status, request.finish_reason
        (self._home(request) or self.scheduler).finish(request, reason)
        assert request.status is Status.FINISHED
        if before[0] is Status.FINISHED:
            assert request.finish_reason == before[1]

    def pin(self, request: Request):
        """The prefix of a request that holds no pages."""
        if not request.pages:
            self._pin(self.loops[-1].scheduler, request)

    def _pin(self, scheduler: Scheduler, request: Request):
        held = [pool.held for pool in scheduler.pages.pools]
        try:
            pin = scheduler.pin(request)
        except CapacityError:
            pin = None
        if pin is None:
            assert [pool.held for pool in scheduler.pages.pools] == held
        else:
            self.pins.append((scheduler, pin))

    def unpin(self, scheduler: Scheduler, pin: int):
        self.pins.remove((scheduler, pin))
        scheduler.unpin(pin)
        with pytest.raises(KeyError):
            scheduler.unpin(pin)

    def drain(self):
        """Nothing is taken any more, for a moment."""
        scheduler = self.scheduler
        begun = {request for request in self.requests if request.outputs or request.preemptions}
        assert set(scheduler.drain()) == set(scheduler._queue) - begun
        rejections = scheduler.rejections
        with pytest.raises(OverloadError):
            scheduler.add(make_request("late", [1], max_tokens=1, context=CONTEXT))
        assert scheduler.rejections == rejections + 1
        scheduler.draining = False

    def check(self):
        for loop in self.loops:
            loop.scheduler.check()
            self._forgets(loop.scheduler)
            assert len(loop.scheduler._timeouts) <= loop.scheduler.waiting + loop.scheduler.running
        assert sum(loop.scheduler.waiting + loop.scheduler.running for loop in self.loops) == len(self.live())

    def finish(self, random: Random):
        """Runs what is left, and looks at what everybody got."""
        bound = sum(most_steps(self.live(), loop.scheduler) for loop in self.loops) + 2
        while any(loop.scheduler.has_work for loop in self.loops):
            assert bound, "not done in time"
            bound -= 1
            self.step(random)
            for request in self.live():
                self.hand_over(request)
        for scheduler, pin in list(self.pins):
            self.unpin(scheduler, pin)
        for loop in self.loops:
            assert not any(pool.held for pool in loop.scheduler.pages.pools)
            assert (loop.scheduler.waiting, loop.scheduler.running) == (0, 0)
        self.check()
        device = self.loops[0].device
        for request in self.requests:
            expected = alone(request, self.loops[0].host_stops.get(request), device.sees)
            ended = request.finish_reason not in ("cancelled", "timeout", "error")
            assert request.outputs == (expected if ended else expected[:len(request.outputs)])
            assert request.in_flight == 0
            assert request.preemptions <= self.scheduler.max_preemptions

    def live(self) -> list[Request]:
        return [request for request in self.requests if request.status is not Status.FINISHED]

    def _home(self, request: Request) -> Scheduler | None:
        """The scheduler that has a request."""
        return next((loop.scheduler for loop in self.loops
                     if request in loop.scheduler._queue or request in loop.scheduler._active), None)

    def _fits(self, positions: int) -> bool:
        def need(pool):
            whole = pages_for(positions, pool.page_size)
            return min(whole, window_pages(pool.window, pool.page_size, self.steps) or whole)

        return all(need(pool) < pool.num_pages for pool in self.scheduler.pages.pools)

    @staticmethod
    def _late(request: Request, now: float) -> bool:
        return request.service.timeout is not None and request.arrival + request.service.timeout <= now

    def _forgets(self, scheduler: Scheduler):
        """Of those that kept what they computed to themselves nothing is left."""
        private = {request.extra for request in self.live() if not request.service.cache}
        for node in scheduler.pages.index._nodes.values():
            root = node
            while root.parent is not None:
                root = root.parent
            assert root.extra[2] is None or root.extra in private, "what was private is still known"


class Queued:
    """Who waits at a scheduler, and who is admitted past whom."""

    def __init__(self, loop: Loop):
        self.loop = loop
        self._active: set[Request] = set()
        self._passed: set[Request] = set()  # who waits a turn for a prefix in the making
        self._first: Request | None = None  # of the queue, and in how many steps it must be admitted
        self._left = 0
        waits = loop.scheduler.pages.sharing.waits

        def watched(request, found):
            answer = waits(request, found)
            if answer:
                self._passed.add(request)
            return answer

        loop.scheduler.pages.sharing.waits = watched

    def before(self):
        scheduler = self.loop.scheduler
        self._active = set(scheduler._active)
        self._passed.clear()
        if scheduler._queue.first is not self._first:
            self._first = scheduler._queue.first
            self._left = most_steps([*self._active, self._first], scheduler) if self._first else 0

    def after(self):
        """Nobody is overtaken but by whom the policy ranks before it, and the first of the queue is admitted in time."""
        scheduler = self.loop.scheduler
        admitted = [request for request in scheduler._active if request not in self._active]
        for waiting in scheduler._queue:
            if waiting in self._passed or waiting in self._active:  # it waits a turn, or was evicted just now
                continue
            for other in admitted:
                if scheduler.policy.choose is not None and self.loop.now - waiting.arrival <= AGEING and (
                        waiting.service.priority >= other.service.priority):
                    continue
                assert other.rank < waiting.rank, "somebody was overtaken"
                if scheduler.policy.name == "priority" and other.arrival > waiting.arrival:
                    classes = waiting.service.priority - other.service.priority
                    assert other.arrival - waiting.arrival <= classes * AGEING
        if self._first is not None and scheduler._queue.first is self._first and scheduler.decode_rows:
            self._left -= 1
            assert self._left, "the first of the queue is not admitted in time"
