"""StepTime against synthetic truths: it converges, follows a change, and no single call can wreck it."""

import itertools
import random
import statistics

import pytest

from jinfer.scheduler.fit import Affine
from jinfer.scheduler.step_time import StepTime, attended_positions

PREFILL = Affine(3e-3, 40e-6, 4e-9)
DECODE = Affine(8e-3, 30e-6, 8e-9)


def chunk(rng):
    tokens = rng.choice([16, 64, 128, 256, 512, 512, 512])
    return tokens, attended_positions(tokens, rng.randrange(0, 8192, 512))


def batch(rng):
    rows = rng.randint(1, 64)
    return rows, rows * rng.randint(100, 3000)


def seconds(truth, items, positions):
    return truth.constant + truth.item * items + truth.position * positions


def feed(model, truth, count, *, seed=0, noise=0.05, draw=chunk):
    """Shows it so many noisy prefill calls, or with draw=batch decode calls of one step."""
    rng = random.Random(seed)
    for _ in range(count):
        items, positions = draw(rng)
        took = seconds(truth, items, positions) * max(0.3, rng.gauss(1.0, noise))
        if draw is chunk:
            model.observe_prefill(items, positions, took)
        else:
            model.observe_decode(items, positions, 1, took)
    return model


def error(model, truth, draw=chunk):
    """Mean relative error over calls like those it was shown."""
    rng, errors = random.Random(99), []
    for _ in range(200):
        items, positions = draw(rng)
        guess = model.prefill_seconds(items, positions) if draw is chunk else model.decode_seconds(items, positions, 1)
        errors.append(abs(guess / seconds(truth, items, positions) - 1))
    return statistics.mean(errors)


@pytest.mark.parametrize("seed", range(5))
def test_converges_in_fifty_calls(seed):
    assert error(feed(StepTime(), PREFILL, 50, seed=seed, noise=0.03), PREFILL) < 0.02
    assert error(feed(StepTime(), DECODE, 50, seed=seed, noise=0.03, draw=batch), DECODE, batch) < 0.02


@pytest.mark.parametrize("factor", [0.2, 0.5, 3.0, 100.0])
def test_a_prior_far_off_does_not_matter_after_fifty_calls(factor):
    prior = Affine(*(factor * value for value in PREFILL))
    assert error(StepTime(prefill=prior), PREFILL) == pytest.approx(abs(factor - 1))
    assert error(feed(StepTime(prefill=prior), PREFILL, 50), PREFILL) < 0.02


@pytest.mark.parametrize("factor", [0.3, 0.7, 1.4, 3.0, 20.0])
def test_follows_a_change_of_regime(factor):
    model = feed(StepTime(), PREFILL, 300)
    changed = Affine(*(factor * value for value in PREFILL))
    feed(model, changed, 20, seed=1)
    assert error(model, changed) < 0.1
    feed(model, changed, 60, seed=2)
    assert error(model, changed) < 0.03


def test_follows_a_change_of_one_coefficient():
    model = feed(StepTime(), DECODE, 300, draw=batch)
    changed = DECODE._replace(position=3 * DECODE.position)
    assert error(feed(model, changed, 150, seed=1, draw=batch), changed, batch) < 0.03


def test_a_pause_is_forgotten_at_once():
    model = feed(StepTime(), PREFILL, 100)
    before = model.prefill_seconds(512, 1e6)
    for _ in range(3):
        model.observe_prefill(512, 1e6, 30.0)
    assert model.prefill_seconds(512, 1e6) == pytest.approx(before)
    feed(model, PREFILL, 10, seed=1)
    assert model.prefill_seconds(512, 1e6) == pytest.approx(before, rel=0.02)


def test_a_tenth_of_pauses_is_survived():
    model, rng = StepTime(), random.Random(4)
    for _ in range(2000):
        tokens, attended = chunk(rng)
        slow = rng.choice([3, 10, 1000]) if rng.random() < 0.1 else 1
        model.observe_prefill(tokens, attended, seconds(PREFILL, tokens, attended) * slow * rng.gauss(1, 0.05))
    assert error(model, PREFILL) < 0.03


def test_wild_times_do_not_make_it_believe_everything():
    model, rng = StepTime(), random.Random(6)
    for _ in range(300):
        model.observe_prefill(512, 1e6, 0.03 * rng.expovariate(1.0))
    before = model.prefill_seconds(512, 1e6)
    for _ in range(6):
        model.observe_prefill(512, 1e6, before)
    model.observe_prefill(512, 1e6, 3 * before)
    assert model.prefill_seconds(512, 1e6) == pytest.approx(before)


def test_a_first_call_that_compiles_is_overcome():
    for seed in range(5):
        model = StepTime()
        model.observe_prefill(512, attended_positions(512, 0), 60.0)
        assert error(feed(model, PREFILL, 1, seed=seed), PREFILL) < 2  # a thousand before
        assert error(feed(model, PREFILL, 20, seed=seed), PREFILL) < 0.05


def test_a_pause_just_before_a_change_is_no_part_of_it():
    model = feed(StepTime(), PREFILL, 100)
    model.observe_prefill(512, 1e6, 30.0)
    changed = Affine(*(2 * value for value in PREFILL))
    assert error(feed(model, changed, 6, seed=1), changed) < 0.3


def test_calls_all_alike_leave_the_rest_as_it_was():
    model = feed(StepTime(), PREFILL, 100)
    rng = random.Random(1)
    for _ in range(5000):
        attended = attended_positions(512, 0)
        model.observe_prefill(512, attended, seconds(PREFILL, 512, attended) * rng.gauss(1, 0.05))
    assert error(model, PREFILL) < 0.03


def test_never_negative():
    model, rng = StepTime(), random.Random(2)
    for _ in range(500):  # times that have nothing to do with the work
        model.observe_prefill(rng.randint(1, 512), rng.uniform(1, 1e6), rng.expovariate(100))
        assert min(model._prefill.coefficients) >= 0
    falling = StepTime()
    for tokens in range(1, 100):
        falling.observe_prefill(tokens, 1.0, 1.0 / tokens)
        assert falling.prefill_seconds(10**6, 0.0) >= 0


def test_nothing_is_known_at_first():
    model = StepTime()
    assert (model.prefill_known, model.decode_known) == (False, False)
    assert (model.prefill_seconds(512, 1e6), model.decode_seconds(8, 1000, 1), model.prefill_rate) == (0.0, 0.0, 0.0)
    assert model.chunk_tokens(1e-9, 0, 512, 1) == 512
    model.observe_decode(8, 1000, 1, 0.01)
    assert (model.prefill_known, model.decode_known) == (False, True)
    assert model.decode_seconds(8, 1000, 1) == pytest.approx(0.01)
    assert StepTime(PREFILL, DECODE).prefill_known


def test_decode_of_several_steps_is_each_of_them():
    model = StepTime(decode=DECODE)
    rows, context = 5, 1000
    each = [model.decode_seconds(rows, context + rows * step, 1) for step in range(4)]
    assert model.decode_seconds(rows, context, 4) == pytest.approx(sum(each))
    assert each[0] == pytest.approx(seconds(DECODE, rows, context))


def test_attended_positions_count_each_query():
    assert attended_positions(3, 10) == 11 + 12 + 13


@pytest.mark.parametrize("truth", [PREFILL, PREFILL._replace(position=0.0), PREFILL._replace(item=0.0)])
def test_the_chunk_is_the_longest_that_fits(truth):
    model = StepTime(prefill=truth)
    for budget, start, before in itertools.product([1e-3, 4e-3, 0.01, 0.05, 1.0], [0, 100, 5000, 100_000], [0, 40]):
        attended = attended_positions(before, 7)
        tokens = model.chunk_tokens(budget, start, 10_000, 0, tokens=before, attended=attended)
        spent, longer = (model.prefill_seconds(before + n, attended + attended_positions(n, start))
                         for n in (tokens, tokens + 1))
        assert not tokens or spent <= budget * (1 + 1e-9)
        assert tokens == 10_000 or longer > budget


def test_the_chunk_keeps_its_limits():
    model = StepTime(prefill=PREFILL)
    assert model.chunk_tokens(0.0, 0, 512, 16) == 16
    assert model.chunk_tokens(-1.0, 0, 512, 16) == 16
    assert model.chunk_tokens(1e9, 0, 512, 16) == 512
    assert model.chunk_tokens(0.0, 0, 8, 16) == 8
    assert StepTime(prefill=Affine(1e-3, 0.0, 0.0)).chunk_tokens(2e-3, 0, 512, 1) == 512


def test_prefill_rate_is_of_the_average_call():
    assert StepTime(PREFILL).prefill_rate == pytest.approx(512 / seconds(PREFILL, 512, attended_positions(512, 0)))
    model = StepTime(PREFILL)
    for _ in range(1000):
        model.observe_prefill(64, attended_positions(64, 0), seconds(PREFILL, 64, attended_positions(64, 0)))
    assert model.prefill_rate == pytest.approx(64 / seconds(PREFILL, 64, attended_positions(64, 0)), rel=0.02)
