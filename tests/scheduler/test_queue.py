"""RequestQueue against a sorted list, and what it costs in memory and comparisons."""

import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from jinfer.config import SamplingParams
from jinfer.scheduler import Request
from jinfer.scheduler.queue import SLACK, RequestQueue


def request(name="r"):
    return Request(id=str(name), index=0, prompt=[1], params=SamplingParams(), max_position=2)


class QueueMachine(RuleBasedStateMachine):
    """Ranks of few values, so that keys tie; requests leave and come back with the same rank or another."""

    @initialize(front=st.integers(1, 5))
    def start(self, front):
        self.size = front
        self.queue = RequestQueue(front)
        self.ranks: dict[Request, tuple[float, int]] = {}  # of those that wait
        self.gone: dict[Request, tuple[float, int]] = {}
        self.order = 0

    @rule(keys=st.lists(st.integers(0, 4), min_size=1, max_size=12))
    def add(self, keys):
        for key in keys:
            self.order += 1
            self.put(request(self.order), (float(key), self.order))

    @precondition(lambda self: self.gone)
    @rule(data=st.data(), key=st.none() | st.integers(0, 4))
    def add_again(self, data, key):
        one = data.draw(st.sampled_from(list(self.gone)))
        rank = self.gone.pop(one)
        self.put(one, rank if key is None else (float(key), rank[1]))

    def put(self, one, rank):
        self.queue.add(one, rank)
        self.ranks[one] = rank

    @precondition(lambda self: self.ranks)
    @rule(data=st.data(), count=st.integers(1, 8), where=st.sampled_from(["first", "last", "any"]))
    def remove(self, data, count, where):
        for _ in range(min(count, len(self.ranks))):
            known = self.sorted()
            one = {"first": known[0], "last": known[-1]}.get(where) or data.draw(st.sampled_from(known))
            self.queue.remove(one)
            self.gone[one] = self.ranks.pop(one)

    def sorted(self):
        return sorted(self.ranks, key=self.ranks.__getitem__)

    @invariant()
    def agrees(self):
        known = self.sorted()
        assert list(self.queue.front) == known[: self.size]
        assert self.queue.first is (known[0] if known else None)
        assert len(self.queue) == len(known)
        assert set(self.queue) == set(known)
        assert all(one in self.queue for one in known)
        assert not any(one in self.queue for one in self.gone)
        self.queue.check()


TestQueueMachine = QueueMachine.TestCase
TestQueueMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_drains_in_order_with_the_default_front():
    rng, queue = random.Random(3), RequestQueue()
    ranks = {request(i): (rng.random(), i) for i in range(1000)}
    for one, rank in ranks.items():
        queue.add(one, rank)
    drained = []
    while (one := queue.first) is not None:
        drained.append(one)
        queue.remove(one)
    assert drained == sorted(ranks, key=ranks.__getitem__)
    assert len(queue.front) == 0


def test_a_stale_entry_neither_resurrects_nor_doubles():
    queue, one, rank = RequestQueue(front=1), request(), (5.0, 1)
    queue.add(request("first"), (0.0, 0))
    for _ in range(3):  # out of the heap and back, with the very same rank object
        queue.add(one, rank)
        queue.remove(one)
    queue.add(one, (7.0, 1))
    between = request("between")
    queue.add(between, (6.0, 2))
    queue.remove(queue.first)
    assert queue.first is between
    queue.remove(between)
    assert queue.front == (one,)
    queue.remove(one)
    assert queue.first is None
    queue.check()


def test_memory_stays_bounded_by_what_waits():
    queue, requests = RequestQueue(front=2), [request(i) for i in range(100)]
    for i, one in enumerate(requests):
        queue.add(one, (float(i), i))
    for turn in range(50):
        for one in requests[10:]:
            queue.remove(one)
        for i, one in enumerate(requests[10:]):
            queue.add(one, (float(turn + i), i))
        assert len(queue._rest) <= 2 * len(queue) + 2 * SLACK
        queue.check()


def test_what_is_refused():
    queue, one = RequestQueue(), request()
    queue.add(one, (1.0, 0))
    with pytest.raises(ValueError, match="waits already"):
        queue.add(one, (2.0, 1))
    for key in (float("nan"), float("inf")):
        with pytest.raises(ValueError, match="finite"):
            queue.add(request(), (key, 2))
    with pytest.raises(KeyError):
        queue.remove(request())
    with pytest.raises(ValueError, match="one request or more"):
        RequestQueue(front=0)
    assert len(queue) == 1
