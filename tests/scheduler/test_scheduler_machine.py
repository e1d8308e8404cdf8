"""Random lives of many requests over a small pool; whatever happens, each gets what it would get alone."""

from random import Random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from jinfer.errors import CapacityError
from jinfer.kv import PagePool, pages_for, window_pages
from jinfer.kv.host import HostTier
from jinfer.scheduler import Request, Scheduler, Status
from jinfer.scheduler.policy import POLICIES, find_policy
from tests.scheduler.fake_device import VOCAB, Loop, Share, alone, make_choices, make_request, most_steps

WINDOWS = [(None,), (1,), (7,), (None, 8), (None, 3, 16), (5, 12)]


class SchedulerMachine(RuleBasedStateMachine):

    @initialize(page_size=st.sampled_from([1, 2, 4, 8]), windows=st.sampled_from(WINDOWS), data=st.data(),
                rows=st.integers(1, 6), prefill_tokens=st.sampled_from([1, 5, 16, 64]), max_chunks=st.integers(1, 4),
                steps=st.integers(1, 4), decode_first=st.booleans(), share=st.sampled_from([0.0, 0.0, 0.3, 1.0]),
                evictions=st.integers(0, 4), host=st.sampled_from([None, 0, 3, 12, 100]),
                policy=st.sampled_from(sorted(POLICIES)), decode_rows=st.sampled_from([None, None, 1, 3]))
    def start(self, page_size, windows, data, rows, prefill_tokens, max_chunks, steps, decode_first, share, evictions,
              host, policy, decode_rows):
        self.steps = min(steps, page_size)
        self.pools = [PagePool(data.draw(st.integers(4, 24)) + 1, page_size, window) for window in windows]
        tier = None if host is None else HostTier(host, [1 + g for g in range(len(windows))])
        self.scheduler = Scheduler(self.pools, max_rows=rows, max_context=48, prefill_tokens=prefill_tokens,
                                   max_chunks=max_chunks, decode_steps=self.steps, decode_rows=decode_rows,
                                   max_preemptions=evictions, host=tier, policy=find_policy(policy, 10.0))
        self.scheduler.estimate = Share(share)
        self.loop = Loop(self.scheduler, decode_first=decode_first)
        self.requests: list[Request] = []

    @rule(prompt=st.integers(1, 40), max_tokens=st.one_of(st.none(), st.integers(0, 40)), n=st.integers(1, 3),
          seed=st.integers(0, 99), ends=st.sampled_from([(), (0,), tuple(range(0, VOCAB, 8))]),
          host_stop=st.one_of(st.none(), st.integers(0, VOCAB - 1)), kind=st.integers(0, 3),
          priority=st.integers(-1, 2), cache=st.sampled_from([True, True, False]), salt=st.sampled_from(["", "", "a"]))
    def add(self, prompt, max_tokens, n, seed, ends, host_stop, kind, priority, cache, salt):
        tokens = [(kind + i * i) % VOCAB for i in range(prompt)]  # of one kind, all begin alike
        requests = make_choices(n, f"r{len(self.requests)}", tokens, max_tokens=max_tokens, context=48, seed=seed,
                                stop_ids=ends, arrival=self.loop.now, priority=priority, cache=cache, cache_salt=salt)
        for request in requests:
            if not self.fits(max(prompt, request.max_position - 1)):
                with pytest.raises(CapacityError):
                    self.scheduler.add(request)
                continue
            self.scheduler.add(request)
            self.requests.append(request)
            if host_stop is not None:
                self.loop.host_stops[request] = host_stop

    @rule(data=st.data())
    def again(self, data):
        """A conversation goes on: the next prompt holds what was said."""
        if not self.requests:
            return
        old = data.draw(st.sampled_from(self.requests))
        tokens = [*old.tokens(0, old.length), 7, 8, 9]
        request = make_request(f"r{len(self.requests)}", tokens[:44], max_tokens=6, context=48, seed=1,
                               arrival=self.loop.now)
        if self.fits(request.max_position - 1):
            self.scheduler.add(request)
            self.requests.append(request)

    def fits(self, positions):
        def need(pool):
            whole = pages_for(positions, pool.page_size)
            return min(whole, window_pages(pool.window, pool.page_size, self.steps) or whole)

        return all(need(pool) < pool.num_pages for pool in self.pools)

    @rule(count=st.integers(1, 6))
    def step(self, count):
        for _ in range(count):
            self.loop.step()
            self.scheduler.check()

    @rule()
    def collect(self):
        self.loop.collect()

    @rule(data=st.data())
    def cancel(self, data):
        if not self.requests:
            return
        request = self.requests[data.draw(st.integers(0, len(self.requests) - 1))]
        before = request.status, request.finish_reason
        self.scheduler.cancel(request)
        assert request.status is Status.FINISHED
        if before[0] is Status.FINISHED:
            assert request.finish_reason == before[1]

    @invariant()
    def holds(self):
        if not hasattr(self, "scheduler"):
            return
        self.scheduler.check()
        live = live_requests(self.requests)
        assert self.scheduler.waiting + self.scheduler.running == len(live)

    def teardown(self):
        if not hasattr(self, "scheduler"):
            return
        live = live_requests(self.requests)
        self.loop.run(most_steps(live, self.scheduler))
        assert all(pool.available == pool.num_pages - 1 for pool in self.pools)
        assert (self.scheduler.waiting, self.scheduler.running) == (0, 0)
        for request in self.requests:
            expected = alone(request, self.loop.host_stops.get(request), self.loop.device.sees)
            if request.finish_reason == "cancelled":
                assert request.outputs == expected[:len(request.outputs)]
            else:
                assert request.outputs == expected
            assert request.in_flight == 0
            assert request.preemptions <= self.scheduler.max_preemptions


def live_requests(requests: list[Request]) -> list[Request]:
    return [request for request in requests if request.status is not Status.FINISHED]


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(max_examples=120, stateful_step_count=50, deadline=None, derandomize=True)


@pytest.mark.parametrize("late", [True, False], ids=["late", "at once"])
@pytest.mark.parametrize("windows", [(None,), (9,), (None, 6), (None, 3, 16)], ids=str)
@pytest.mark.parametrize("seed", range(3))
def test_a_long_crowded_run(seed, windows, late):
    """Hypothesis likes short and simple lives; this one is long, and short of pages all the time."""
    random = Random(seed)
    page_size = random.choice([2, 4, 8])
    steps = random.randint(1, page_size)
    pools = [PagePool((window_pages(window, page_size, steps) or 48 // page_size) + random.randint(1, 8), page_size, window)
             for window in windows]
    scheduler = Scheduler(pools, max_rows=6, max_context=48, prefill_tokens=random.choice([4, 16, 48]),
                          max_chunks=3, decode_steps=steps)
    scheduler.estimate = Share(0.0)
    loop = Loop(scheduler, decode_first=bool(seed % 2))
    requests: list[Request] = []
    for _ in range(3000):
        operation = random.random()
        if operation < 0.15 and scheduler.waiting < 8:
            prompt = [random.randrange(VOCAB) for _ in range(random.randint(1, 30))]
            request = make_request(f"r{len(requests)}", prompt, max_tokens=random.randint(0, 30), context=48,
                                   seed=len(requests), stop_ids=random.choice([(), (0,), (1, 2)]))
            scheduler.add(request)
            requests.append(request)
        elif operation < 0.18 and requests:
            scheduler.cancel(random.choice(requests[-12:]))
        else:
            loop.step()
            if not late:
                loop.collect()
        scheduler.check()
    loop.run(most_steps(live_requests(requests), scheduler))
    assert scheduler.preemptions > (10 if windows == (None,) else 0) or len(windows) > 2
    assert all(pool.held == 0 for pool in pools)
    for request in requests:
        ended = request.finish_reason != "cancelled"
        expected = alone(request, sees=loop.device.sees)
        assert request.outputs == (expected if ended else expected[:len(request.outputs)])


def test_in_the_smallest_pools_a_long_prompt_moves_on_page_by_page():
    pools = [PagePool(1 + (window_pages(window, 3, 1) or 16), 3, window) for window in (None, 5, 9)]
    scheduler = Scheduler(pools, max_rows=2, max_context=48, prefill_tokens=64, max_chunks=2)
    loop = Loop(scheduler)
    request = make_request("long", list(range(47)), max_tokens=0, context=48)
    scheduler.add(request)
    loop.run(most_steps([request], scheduler))
    assert request.finish_reason == "length"
    assert loop.steps > 10
