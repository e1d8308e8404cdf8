"""The rules of the scheduler one by one, and the cases of length limits, preemption and cancellation."""

import pytest

from jinfer.errors import CapacityError, RequestError
from jinfer.kv import PagePool
from jinfer.scheduler import DecodeRow, Request, Scheduler, Status, position_limit
from jinfer.scheduler.policy import find_policy
from tests.scheduler.fake_device import Loop, Share, alone, make_request, most_steps

CONTEXT = 256


def make(pages=64, page_size=8, windows=(), share=0.0, **limits) -> tuple[Scheduler, Loop]:
    """windows: (pages, window) of each page group; none means one group of `pages` that sees everything.

    share: of what requests may still take, the part that admission reserves.
    """
    options = {"max_rows": 8, "max_context": CONTEXT, "prefill_tokens": 64, "max_chunks": 8} | limits
    pools = [PagePool(count + 1, page_size, window) for count, window in windows or [(pages, None)]]
    scheduler = Scheduler(pools, **options)
    scheduler.estimate = Share(share)
    return scheduler, Loop(scheduler)


def prompt_of(length: int, salt: int = 0) -> list[int]:
    return [(salt * 7 + i * i + i) % 64 for i in range(length)]


def queue(scheduler: Scheduler, lengths, max_tokens=10, **options) -> list[Request]:
    requests = [make_request(f"r{i}", prompt_of(length, i), max_tokens=max_tokens,
                             context=scheduler.max_context, seed=i, **options)
                for i, length in enumerate(lengths)]
    for request in requests:
        scheduler.add(request)
    return requests


def finish_all(scheduler: Scheduler, loop: Loop, requests: list[Request]) -> None:
    loop.run(most_steps(requests, scheduler))
    for request in requests:
        assert request.outputs == alone(request, sees=loop.device.sees)
        assert request.status is Status.FINISHED
    assert not any(pool.held for pool in scheduler.pages.pools)


# Limits of length


@pytest.mark.parametrize(("prompt", "max_tokens", "context", "limit"), [
    (10, 5, 256, 15), (10, 0, 256, 10), (10, None, 256, 256), (250, 10, 256, 256), (255, 1, 256, 256)])
def test_position_limit(prompt, max_tokens, context, limit):
    assert position_limit(prompt, max_tokens, context) == limit


def test_empty_prompt_is_refused():
    scheduler, _ = make()
    with pytest.raises(RequestError, match="prompt: must hold at least one token"):
        scheduler.add(make_request("r", [], max_tokens=4, context=CONTEXT))
    assert not scheduler.has_work


@pytest.mark.parametrize(("length", "max_tokens", "produced"),
                         [(1, 16, 16), (255, 1, 1), (255, 50, 1), (250, None, 6)])
def test_prompts_up_to_the_context(length, max_tokens, produced):
    scheduler, loop = make()
    requests = queue(scheduler, [length], max_tokens)
    finish_all(scheduler, loop, requests)
    assert len(requests[0].outputs) == produced
    assert requests[0].finish_reason == "length"


@pytest.mark.parametrize("length", [256, 257, 300])
def test_prompt_that_fills_the_context_is_refused_with_both_numbers(length):
    scheduler, loop = make()
    request = make_request("r", prompt_of(length), max_tokens=1, context=CONTEXT)
    with pytest.raises(CapacityError, match=rf"prompt: {length} tokens .* context of 256") as error:
        scheduler.add(request)
    assert error.value.field == "prompt"
    finish_all(scheduler, loop, queue(scheduler, [9]))  # the next request still works


def test_prompt_that_fills_the_context_can_be_scored():
    scheduler, loop = make()
    (request,) = queue(scheduler, [256], max_tokens=0)
    finish_all(scheduler, loop, [request])
    assert request.outputs == []


def test_request_larger_than_the_pool_is_refused_with_both_numbers():
    scheduler, loop = make(pages=4)
    # 32 positions; the last token sampled needs none: 20 + 13 fits, 20 + 14 does not
    with pytest.raises(CapacityError, match="max_tokens: 20 prompt tokens and up to 14 more need 5 KV "
                                            "pages of 8 tokens, the pool has 4"):
        queue(scheduler, [20], max_tokens=14)
    with pytest.raises(CapacityError, match=r"prompt: 33 prompt tokens .* need 5 KV pages .* has 4"):
        queue(scheduler, [33], max_tokens=0)
    assert not scheduler.has_work
    for length, max_tokens in ((20, 13), (32, 1), (32, 0), (1, 32)):
        requests = queue(scheduler, [length], max_tokens)
        finish_all(scheduler, loop, requests)


def test_a_request_is_added_once():
    scheduler, _ = make()
    (request,) = queue(scheduler, [4])
    with pytest.raises(ValueError, match="added before"):
        scheduler.add(request)


@pytest.mark.parametrize("name", ["max_rows", "max_context", "prefill_tokens", "max_chunks", "decode_steps"])
def test_limits_must_be_positive(name):
    with pytest.raises(ValueError, match="positive"):
        make(**{name: 0})


def test_decode_steps_fit_a_page():
    with pytest.raises(ValueError, match="decode_steps 9 is more than page_size 8"):
        make(decode_steps=9)


# The shape of plans


def test_a_long_prompt_is_cut_beside_decode_rows():
    scheduler, loop = make(prefill_tokens=16)
    short, long = queue(scheduler, [10, 40])
    first = loop.step()
    assert [(c.request, c.start, c.length, c.final) for c in first.chunks] == [
        (short, 0, 10, True), (long, 0, 6, False)]
    assert first.rows == ()
    second = loop.step()  # decodes a token the host has not seen
    assert [(c.request, c.start, c.length, c.final) for c in second.chunks] == [(long, 6, 16, False)]
    assert second.rows == (DecodeRow(short, short.slot, 10),)
    third, fourth = loop.step(), loop.step()
    assert [(c.start, c.length, c.final) for c in third.chunks + fourth.chunks] == [
        (22, 16, False), (38, 2, True)]
    assert [r.request for r in loop.step().rows] == [short, long]
    finish_all(scheduler, loop, [short, long])


def test_chunks_and_rows_are_limited():
    scheduler, loop = make(max_chunks=2, max_rows=3, prefill_tokens=1000)
    requests = queue(scheduler, [5] * 5, max_tokens=3)
    assert [c.request for c in loop.step().chunks] == requests[:2]
    assert [c.request for c in loop.step().chunks] == requests[2:3]  # no slot for the fourth
    assert (scheduler.waiting, scheduler.running) == (2, 3)
    finish_all(scheduler, loop, requests)
    assert loop.started == requests


def test_a_row_takes_a_page_when_it_crosses_into_it():
    scheduler, loop = make(page_size=8, decode_steps=4)
    (request,) = queue(scheduler, [7], max_tokens=20)
    loop.step()
    assert [len(pages) for pages in request.pages] == [1]
    (row,) = loop.step().rows  # writes positions 7..10
    assert (row.position, row.new_pages) == (7, ((0, 1, request.pages[0][1]),))
    (row,) = loop.step().rows  # 11..14
    assert (row.position, row.new_pages) == (11, ())
    (row,) = loop.step().rows  # 15..18
    assert (row.position, row.new_pages) == (15, ((0, 2, request.pages[0][2]),))
    finish_all(scheduler, loop, [request])


def test_no_page_for_the_last_token_and_no_row_past_it():
    scheduler, loop = make(page_size=8, decode_steps=8)
    (request,) = queue(scheduler, [7], max_tokens=2)  # positions 7 and 8; only 7 is written
    loop.step()
    (row,) = loop.step().rows
    assert (row.position, row.new_pages) == (7, ())
    assert loop.scheduler.plan(loop.now).empty  # everything it may sample is dispatched
    finish_all(scheduler, loop, [request])
    assert request.page_limit == 1


def test_an_end_token_seen_late_does_no_harm():
    scheduler, loop = make(max_rows=2)
    requests = queue(scheduler, [5, 6, 7, 8], max_tokens=50, stop_ids=tuple(range(0, 64, 5)))
    finish_all(scheduler, loop, requests)
    assert {r.finish_reason for r in requests} == {"stop"}


def test_scoring_ends_with_its_last_chunk():
    scheduler, loop = make(prefill_tokens=16)
    (request,) = queue(scheduler, [40], max_tokens=0)
    plans = [loop.step() for _ in range(3)]
    assert [c.final for p in plans for c in p.chunks] == [False, False, True]
    assert not any(c.samples for p in plans for c in p.chunks)
    assert loop.step().empty
    assert request.finish_reason == "length"
    assert not scheduler.has_work


def test_choices_are_requests_of_one_id():
    scheduler, loop = make()
    prompt = prompt_of(9)
    choices = [make_request("r", prompt, max_tokens=12, context=CONTEXT, seed=s, index=s) for s in range(4)]
    for choice in choices:
        scheduler.add(choice)
    finish_all(scheduler, loop, choices)
    assert len({tuple(choice.outputs) for choice in choices}) == 4


def test_append_refuses_more_than_was_asked_for():
    scheduler, loop = make()
    (request,) = queue(scheduler, [5], max_tokens=2)
    loop.step()
    with pytest.raises(ValueError, match="takes no 3 more"):
        scheduler.append(request, [1, 2, 3])


# Memory


def test_admission_leaves_a_page_for_every_row_that_grows():
    scheduler, loop = make(pages=6, page_size=8, prefill_tokens=1000)
    first, second = queue(scheduler, [8, 15], max_tokens=9)
    third = make_request("third", prompt_of(16), max_tokens=1, context=CONTEXT)
    scheduler.add(third)
    # first: 1 page, second: 2; third needs 2 more and never another, but the others will want one each
    assert [c.request for c in loop.step().chunks] == [first, second]
    assert third.status is Status.WAITING
    finish_all(scheduler, loop, [first, second, third])
    assert scheduler.preemptions == 0


def test_the_head_of_the_queue_is_not_overtaken():
    scheduler, loop = make(pages=6, page_size=8)
    running, big, small = queue(scheduler, [16, 40, 1], max_tokens=2)
    loop.step()
    assert (running.status, big.status, small.status) == (Status.RUNNING, Status.WAITING, Status.WAITING)
    finish_all(scheduler, loop, [running, big, small])
    assert loop.started == [running, big, small]


def test_the_latest_arrival_is_preempted_and_resumes_at_the_head():
    scheduler, loop = make(pages=7, page_size=8)
    old, young, queued = queue(scheduler, [15, 15, 15], max_tokens=30)
    while not scheduler.preemptions:
        loop.step()
    assert (old.preemptions, young.preemptions) == (0, 1)
    assert (young.status, young.slot, young.pages, young.computed) == (Status.WAITING, 0, [], 0)
    assert young.in_flight == 0  # collected at the end of that step
    assert young.outputs  # what was in flight still counts
    resumed = []
    while not resumed:
        resumed = loop.step().chunks
    assert resumed[0].request is young
    assert resumed[0].start + resumed[0].length == young.length
    assert resumed[0].start <= 16  # the full pages it had, as far as nobody took them
    finish_all(scheduler, loop, [old, young, queued])


def test_a_preempted_request_waits_for_its_tokens_in_flight():
    scheduler, loop = make(pages=4, page_size=8)
    old, young = queue(scheduler, [8, 8], max_tokens=17)
    while not scheduler.preemptions:
        held = loop.step()
    assert young.status is Status.WAITING
    scheduler.cancel(old)  # room for all, but suppose its last tokens were not read yet
    young.in_flight = 1
    assert scheduler.plan(loop.now).empty
    young.in_flight = 0
    assert held.rows
    finish_all(scheduler, loop, [young])


def test_preemption_does_not_change_outputs():
    """Case C18: page 8, 20 pages, eight requests of 24-40 prompt and 60 output tokens, staggered."""
    scheduler, loop = make(pages=19, page_size=8, max_rows=8)
    requests = [make_request(f"r{i}", prompt_of(24 + (i * 5) % 17, i), max_tokens=60, context=CONTEXT, seed=i)
                for i in range(8)]
    for request in requests:
        scheduler.add(request)
        loop.step()
    finish_all(scheduler, loop, requests)
    assert scheduler.preemptions == sum(r.preemptions for r in requests) > 0
    assert requests[0].preemptions == 0
    assert loop.started == requests
    assert loop.steps <= most_steps(requests, scheduler)


def test_requests_that_each_need_the_whole_pool_run_one_after_another():
    scheduler, loop = make(pages=5, page_size=4, decode_steps=3)
    requests = queue(scheduler, [1, 2, 3, 4, 5], max_tokens=16)
    finish_all(scheduler, loop, requests)
    assert scheduler.pages.pools[0].peak == 5


# Windows (positions of pages: 8; a window of 10 and a step touch 3 of them at most)


def test_a_prompt_longer_than_the_pool_goes_through_a_window():
    scheduler, loop = make(windows=[(4, 10)])
    (request,) = queue(scheduler, [100], max_tokens=30)
    first, second = loop.step(), loop.step()
    assert [(c.start, c.length) for c in first.chunks + second.chunks] == [(0, 32), (32, 16)]  # 23..31 stay: 2 pages
    finish_all(scheduler, loop, [request])
    assert scheduler.pages.pools[0].peak == 4


def test_a_page_is_given_back_before_the_first_call_that_does_not_see_it():
    scheduler, loop = make(windows=[(8, 10)])
    (request,) = queue(scheduler, [15], max_tokens=20)
    loop.step()
    held = {}
    while not request.outputs or request.length < 30:
        (row,) = loop.step().rows
        held[row.position] = [bool(page) for page in request.pages[0]]
    assert held[16] == [True, True, True]  # sees 7..16
    assert held[17] == [False, True, True]  # sees 8..17
    assert held[24] == [False, True, True, True]
    assert held[25] == [False, False, True, True]
    finish_all(scheduler, loop, [request])


def test_groups_that_see_everything_keep_their_pages_beside_a_window():
    scheduler, loop = make(windows=[(20, None), (6, 10)])
    requests = queue(scheduler, [60, 30], max_tokens=20)
    while loop.step() and requests[0].length < 75:
        pass
    assert [sum(map(bool, pages)) for pages in requests[0].pages] == [10, 2]
    finish_all(scheduler, loop, requests)


def test_a_window_refuses_what_never_fits_and_nothing_else():
    scheduler, loop = make(windows=[(64, None), (2, 10)])
    with pytest.raises(CapacityError, match=r"max_tokens: 9 prompt tokens and up to 20 more need 3 KV pages of 8 tokens "
                                            r"at once for a window of 10, the pool has 2"):
        queue(scheduler, [9], max_tokens=20)
    with pytest.raises(CapacityError, match="prompt: 20 prompt tokens"):
        queue(scheduler, [20], max_tokens=0)
    finish_all(scheduler, loop, queue(scheduler, [9], max_tokens=8))  # never a third page


def test_half_computed_prompts_wait_for_older_ones_only():
    """Two prompts share the pages of a window: the older one takes what it needs, the younger one the rest."""
    scheduler, loop = make(windows=[(7, 10)], prefill_tokens=32)
    requests = queue(scheduler, [200, 200], max_tokens=3)
    finish_all(scheduler, loop, requests)
    assert loop.steps <= most_steps(requests, scheduler)


def test_what_a_later_request_gives_back_anyway_comes_before_preemption():
    scheduler, loop = make(windows=[(9, 10)], prefill_tokens=40)
    old = queue(scheduler, [15], max_tokens=12)
    for _ in range(2):
        loop.step()  # it writes 15
    young = make_request("young", prompt_of(90, 3), max_tokens=1, context=CONTEXT)
    scheduler.add(young)
    loop.step()  # 16 needs a third page; the young one's first chunk takes all others
    while old[0].status is not Status.FINISHED:
        loop.step()
    finish_all(scheduler, loop, [*old, young])
    assert scheduler.preemptions == 0


# Cancellation (case C19)


def cancelled_in(state: str, scheduler: Scheduler, loop: Loop) -> Request:
    """Brings a request into a state and cancels it there."""
    if state == "preempted":
        older, request = queue(scheduler, [9, 50], max_tokens=60)
        while not request.preemptions:
            loop.step()
        assert request.status is Status.WAITING
        scheduler.cancel(request)
        scheduler.cancel(older)
        return request
    (request,) = queue(scheduler, [100], max_tokens=100)
    if state == "waiting":
        pass
    elif state == "prefilling":
        loop.step()
        assert request.status is Status.PREFILLING
    elif state == "first token in flight":
        loop.step()
        loop.step()
        assert request.status is Status.RUNNING
        assert request.in_flight
    elif state == "decoding":
        while len(request.outputs) < 5:
            loop.step()
        assert request.in_flight
    elif state == "finished":
        loop.run(200)
    scheduler.cancel(request)
    return request


STATES = ["waiting", "prefilling", "first token in flight", "decoding", "preempted", "finished"]


@pytest.mark.parametrize("state", STATES)
def test_cancel_in_every_state_gives_everything_back(state):
    scheduler, loop = make(pages=14 if state == "preempted" else 25)
    request = cancelled_in(state, scheduler, loop)
    assert request.finish_reason == ("length" if state == "finished" else "cancelled")
    assert (scheduler.waiting, scheduler.running, scheduler.pages.pools[0].held) == (0, 0, 0)
    scheduler.check()
    known = list(request.outputs)
    loop.step()  # the dispatch in flight comes in, and is dropped
    assert not scheduler.has_work
    assert request.outputs == known
    assert request.in_flight == 0
    finish_all(scheduler, loop, queue(scheduler, [30, 40], max_tokens=20))


def test_cancel_before_add_keeps_the_request_out():
    scheduler, _ = make()
    request = make_request("r", [1], max_tokens=1, context=CONTEXT)
    scheduler.cancel(request)
    with pytest.raises(ValueError, match="added before"):
        scheduler.add(request)
    assert not scheduler.has_work


def test_cancelling_does_not_disturb_others_two_hundred_times():
    scheduler, loop = make(pages=30, page_size=8, prefill_tokens=32)
    (steady,) = queue(scheduler, [20], max_tokens=200)
    for i in range(200):
        choices = [make_request(f"c{i}", prompt_of(60, i), max_tokens=100, context=CONTEXT, seed=c, index=c)
                   for c in range(4)]
        for choice in choices:
            scheduler.add(choice)
        for _ in range(i % 7):
            loop.step()
        for choice in choices:
            scheduler.cancel(choice)
        scheduler.check()
        assert scheduler.waiting + scheduler.running == (steady.status is not Status.FINISHED)
    finish_all(scheduler, loop, [steady])
    assert scheduler.pages.pools[0].available == 30
    finish_all(scheduler, loop, queue(scheduler, [220], max_tokens=20))  # the whole pool once more


def test_request_tokens_run_over_prompt_and_outputs():
    request = make_request("r", [1, 2, 3], max_tokens=9, context=CONTEXT)
    request.outputs.extend([4, 5, 6])
    everything = [1, 2, 3, 4, 5, 6]
    for start in range(7):
        for stop in range(start, 7):
            assert request.tokens(start, stop) == everything[start:stop]


def test_nobody_finds_what_a_failed_request_computed():
    scheduler, loop = make()
    first, second = queue(scheduler, [40], max_tokens=4), queue(scheduler, [41], max_tokens=4)
    for request in first + second:
        request.prompt[:] = prompt_of(len(request.prompt))
    loop.step()
    scheduler.finish(first[0], "error")
    finish_all(scheduler, loop, second)
    assert scheduler.pages.index.hit == 0
    assert second[0].finish_reason == "length"
    third = queue(scheduler, [42], max_tokens=4)
    third[0].prompt[:] = prompt_of(42)
    finish_all(scheduler, loop, third)
    assert scheduler.pages.index.hit == 40  # of the one that ended well


# Victims


def test_a_protected_request_is_no_victim():
    scheduler, loop = make(pages=12, page_size=4, max_preemptions=2)
    (old,) = queue(scheduler, [4], max_tokens=36)
    for _ in range(17):
        loop.step()
    young = make_request("young", prompt_of(4, 1), max_tokens=20, context=CONTEXT)
    young.preemptions = 2  # by another scheduler
    scheduler.add(young)
    finish_all(scheduler, loop, [old, young])
    assert (old.preemptions, young.preemptions) == (1, 2)  # the older one gave way to what was promised


def test_the_last_of_those_behind_is_the_victim():
    scheduler, loop = make(pages=9, page_size=8)
    requests = queue(scheduler, [15, 15, 15], max_tokens=30)
    while not scheduler.preemptions:
        loop.step()
    assert [request.preemptions for request in requests] == [0, 0, 1]
    finish_all(scheduler, loop, requests)


def test_equal_classes_do_not_evict_each_other():
    scheduler, loop = make(pages=10, page_size=4)
    (low,) = queue(scheduler, [4], max_tokens=8, priority=1)
    (old,) = queue(scheduler, [24], max_tokens=4)
    loop.step()
    young = make_request("young", prompt_of(28, 5), max_tokens=4, context=CONTEXT)
    scheduler.add(young)  # even without the low one there are no 7 pages
    loop.step()
    assert (scheduler.preemptions, young.status, old.status) == (0, Status.WAITING, Status.RUNNING)
    assert low.status is Status.RUNNING
    finish_all(scheduler, loop, [low, old, young])
    assert old.preemptions == 0


def test_a_static_batch_goes_on_when_its_rows_hold_what_its_prompts_lack():
    """Two prompts share pages of a window: what the younger one gives back stays with the older one, which waits."""
    scheduler, loop = make(page_size=2, windows=[(5, 5)], max_rows=2, max_chunks=1, policy=find_policy("static", 10.0))
    shared = prompt_of(8)
    requests = [make_request("a", shared, max_tokens=4, context=CONTEXT),
                make_request("b", [*shared, 60, 61, 62], max_tokens=4, context=CONTEXT)]
    for request in requests:
        scheduler.add(request)
    finish_all(scheduler, loop, requests)
    assert any(request.cached for request in requests)


def test_who_waits_a_turn_for_a_prefix_is_passed_over():
    scheduler, loop = make()
    first, same = queue(scheduler, [30]), queue(scheduler, [30])
    other = make_request("other", prompt_of(30, 5), max_tokens=4, context=CONTEXT)
    scheduler.add(other)
    assert [chunk.request for chunk in loop.step().chunks] == [*first, other]
    finish_all(scheduler, loop, [*first, *same, other])
    assert same[0].cached == 24


# Pins


def test_a_page_that_is_pinned_twice_is_held_once():
    scheduler, loop = make()
    (request,) = queue(scheduler, [16], max_tokens=0)
    finish_all(scheduler, loop, [request])
    pool, pins = scheduler.pages.pools[0], [scheduler.pin(request) for _ in range(2)]
    assert (pool.held, pool.shared) == (2, 0)
    scheduler.check()
    for pin, held in zip(pins, (2, 0), strict=True):
        scheduler.unpin(pin)
        assert pool.held == held
        scheduler.check()


def test_a_pin_does_not_take_what_is_kept_for_protected_requests():
    scheduler, loop = make(pages=9, page_size=4, max_context=16, max_preemptions=0)
    (pinned,) = queue(scheduler, [8], max_tokens=0)
    finish_all(scheduler, loop, [pinned])
    kept = [make_request(f"k{i}", prompt_of(4, 5 + i), max_tokens=12, context=16) for i in range(2)]
    for request in kept:
        scheduler.add(request)
    loop.step()  # each has a page, and is promised three more; seven are there, two of them cached
    with pytest.raises(CapacityError, match="prefix: its 2 KV pages are kept for requests that were preempted"):
        scheduler.pin(pinned)
    finish_all(scheduler, loop, kept)


def test_pages_move_though_nothing_is_computed():
    """A choice takes the row of a less urgent request and forks; the step has no tokens left for its chunk."""
    scheduler, loop = make(max_rows=2, step_tokens=1)
    (low,) = queue(scheduler, [20], max_tokens=4, priority=1)
    loop.step()
    choices = [make_request("c", prompt_of(12, 3), max_tokens=1, context=CONTEXT, seed=i, index=i) for i in range(2)]
    for choice in choices:
        choice.siblings = choices
        scheduler.add(choice)
    plans = []
    while scheduler.has_work:
        plans.append(loop.step())
    assert any(plan.copies and not plan.chunks and not plan.rows for plan in plans)
    assert [choice.outputs for choice in choices] == [alone(choice) for choice in choices]
    assert low.preemptions == 1


@pytest.mark.parametrize("reserving", [False, True])
def test_who_names_no_limit_is_not_taken_to_want_the_whole_context(reserving):
    """But when admission is to be sure, it is."""
    pools = [PagePool(33, 8)]
    scheduler = Scheduler(pools, max_rows=8, max_context=CONTEXT, prefill_tokens=64, max_chunks=8, reserving=reserving)
    scheduler.undeclared = 16
    loop = Loop(scheduler)
    requests = queue(scheduler, [8] * 8, max_tokens=None, stop_ids=tuple(range(0, 64, 2)))
    loop.step()
    assert scheduler.running == (1 if reserving else 8)
    loop.run(most_steps(requests, scheduler))
    assert all(request.finish_reason == "stop" for request in requests)
