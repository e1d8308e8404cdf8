"""Counters say what happened, and no more."""

from jinfer.kv import HostTier, PagePool
from jinfer.scheduler import Scheduler
from tests.scheduler.fake_device import Loop, Share, make_choices, make_request

S = 4


def make_loop(pages: int, *, host: HostTier | None = None, windows: tuple[int | None, ...] = (None,)) -> Loop:
    pools = [PagePool(pages, S, window) for window in windows]
    scheduler = Scheduler(pools, max_rows=4, max_context=(pages - 1) * S, prefill_tokens=64, max_chunks=4, host=host)
    scheduler.estimate = Share(0.0)
    return Loop(scheduler)


def run(loop: Loop, *requests) -> list:
    """Until they have ended; returns the plans."""
    for request in requests:
        loop.scheduler.add(request)
    plans = []
    while loop.scheduler.has_work:
        plans.append(loop.step())
    return plans


def test_what_comes_from_the_host_is_one_hit_in_all_page_groups():
    loop = make_loop(9, host=HostTier(10**6, (10, 10)), windows=(None, 16))
    for turn in range(2):
        for token in (1, 2):
            run(loop, make_request(f"{token}-{turn}", [token] * 28, max_tokens=2, context=32))
    index = loop.scheduler.pages.index
    assert index.queried == 4 * 28
    assert index.hit == index.host_hit == 2 * 24


def test_choices_that_share_a_prompt_are_no_hits():
    loop = make_loop(33)
    run(loop, *make_choices(4, "choices", [1] * 20, max_tokens=3, context=128))
    index = loop.scheduler.pages.index
    assert (index.queried, index.hit) == (20, 0)
    run(loop, *make_choices(4, "private", [1] * 20, max_tokens=3, context=128, cache=False))
    assert (index.queried, index.hit) == (20, 0)


def test_a_swap_is_a_return_with_pages_from_the_host():
    for budget, some in ((5, False), (10**6, True)):  # bytes: less than a page, plenty
        loop = make_loop(9, host=HostTier(budget, (10,)))
        plans = run(loop, *(make_request(str(i), [i + 1] * 6, max_tokens=20, context=32) for i in range(4)))
        assert loop.scheduler.preemptions > 0
        assert any(plan.ins for plan in plans) == some
        assert (loop.scheduler.swaps > 0) == some
        assert loop.scheduler.swaps <= loop.scheduler.preemptions
