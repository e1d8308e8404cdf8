"""Policies: who goes before whom, what a step may do, and how a policy is found by name."""

import random
from functools import partial

import pytest

from jinfer.errors import ConfigError
from jinfer.scheduler.policy import POLICIES, Candidate, Phase, Policy, Snapshot, find_policy

AGEING = 10.0
MINE = Policy("mine", lambda request: -request.prompt_tokens)
NOT_A_POLICY = 3


def shortest_first(ageing: float) -> Policy:
    return Policy("shortest-first", lambda request: request.arrival + ageing * request.prompt_tokens)


def candidate(arrival=0.0, *, priority=0, target=None, cached=0, prefill=0.0, prompt=100):
    due = None if target is None else arrival + target
    return Candidate(priority, arrival, due, prompt, 100, cached, prefill)


def order(name, requests):
    """Indices of the requests in the order in which a policy serves them."""
    key = find_policy(name, AGEING).key
    return sorted(range(len(requests)), key=lambda i: (key(requests[i]), i))


def test_fcfs_is_the_order_of_arrival_whatever_else():
    requests = [candidate(2.0, priority=-5, target=1.0), candidate(1.0, priority=5), candidate(0.0, prefill=9.0)]
    assert order("fcfs", requests) == [2, 1, 0]


@pytest.mark.parametrize("name", ["priority", "longest-prefix", "deadline"])
def test_waiting_outweighs_a_class_after_ageing(name):
    old = candidate(0.0, priority=2)
    assert order(name, [old, candidate(2 * AGEING - 0.1)]) == [1, 0]
    assert order(name, [old, candidate(2 * AGEING + 0.1)]) == [0, 1]
    assert order(name, [candidate(0.0), candidate(0.1)]) == [0, 1]


@pytest.mark.parametrize("name", list(POLICIES))
def test_keys_are_finite_and_of_equal_requests_equal(name):
    key = find_policy(name, AGEING).key
    for priority in (-10**6, 0, 10**6):
        assert abs(key(candidate(5.0, priority=priority))) < 1e9
    assert key(candidate(1.0)) == key(candidate(1.0))


def test_deadline_is_least_slack_first():
    tight, loose, none = candidate(0.0, target=1.0), candidate(0.0, target=3.0), candidate(0.0)
    assert order("deadline", [none, loose, tight]) == [2, 1, 0]
    long = candidate(0.0, target=3.0, prefill=2.5)  # must begin at 0.5, the tight one at 1.0
    assert order("deadline", [tight, loose, long]) == [2, 0, 1]
    assert order("deadline", [candidate(0.0), candidate(AGEING - 0.1, target=0.2)]) == [0, 1]


def test_deadline_bound_on_who_overtakes():
    """The docstring's: a later arrival of the class overtakes within target - e' + e seconds only."""
    key = find_policy("deadline", AGEING).key
    rng = random.Random(1)
    for _ in range(2000):
        mine = candidate(0.0, target=rng.uniform(0.1, 9), prefill=rng.uniform(0, 3))
        other = candidate(rng.uniform(0, 20), target=rng.uniform(0.01, 9), prefill=rng.uniform(0, 3))
        if key(other) < key(mine):
            assert other.arrival < mine.deadline - mine.prefill_seconds + other.prefill_seconds


def choose(front, now=1.0):
    return find_policy("longest-prefix", AGEING).choose(front, now)


def test_longest_prefix_takes_the_most_cached_of_the_front():
    assert choose([candidate(), candidate(cached=64), candidate(cached=128), candidate(cached=128)]) == 2
    assert choose([candidate(), candidate()]) == 0
    assert choose([candidate(cached=10)]) == 0


def test_longest_prefix_never_passes_over_one_that_waited_too_long():
    front = [candidate(8.0), candidate(0.0), candidate(9.0, cached=512)]
    assert choose(front, now=9.9) == 2
    assert choose(front, now=10.1) == 0  # the second has waited longer than ageing: nobody behind it
    assert choose([candidate(8.0), candidate(0.0, cached=1), candidate(9.0, cached=512)], now=10.1) == 1


def test_longest_prefix_never_passes_over_a_better_class():
    assert choose([candidate(priority=0), candidate(priority=1, cached=512)]) == 0
    better_in_between = [candidate(priority=1), candidate(priority=0), candidate(priority=1, cached=512)]
    assert choose(better_in_between) == 0
    assert choose([candidate(priority=1), candidate(priority=0, cached=8), candidate(priority=1, cached=512)]) == 1


def test_longest_prefix_in_a_queue_starves_nobody():
    """Served one a second under a stream of better hits: a miss goes as soon as it has waited for ageing seconds."""
    policy = find_policy("longest-prefix", AGEING)
    queue = [candidate(0.0)]
    for now in range(1, 100):
        queue += [candidate(now - 0.5, cached=256), candidate(now - 0.4, cached=256)]
        queue.sort(key=policy.key)
        served = queue.pop(policy.choose(queue[:64], float(now)))
        if not served.cached_tokens:
            assert now == AGEING + 1
            return
    pytest.fail("starved")


def test_static_fills_a_batch_then_decodes_it_to_its_end():
    phase = find_policy("static", AGEING).phase
    step = partial(Snapshot, now=0.0, rows=8, full=False)
    assert phase(step(waiting=9, prefilling=0, decoding=0, advanced=0)) == Phase(True, False)
    assert phase(step(waiting=5, prefilling=2, decoding=2, advanced=0)) == Phase(True, False)
    assert phase(step(waiting=5, prefilling=0, decoding=4, advanced=0)) == Phase(True, False)  # there is room for more
    assert phase(step(waiting=0, prefilling=0, decoding=4, advanced=0)) == Phase(True, True)  # but nobody for it
    assert phase(step(waiting=5, prefilling=0, decoding=8, advanced=0)) == Phase(True, True)  # rows are full
    assert phase(step(waiting=5, prefilling=0, decoding=4, advanced=0, full=True)) == Phase(True, True)  # or pages
    assert phase(step(waiting=5, prefilling=1, decoding=7, advanced=0, full=True)) == Phase(True, False)
    assert phase(step(waiting=5, prefilling=0, decoding=8, advanced=8)) == Phase(False, True)
    assert phase(step(waiting=5, prefilling=0, decoding=1, advanced=1)) == Phase(False, True)  # its last row
    assert phase(step(waiting=5, prefilling=1, decoding=1, advanced=1)) == Phase(False, False)  # one that came back


@pytest.mark.parametrize("name", list(POLICIES))
def test_a_policy_is_found_by_its_own_name(name):
    assert find_policy(name, AGEING).name == name


def test_a_policy_of_your_own():
    assert find_policy(f"{__name__}:MINE", AGEING) is MINE
    made = find_policy(f"{__name__}:shortest_first", 3.0)
    assert made.key(candidate(1.0, prompt=10)) == 31.0


def raises(ageing):
    raise ValueError("boom")


@pytest.mark.parametrize(("name", "words"), [
    ("fcsf", ["policy:", "'fcsf'", "did you mean 'fcfs'", "longest-prefix"]),
    ("zzz", ["policy:", "known:", "package.module:name"]),
    ("no.such.module:x", ["policy:", "no.such.module", "imported"]),
    (":x", ["policy:", "imported"]),
    (f"{__name__}:MIEN", ["policy:", "did you mean 'MINE'"]),
    (f"{__name__}:NOT_A_POLICY", ["policy:", "must be a Policy", "int"]),
    (f"{__name__}:raises", ["policy:", "cannot be made", "boom"]),
    (f"{__name__}:candidate", ["policy:", "must be a Policy", "Candidate"]),
])
def test_what_is_no_policy_is_named(name, words):
    with pytest.raises(ConfigError) as error:
        find_policy(name, AGEING)
    assert all(word in str(error.value) for word in words)
    assert "\n" not in str(error.value)
