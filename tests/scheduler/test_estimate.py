"""OutputEstimate: learns which share of declared outputs is used, grows careful after preemptions, calms down."""

import random

import pytest

from jinfer.scheduler.estimate import ALARM, BOLD, CALM, LEAST, START, OutputEstimate


def learned(share, requests=600, seed=0):
    rng, estimate = random.Random(seed), OutputEstimate(reserving=False)
    for _ in range(requests):
        declared = rng.randint(10, 1000)
        estimate.finished(declared, round(declared * min(1.0, max(0.0, rng.gauss(share, 0.1)))))
    return estimate


@pytest.mark.parametrize("share", [0.2, 0.5, 0.8])
def test_learns_the_share_of_tokens(share):
    assert OutputEstimate(reserving=False).ratio == START
    assert learned(share).share == pytest.approx(share, abs=0.03)
    assert abs(learned(share, requests=50).share - share) < abs(START - share) or share == pytest.approx(START, abs=0.1)


def test_one_request_does_not_decide():
    estimate = OutputEstimate(reserving=False)
    estimate.finished(1000, 0)
    assert START * 0.85 < estimate.share < START


def test_is_weighted_by_tokens():
    estimate = OutputEstimate(reserving=False)
    for _ in range(600):
        estimate.finished(4000, 400)
        estimate.finished(16, 16)
    assert estimate.share == pytest.approx(416 / 4016, abs=0.01)


def test_follows_what_changes_within_a_few_hundred():
    estimate = learned(0.2)
    for _ in range(300):
        estimate.finished(500, 450)
    assert estimate.share > 0.85


def test_a_preemption_raises_it_and_finished_requests_lower_it():
    estimate = learned(0.3)
    assert estimate.ratio == pytest.approx(BOLD * estimate.share)  # nothing was ever preempted
    before = estimate.ratio
    for _ in range(3):
        estimate.preempted()
    assert estimate.ratio == pytest.approx(ALARM**3 * before)
    raised = estimate.caution
    for _ in range(34):
        estimate.finished(100, 30)
    assert estimate.caution == pytest.approx(raised / 2, rel=0.01)
    for _ in range(300):
        estimate.finished(100, 30)
    assert estimate.caution == BOLD


def test_caution_settles_where_few_are_preempted():
    estimate, preempted = learned(0.3), 0
    for _ in range(2000):  # whoever admits with less than this must preempt
        if estimate.ratio < 0.12:
            estimate.preempted()
            preempted += 1
        estimate.finished(100, 30)
        assert 0.12 * CALM**2 < estimate.ratio < 0.12 * ALARM * 1.01 or preempted < 4
    assert 0.02 < preempted / 2000 < 0.035


def test_many_preemptions_reserve_everything_and_no_more():
    estimate = learned(0.3)
    for _ in range(1000):
        estimate.preempted()
    assert estimate.ratio == 1.0
    for _ in range(61):  # no debt was piled up beyond
        estimate.finished(100, 30)
    assert estimate.ratio < 0.31


def test_stays_positive_when_nothing_is_generated():
    estimate = OutputEstimate(reserving=False)
    for _ in range(3000):
        estimate.finished(100, 0)
        estimate.finished(0, 0)  # a prompt that was only scored
    assert estimate.share == LEAST
    assert estimate.ratio > 0
    only_scored = OutputEstimate(reserving=False)
    only_scored.finished(0, 0)
    assert only_scored.share == START


def test_reserving_is_always_everything():
    estimate = OutputEstimate(reserving=True)
    for _ in range(100):
        estimate.finished(100, 1)
    assert estimate.ratio == 1.0


def test_an_output_is_no_longer_than_declared():
    with pytest.raises(ValueError, match="11 tokens of an output of at most 10"):
        OutputEstimate(reserving=False).finished(10, 11)
