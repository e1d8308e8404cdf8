"""Random lives of many requests over a small pool; whatever happens, each gets what it would get alone."""

from random import Random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from jinfer.kv import PagePool, window_pages
from jinfer.scheduler import Request, Scheduler, Status
from jinfer.scheduler.policy import POLICIES
from tests.scheduler.fake_device import VOCAB, Loop, Share, alone, make_request, most_steps
from tests.scheduler.life import ENDS, WINDOWS, Life


class SchedulerMachine(RuleBasedStateMachine):

    @initialize(page_size=st.sampled_from([1, 2, 4, 8]), windows=st.sampled_from(WINDOWS), data=st.data(),
                rows=st.integers(1, 6), prefill_tokens=st.sampled_from([1, 5, 16, 64]), max_chunks=st.integers(1, 4),
                steps=st.integers(1, 4), decode_first=st.booleans(), share=st.sampled_from([0.0, 0.0, 0.3, 1.0]),
                evictions=st.integers(0, 4), host=st.sampled_from([None, 0, 3, 12, 100]),
                policy=st.sampled_from(sorted(POLICIES)), decode_rows=st.sampled_from([None, None, 1, 3]),
                step_tokens=st.sampled_from([None, None, 2, 20]), itl_target=st.sampled_from([None, 0.01]),
                keys=st.sampled_from([None, None, 5]), pair=st.booleans())
    def start(self, data, windows, **options):
        self.life = Life(windows=windows, pages=[data.draw(st.integers(4, 24)) for _ in windows], **options)

    @rule(prompt=st.integers(1, 40), max_tokens=st.one_of(st.none(), st.integers(0, 40)), n=st.integers(1, 3),
          seed=st.integers(0, 99), ends=st.sampled_from(ENDS), host_stop=st.one_of(st.none(), st.integers(0, VOCAB - 1)),
          kind=st.integers(0, 3), priority=st.integers(-1, 2), cache=st.sampled_from([True, True, False]),
          cache_salt=st.sampled_from(["", "", "a"]), timeout=st.one_of(st.none(), st.floats(0.5, 60.0)))
    def add(self, **request):
        self.life.add(**request)

    @rule(seed=st.integers(0, 99), count=st.integers(1, 6))
    def step(self, seed, count):
        for i in range(count):
            self.life.step(Random(seed + i))

    @rule()
    def collect(self):
        self.life.collect()

    @rule()
    def hand_over(self):
        for request in self.life.live():
            self.life.hand_over(request)

    @precondition(lambda self: self.life.requests)
    @rule(data=st.data(), what=st.sampled_from(["again", "restart", "pin", "cancelled", "error"]))
    def somebody(self, data, what):
        request = data.draw(st.sampled_from(self.life.requests))
        if what in ("cancelled", "error"):
            self.life.end(request, what)
        else:
            getattr(self.life, what)(request)

    @precondition(lambda self: self.life.pins)
    @rule(data=st.data())
    def unpin(self, data):
        self.life.unpin(*data.draw(st.sampled_from(self.life.pins)))

    @rule()
    def drain(self):
        self.life.drain()

    @invariant()
    def holds(self):
        if hasattr(self, "life"):
            self.life.check()

    def teardown(self):
        if hasattr(self, "life"):
            self.life.finish(Random(0))


def live_requests(requests: list[Request]) -> list[Request]:
    return [request for request in requests if request.status is not Status.FINISHED]


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(max_examples=60, stateful_step_count=50, deadline=None, derandomize=True)


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
