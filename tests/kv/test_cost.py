"""SwapCost: learns a link, follows it, is not fooled by a stall, and compares."""

import random

import pytest

from jinfer.kv.cost import CLIP, LATENCY, START_RATE, SwapCost

RATE, MB = 25e9, 1 << 20


def observed(cost, rate, count, seed=0, noise=0.05, latency=LATENCY):
    rng = random.Random(seed)
    for _ in range(count):
        size = rng.randint(1, 64) * MB
        cost.observe(size, (latency + size / rate) * max(0.5, rng.gauss(1.0, noise)))
    return cost


def test_starts_from_the_documented_rate():
    assert SwapCost().rate == START_RATE
    assert SwapCost().load_seconds(0) == LATENCY
    assert SwapCost(rate=1e9, latency=0.0).load_seconds(10**9) == 1.0


@pytest.mark.parametrize("rate", [1e9, 10e9, 100e9])
def test_learns_the_rate_in_fifty_transfers(rate):
    cost = observed(SwapCost(), rate, 50)
    assert cost.rate == pytest.approx(rate, rel=0.02)
    assert cost.load_seconds(8 * MB) == pytest.approx(LATENCY + 8 * MB / rate, rel=0.02)


def test_follows_a_link_that_is_shared_from_now_on():
    cost = observed(observed(SwapCost(), RATE, 200), RATE / 10, 100, seed=1)
    assert cost.rate == pytest.approx(RATE / 10, rel=0.05)
    assert observed(cost, RATE, 200, seed=2).rate == pytest.approx(RATE, rel=0.05)


def test_a_stall_counts_no_more_than_the_clip():
    cost = observed(SwapCost(), RATE, 200)
    before = cost.rate
    cost.observe(32 * MB, 30.0)
    assert before / (1 + CLIP / 20) / 1.2 < cost.rate < before
    first = SwapCost()
    first.observe(32 * MB, 30.0)  # a first call that compiles
    assert first.rate > START_RATE / (CLIP + 1)


def test_the_latency_is_no_more_than_a_fast_transfer_shows():
    cost = SwapCost()
    for _ in range(1000):
        cost.observe(4096, 1e-6)
    assert cost.load_seconds(4096) == pytest.approx(1e-6)
    assert 0 < cost.load_seconds(0) < 1e-6


def test_prefers_what_is_faster():
    cost = observed(SwapCost(), RATE, 100)
    size = 16 * MB
    assert cost.prefers_load(size, 1.2 * cost.load_seconds(size))
    assert not cost.prefers_load(size, 0.8 * cost.load_seconds(size))
    assert not cost.prefers_load(1, LATENCY / 2)  # nothing is loaded faster than the latency
    assert not cost.prefers_load(size, 0.0)  # nothing is known of computing


def test_nothing_learns_from_nothing():
    cost = SwapCost()
    cost.observe(0, 1.0)
    cost.observe(MB, 0.0)
    assert cost.rate == START_RATE
    with pytest.raises(ValueError, match="positive rate"):
        SwapCost(rate=0.0)
