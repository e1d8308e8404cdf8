"""An urgent request comes before what ranks behind it, and before nothing else."""

import pytest

from jinfer.kv import PagePool
from jinfer.scheduler import Scheduler, Status
from jinfer.scheduler.policy import Policy, fcfs, longest_prefix, priority
from tests.scheduler.fake_device import Loop, make_request

CONTEXT = 2000


def make_loop(policy: Policy, *, rows: int = 16) -> Loop:
    return Loop(Scheduler([PagePool(4000, 4)], max_rows=rows, max_context=CONTEXT, prefill_tokens=16, max_chunks=4,
                          policy=policy))


def steps_of_an_urgent_one(prompt: list[int], policy: Policy) -> float:
    """Steps from its arrival to its end, behind a long background prompt and beside many requests of middling class."""
    loop = make_loop(policy)
    scheduler = loop.scheduler
    long = make_request("long", [1] * 1200, max_tokens=2, context=CONTEXT, priority=2)
    scheduler.add(long)
    loop.step()
    urgent = make_request("urgent", prompt, max_tokens=2, context=CONTEXT, arrival=loop.now)
    scheduler.add(urgent)
    others = 0
    while urgent.status is not Status.FINISHED:
        if scheduler.waiting + scheduler.running < 8:
            others += 1
            scheduler.add(make_request(f"other-{others}", [3 + others % 50] * 45, max_tokens=2, context=CONTEXT,
                                       arrival=loop.now, priority=1))
        loop.step()
        scheduler.check()
    return loop.now - urgent.arrival


def test_prompt_tokens_go_to_the_urgent_first():
    assert steps_of_an_urgent_one([2] * 40, priority(1000.0)) <= 3 + 3
    assert steps_of_an_urgent_one([2] * 40, fcfs(1.0)) >= 1200 // 16  # in order of arrival


def test_an_urgent_one_waits_for_no_prefix_of_a_background_request():
    assert steps_of_an_urgent_one([1] * 600, priority(1000.0)) <= 600 // 16 + 4


@pytest.mark.parametrize(("policy", "evicts"), [(fcfs(60.0), False), (priority(60.0), False), (priority(2000.0), True)])
def test_a_row_is_lost_only_to_whom_the_policy_ranks_before_it(policy, evicts):
    loop = make_loop(policy, rows=1)
    old = make_request("old", [1] * 20, max_tokens=300, context=CONTEXT, priority=1)
    loop.scheduler.add(old)
    for _ in range(3):
        loop.step()
    new = make_request("new", [2] * 20, max_tokens=5, context=CONTEXT, arrival=1000.0)
    loop.scheduler.add(new)
    for _ in range(4):
        loop.step()
    assert (old.preemptions, new.status is Status.WAITING) == ((1, False) if evicts else (0, True))
    assert loop.scheduler.estimate.ratio == 0.7  # it was a row that lacked, no page: the estimate was right


def test_who_finds_no_room_is_not_looked_up_again_before_something_is_free():
    """Choosing costs a look at the prefix cache for each request at the front of the queue."""
    scheduler = Scheduler([PagePool(101, 4)], max_rows=16, max_context=400, prefill_tokens=64, max_chunks=4,
                          policy=longest_prefix(60.0), reserving=True)
    loop = Loop(scheduler)
    for i in range(12):
        scheduler.add(make_request(str(i), [i] * 100, max_tokens=200, context=400))
    while scheduler.running < 1 or scheduler.pages.pools[0].available > 50:
        loop.step()
    for _ in range(8):
        loop.step()
    looked = []
    find = scheduler.pages.sharing.find
    scheduler.pages.sharing.find = lambda request, **options: looked.append(request) or find(request, **options)
    for _ in range(20):
        assert loop.step().rows
    assert looked == []
    loop.run(5000)
    assert looked
