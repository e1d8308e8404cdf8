"""Thresholds, draws, counts, logprobs and seeds on their own."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jinfer.sampling import blocks
from jinfer.sampling.draw import pick
from jinfer.sampling.filters import CANDIDATES, Filters, threshold
from jinfer.sampling.logprobs import in_blocks, logprobs
from jinfer.sampling.penalties import MOST_OUTPUTS, new_counts, penalise, record_output, reset_row
from jinfer.sampling.seeds import choice_seed


def kept(weights: np.ndarray, k: int, p: float, m: float) -> np.ndarray:
    order = np.argsort(-weights, kind="stable")
    ranked = weights[order].astype(np.float64)
    k = len(weights) if k <= 0 else min(k, len(weights))
    inside = ranked >= ranked[k - 1]
    mass = np.where(inside, ranked, 0)
    inside &= (p >= 1) | (np.cumsum(mass) - mass < p * mass.sum()) | (np.arange(len(weights)) == 0)
    inside &= ranked >= m * ranked[0]
    return np.sort(order[inside])


@pytest.mark.parametrize("vocab", [40, 65, 300, 640])
@pytest.mark.parametrize("sharpness", [0.01, 1.0, 5.0])
def test_thresholds_keep_what_sorting_keeps(vocab: int, sharpness: float):
    rng = np.random.default_rng(vocab)
    cases = [
        (k, p, m)
        for k in (0, 1, 3, CANDIDATES - 1, CANDIDATES, CANDIDATES + 1, 300)
        for p in (0.0, 0.2, 0.713, 0.97, 1.0)
        for m in (0.0, 0.05, 1.0)
    ]
    logits = rng.normal(size=(len(cases), vocab)) * sharpness
    weights = np.exp(logits - logits.max(axis=1, keepdims=True)).astype(np.float32)
    k, p, m = (np.array(a) for a in zip(*cases, strict=True))
    filters = Filters(jnp.int32(k), jnp.float32(p), jnp.float32(m))
    least = np.asarray(jax.jit(threshold)(weights, filters))
    for i, case in enumerate(cases):
        np.testing.assert_array_equal(
            np.flatnonzero(weights[i] >= least[i]), kept(weights[i], *case), str(case)
        )


def test_a_row_s_threshold_does_not_depend_on_who_needs_the_search():
    rng = np.random.default_rng(0)
    weights = np.float32(np.exp(-rng.exponential(size=(4, 1000)) * 3))
    filters = Filters(jnp.int32([0, 500, 10, 0]), jnp.float32([0.5, 0.9, 0.9, 0.01]), jnp.zeros(4))
    search = jax.jit(threshold)
    together = np.asarray(search(weights, filters))
    for i in range(4):
        neutral = Filters(
            *(jnp.where(jnp.arange(4) == i, a, b) for a, b in zip(filters, (0, 1.0, 0), strict=True))
        )
        assert np.asarray(search(weights, neutral))[i] == together[i]


def test_equal_tokens_beyond_the_candidates_count_in_the_mass_of_top_k():
    weights = np.full((1, 600), 0.01, np.float32)
    weights[0, 100:200], weights[0, [7, 8, 250]] = 0.5, 1.0
    # top_k 10 keeps 3 + 100 tokens of mass 53; 0.08 of it is above the 3 best, 0.05 is not
    for p, size in ((0.08, 103), (0.05, 3)):
        least = threshold(weights, Filters(jnp.int32([10]), jnp.float32([p]), jnp.zeros(1)))
        assert (weights >= least).sum() == size


@pytest.mark.parametrize("vocab", [3, 64, 65, 1000])
def test_argmax_and_top_with_ties(vocab: int):
    x = np.floor(np.random.default_rng(vocab).exponential(size=(50, vocab))).astype(np.float32)
    index, best = blocks.argmax(jnp.asarray(x))
    np.testing.assert_array_equal(index, x.argmax(axis=1))
    np.testing.assert_array_equal(best, x.max(axis=1))
    k = min(20, vocab)
    values, ids = blocks.top(jnp.asarray(x), k)
    order = np.argsort(-x, axis=1, kind="stable")[:, :k]
    np.testing.assert_array_equal(ids, order)
    np.testing.assert_array_equal(values, np.take_along_axis(x, order, axis=1))


def test_pick_never_draws_weight_0():
    weights = jnp.float32([[0, 3, 0, 1, 0], [0, 0, 1e-30, 0, 0], [0, 0, 0, 0, 0], [1e-30, 0, 0, 1e30, 0]])
    for u in (0.0, 0.5, 0.7499999, 0.75, 1 - 2**-24):
        got = pick(weights, jnp.full(4, u, jnp.float32))
        assert got[0] == (1 if u < 0.75 else 3)
        assert got[1] == 2
        assert 0 <= got[2] < 5
        assert got[3] in (0, 3)
    draw_many = jax.jit(pick)
    rng = np.random.default_rng(0)
    weights = np.float32(np.where(rng.random((200, 97)) < 0.7, 0, rng.random((200, 97)) ** 8))
    ends = np.cumsum(weights, axis=1) / weights.sum(axis=1, keepdims=True)
    for u in (0.0, 1 - 2**-24, *ends[np.arange(200), np.random.default_rng(1).integers(0, 97, (20, 200))]):
        u = np.broadcast_to(np.minimum(u, 1 - 2**-24), 200).astype(np.float32)
        got = np.asarray(draw_many(jnp.asarray(weights), u))
        assert (weights[np.arange(200), got] > 0).all()


def test_counts_remember_prompt_and_output():
    counts = new_counts(3, 10)
    tokens = jnp.int32([4, 4, 5, 4, 7, 7, -1, -1])
    counts = reset_row(counts, jnp.int32(1), tokens, jnp.int32(3))
    assert counts[1].tolist() == [0, 0, 0, 0, 3, 1, 0, 4, 0, 0]
    counts = record_output(counts, jnp.int32([2, 1, 0]), jnp.int32([9, 5, 3]), jnp.array([True, True, False]))
    assert counts[1].tolist() == [0, 0, 0, 0, 3, 3, 0, 4, 0, 0]
    assert counts[2].tolist() == [0] * 9 + [2]
    assert counts[0].sum() == counts[3].sum() == 0
    counts = reset_row(counts, jnp.int32(1), jnp.full(8, -1), jnp.int32(0))
    assert counts[1].sum() == 0


@pytest.mark.parametrize("prompt", [0, 1])
def test_counts_saturate(prompt: int):
    counts = new_counts(1, 4).at[0, 2].set(2 * (MOST_OUTPUTS - 1) + prompt)
    for _ in range(3):
        counts = record_output(counts, jnp.int32([0]), jnp.int32([2]), jnp.array([True]))
    assert counts[0, 2] == 2 * MOST_OUTPUTS + prompt


def test_neutral_penalties_change_no_bit():
    x = np.float32(np.random.default_rng(0).normal(size=(2, 100)))
    counts = np.random.default_rng(1).integers(0, 2**15, size=(2, 100)).astype(np.int16)
    zero, one = jnp.zeros(2), jnp.ones(2)
    np.testing.assert_array_equal(penalise(jnp.asarray(x), jnp.asarray(counts), zero, zero, one), x)


def test_logprobs_of_a_table():
    logits = np.full((1, 300), -40.0, np.float32)
    logits[0, 97:101] = np.log([0.5, 0.3, 0.15, 0.05])
    chosen, ids, values = logprobs(jnp.asarray(logits), jnp.int32([99]), max_logprobs=4)
    np.testing.assert_allclose(chosen, [-1.89712], atol=1e-5)
    assert ids.tolist() == [[97, 98, 99, 100]]
    np.testing.assert_allclose(values, [[-0.69315, -1.20397, -1.89712, -2.99573]], atol=1e-5)


@pytest.mark.parametrize("length", [1, 7, 8, 21])
def test_a_prompt_in_blocks_equals_it_whole(length: int):
    rng = np.random.default_rng(length)
    hidden, targets = jnp.float32(rng.normal(size=(length, 16))), jnp.int32(rng.integers(0, 16, size=length))

    def score(x: jax.Array, tokens: jax.Array) -> jax.Array:
        assert x.shape[0] <= 8
        return jnp.stack([x.sum(1), jnp.take_along_axis(x, tokens[:, None], axis=1)[:, 0]], axis=1)

    want = np.stack([hidden.sum(1), np.asarray(hidden)[np.arange(length), targets]], axis=1)
    np.testing.assert_allclose(in_blocks(hidden, targets, score, block=8), want, rtol=1e-6)


def test_choice_seeds():
    seeds = {choice_seed(s, c) for s in (0, 1, -1, 7, 2**32 + 7, 2**63, 2**64 - 2) for c in range(4)}
    assert len(seeds) == 28
    assert all(0 <= s < 2**32 for s in seeds)
    assert choice_seed(7, 2) == choice_seed(7, 2) == 3868737664  # a change would change every seeded output
    assert len({choice_seed(None, 0) for _ in range(20)}) > 15
