"""The whole chain against the float64 oracle, and what users see: filters, penalties, seeds, logprobs."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jinfer.sampling.blocks import mask_padding
from jinfer.sampling.draw import uniforms
from jinfer.sampling.penalties import new_counts, record_output, reset_row
from jinfer.sampling.sampler import RowParams, Sampled, sample
from tests.sampling.oracle import Row, candidates, counts_of, edited, stack, weights

C = 4
ROWS = 6  # every test pads to this many, so that few programs are compiled


@functools.partial(jax.jit, static_argnames=("max_logprobs", "vocab_size"))
def compiled(logits, params, counts, slots, *, max_logprobs, vocab_size=None):
    """As Programs does it."""
    return sample(mask_padding(logits, vocab_size or logits.shape[1]), params, counts, slots, max_logprobs=max_logprobs)


def run(logits: np.ndarray, rows: list[Row], vocab_size: int | None = None) -> Sampled:
    """Samples any number of rows, at least ROWS of them in one call."""
    n, vocab = logits.shape
    idle = max(ROWS - n, 0)
    logits = np.concatenate([logits, np.zeros((idle, vocab))]).astype(np.float32)
    rows = rows + [Row()] * idle
    counts = counts_of(rows, len(rows), vocab)
    slots = np.arange(len(rows), dtype=np.int32)
    got = compiled(logits, stack(rows), counts, slots, max_logprobs=C, vocab_size=vocab_size)
    return Sampled(*(np.asarray(a)[:n] for a in got))


def tokens_of(logits: np.ndarray, row: Row, seeds: int = 192) -> np.ndarray:
    """Tokens of one row of logits [V] under many seeds."""
    return run(np.tile(logits, (seeds, 1)), [row.but(seed=i) for i in range(seeds)]).tokens


def table(*probabilities: float, vocab: int = 70, first: int = 61) -> np.ndarray:
    """Logits [V] of these probabilities at ids first, first + 1, ... (across a block's edge); others -40."""
    logits = np.full(vocab, -40.0)
    logits[first : first + len(probabilities)] = np.log(probabilities)
    return logits


# --- the oracle ---------------------------------------------------------------------------------------------


@st.composite
def requests(draw: st.DrawFn, vocab: int) -> Row:
    token = st.integers(0, vocab - 1)
    return Row(
        temperature=draw(st.sampled_from([0.0, 0.0, 1e-6, 0.3, 1.0, 1.7, 20.0])),
        top_k=draw(st.sampled_from([0, 0, -1, 1, 2, 5, 63, 64, 65, 100, vocab - 1, vocab, 2**31 - 1])),
        top_p=draw(st.sampled_from([1.0, 1.0, 0.0, 1e-9, 0.31, 0.9, 0.9999])),
        min_p=draw(st.sampled_from([0.0, 0.0, 0.013, 0.4, 1.0])),
        presence=draw(st.sampled_from([0.0, 0.0, -2.0, 0.7])),
        frequency=draw(st.sampled_from([0.0, 0.0, -0.3, 2.0])),
        repetition=draw(st.sampled_from([1.0, 1.0, 0.5, 1.3, 100.0])),
        seed=draw(st.integers(0, 2**32 - 1)),
        position=draw(st.integers(0, 2**31 - 1)),
        stop_ids=draw(st.lists(token, max_size=2)),
        min_position=draw(st.sampled_from([0, 2**31 - 1])),
        bias=draw(st.dictionaries(token, st.sampled_from([-100.0, -1.5, 0.25, 100.0]), max_size=3)),
        logprobs=draw(st.integers(-1, C)),
        prompt=draw(st.lists(token, max_size=6)),
        output=draw(st.lists(token, max_size=6)),
    )


@pytest.mark.parametrize(("vocab", "padded"), [(50, 50), (300, 310), (600, 610), (640, 640)])
@settings(max_examples=45, deadline=None, derandomize=True)
@given(data=st.data())
def test_rows_of_a_ragged_batch_equal_the_oracle_and_themselves_alone(
    vocab: int, padded: int, data: st.DataObject
):
    rows = [data.draw(requests(vocab)) for _ in range(ROWS)]
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    # Flatter logits or hotter rows give tokens equal float32 weights, which filters keep or drop together.
    scale = data.draw(st.sampled_from([1.0, 4.0]))
    logits = np.full((ROWS, padded), 50.0, np.float32)  # the padding would win if it were not masked
    logits[:, :vocab] = rng.normal(size=(ROWS, vocab)) * scale
    got = run(logits, rows, vocab_size=vocab)
    draws = np.asarray(uniforms(*(jnp.asarray(a) for a in (stack(rows).seed, stack(rows).position))))
    for i, row in enumerate(rows):
        x = edited(logits[i, :vocab], row)
        if row.temperature == 0 or row.top_k == 1:
            assert x[got.tokens[i]] >= x.max() - 1e-4
        else:
            assert got.tokens[i] in candidates(loosened(x, row, got.tokens[i]), draws[i])
        raw = logits[i, :vocab].astype(np.float64)
        raw -= np.log(np.exp(raw - raw.max()).sum()) + raw.max()
        order = np.argsort(-raw, kind="stable")[: max(row.logprobs, 0)]
        np.testing.assert_array_equal(got.top_ids[i], [*order, *[-1] * (C - len(order))])
        np.testing.assert_allclose(got.top_logprobs[i, : len(order)], raw[order], atol=1e-5)
        np.testing.assert_allclose(
            got.logprob[i], raw[got.tokens[i]] if row.logprobs >= 0 else 0.0, atol=1e-5
        )
    assert got.finite.all()
    alone = data.draw(st.integers(0, ROWS - 1))
    single = run(logits[alone : alone + 1], [rows[alone]], vocab_size=vocab)
    for mine, batched in zip(single, got, strict=True):
        np.testing.assert_array_equal(mine[0], batched[alone])


def loosened(x: np.ndarray, row: Row, token: int) -> np.ndarray:
    """Oracle weights; where float32 may put a token on the other side of a filter, the side that allows it.

    The kept set moves by that one token, so the selection is compared for both sets.
    """
    exact = weights(x, row)
    if exact[token] > 0:
        return exact
    for nudge in (1e-5, -1e-5):
        near = weights(x, row.but(top_p=row.top_p * (1 + nudge), min_p=row.min_p * (1 - nudge)))
        if near[token] > 0:
            return near
    return exact


# --- filters ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("vocab", [70, 530])
@pytest.mark.parametrize(
    ("changes", "support"),
    [
        ({}, "abcd"),
        ({"top_p": 0.0}, "a"),
        ({"top_p": 1e-9}, "a"),
        ({"top_p": 0.45}, "a"),
        ({"top_p": 0.55}, "ab"),
        ({"top_p": 0.79}, "ab"),
        ({"top_p": 0.9}, "abc"),
        ({"top_p": 1.0}, "abcd"),
        ({"top_k": 1}, "a"),
        ({"top_k": 2}, "ab"),
        ({"top_k": 0}, "abcd"),
        ({"top_k": -1}, "abcd"),
        ({"top_k": 100000}, "abcd"),
        ({"min_p": 0.2}, "abc"),
        ({"min_p": 0.5}, "ab"),
        ({"min_p": 0.5, "temperature": 2.0}, "abc"),
        ({"min_p": 1.0}, "a"),
        ({"top_k": 3, "top_p": 0.95}, "abc"),
        ({"temperature": 0.0, "top_p": 0.9, "top_k": 4}, "a"),
        ({"temperature": 1e-6}, "a"),
        ({"temperature": 1e-45}, "a"),
    ],
)
def test_support_of_the_filters(changes: dict, support: str, vocab: int):
    tokens = tokens_of(table(0.5, 0.3, 0.15, 0.05, vocab=vocab), Row(temperature=1.0).but(**changes))
    assert {"abcd"[t - 61] for t in tokens} == set(support)


@pytest.mark.parametrize("vocab", [300, 600])
def test_draws_follow_the_distribution(vocab: int):
    """Chi-square of 4,096 draws over the tokens in several blocks, without and with a filter (fixed
    seeds)."""
    logits = np.random.default_rng(5).normal(size=vocab)
    for row in (Row(temperature=0.7), Row(temperature=0.7, top_p=0.8), Row(temperature=0.7, top_k=100)):
        p = weights(logits, row)
        p /= p.sum()
        seen = np.bincount(tokens_of(logits, row, seeds=4096), minlength=vocab)
        assert seen[p == 0].sum() == 0
        p, seen = p[p > 0], seen[p > 0]
        chi = ((seen - 4096 * p) ** 2 / (4096 * p)).sum()
        freedom = len(p) - 1
        assert abs(chi - freedom) < 4 * np.sqrt(2 * freedom)


def test_equal_values_at_the_edge_of_top_k_stay_together():
    logits = np.zeros(600)
    logits[::6] = 1.0  # 100 equal best ones, more than the candidates
    tokens = tokens_of(logits, Row(temperature=1.0, top_k=7), seeds=512)
    assert set(tokens) <= set(range(0, 600, 6))
    assert len(set(tokens)) > 90


# --- penalties, bias, end tokens: the continuation of a table row -------------------------------------------


def continuation(logits: np.ndarray, row: Row, steps: int) -> list[int]:
    """Tokens of `steps` steps from the same logits, with the counts kept as the engine keeps them."""
    vocab = len(logits)
    counts = new_counts(ROWS, vocab)
    prompt = np.full(8, -1, np.int32)
    prompt[: len(row.prompt)] = row.prompt
    counts = reset_row(counts, jnp.int32(2), jnp.asarray(prompt), jnp.int32(len(row.prompt)))
    slots, active = np.arange(ROWS, dtype=np.int32), np.arange(ROWS) == 2
    for step in range(steps):
        rows = [row.but(position=row.position + step)] * ROWS
        got = compiled(
            np.tile(logits.astype(np.float32), (ROWS, 1)), stack(rows), counts, slots, max_logprobs=C
        )
        counts = record_output(counts, slots, got.tokens, active)
        row = row.but(output=[*row.output, int(got.tokens[2])])
    return row.output


@pytest.mark.parametrize(
    ("changes", "prompt", "text"),
    [
        ({}, "", "pppppppp"),
        ({"repetition": 1.5}, "", "pqpppp"),
        ({"repetition": 1.5}, "p", "qppppp"),
        ({"presence": 0.5}, "ppp", "pqpppppp"),
        ({"frequency": 0.5}, "ppp", "pqpqpqpq"),
        ({"frequency": 2.0}, "", "pqpqpqpq"),
        ({"bias": {5: -100.0}}, "", "qqqq"),
        ({"bias": {1: 100.0}}, "", "1111"),
        ({"bias": {6: 1.0}}, "", "qqqq"),
    ],
)
def test_penalties_and_bias_at_temperature_0(changes: dict, prompt: str, text: str):
    logits = np.full(50, -40.0)
    logits[5], logits[6] = -1.0, -1.2  # p, q: both negative
    names = {5: "p", 6: "q", 1: "1"}
    row = Row(prompt=[5] * len(prompt)).but(**changes)
    assert "".join(names[t] for t in continuation(logits, row, len(text))) == text


def test_end_tokens_wait_for_min_tokens():
    logits = np.full(50, -40.0)
    logits[[7, 8]], logits[9] = (5.0, 4.0), 1.0
    row = Row(stop_ids=[7, 8], position=10, min_position=14)
    assert continuation(logits, row, 6) == [9, 9, 9, 9, 7, 7]
    assert continuation(logits, row.but(min_position=0), 1) == [7]
    hot = tokens_of(logits, row.but(temperature=100.0, position=3))
    assert not {7, 8} & set(hot)


# --- seeds --------------------------------------------------------------------------------------------------


def test_a_seed_gives_the_same_token_in_any_row_beside_any_neighbour():
    rng = np.random.default_rng(1)
    mine, row = rng.normal(size=600), Row(temperature=1.0, top_p=0.9, seed=42, position=17)
    others = [
        Row(),
        Row(temperature=1.0, seed=42, position=18),
        Row(temperature=0.5, top_k=3, seed=9, repetition=1.5, prompt=[1, 2]),
        Row(temperature=2.0, top_p=0.99, top_k=200, seed=3, logprobs=4),
        Row(temperature=1.0, min_p=0.2, bias={4: 3.0}),
    ]
    alone = run(mine[None], [row]).tokens[0]
    for at in range(ROWS):
        rows = [*others[:at], row, *others[at:]]
        logits = rng.normal(size=(ROWS, 600))
        logits[at] = mine
        assert run(logits, rows).tokens[at] == alone
    many = [*others, *others, *others, *others, row, *others[:3]]  # 24: more rows than a block of rows on CPU
    logits = rng.normal(size=(24, 600))
    logits[20] = mine
    assert run(logits, many).tokens[20] == alone
    walk = [int(run(mine[None], [row.but(position=i)]).tokens[0]) for i in range(24)]
    assert len(set(walk)) > 12


def test_the_stream_ignores_jax_configuration():
    args = jnp.uint32([1, 2**32 - 1]), jnp.int32([0, 7])
    before = np.asarray(uniforms(*args))
    with jax.threefry_partitionable(not jax.config.jax_threefry_partitionable), jax.default_prng_impl("rbg"):
        np.testing.assert_array_equal(uniforms(*args), before)
    assert before.min() >= 0
    assert before.max() < 1
    pinned = [[0.11815023, 0.43147469], [0.14307094, 0.23301858]]
    np.testing.assert_allclose(before, pinned, atol=1e-7)  # a change would change every seeded output


# --- broken rows --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("vocab", [130, 530])
@pytest.mark.parametrize("broken", [np.nan, -np.nan, np.inf, -np.inf])
def test_a_broken_row_stays_within_the_vocabulary_and_alone(broken: float, vocab: int):
    rng = np.random.default_rng(3)
    logits = rng.normal(size=(ROWS, vocab)).astype(np.float32)
    rows = [
        Row(),
        Row(temperature=1.0),
        Row(temperature=1.0, top_k=5, top_p=0.5),
        Row(temperature=1.0, top_p=0.9, repetition=2.0, prompt=[3]),
        Row(temperature=1.0, top_k=70, min_p=0.1),
        Row(temperature=0.5, seed=4),
    ]
    before = run(logits, rows)
    for at in range(ROWS):
        bad = logits.copy()
        bad[at, 100] = broken
        if broken == -np.inf:
            bad[at] = broken
        got = run(bad, rows)
        assert 0 <= got.tokens[at] < vocab
        rest = np.arange(ROWS) != at
        np.testing.assert_array_equal(got.tokens[rest], before.tokens[rest])
        np.testing.assert_array_equal(got.finite, rest)


@pytest.mark.parametrize("vocab", [200, 600])
def test_minus_infinity_is_never_drawn(vocab: int):
    logits = np.full(vocab, -np.inf)
    logits[[3, 150]] = 0.0
    for row in (Row(temperature=100.0), Row(temperature=100.0, top_p=0.99), Row(temperature=1.0, top_k=100)):
        assert set(tokens_of(logits, row)) == {3, 150}


@pytest.mark.parametrize("vocab", [200, 600])
@pytest.mark.parametrize("changes", [{}, {"bias": {1: 0.5}}])  # in a batch of their own, and beside others
def test_greedy_ties_go_to_the_lowest_id(vocab: int, changes: dict):
    logits = np.zeros((4, vocab))
    for i, ids in enumerate([(199, 64), (65, 64), (0, 199), (63, 64)]):
        logits[i, list(ids)] = 2.0
    for row in (Row(), Row(temperature=1.0, top_k=1)):
        assert run(logits, [row.but(**changes)] * 4).tokens.tolist() == [64, 64, 0, 63]


# --- the program --------------------------------------------------------------------------------------------


def test_no_copy_of_the_counts_and_no_sort_of_the_vocabulary():
    vocab, slots = 8192, 5

    def step(logits: jax.Array, params: RowParams, counts: jax.Array, slots: jax.Array):
        got = sample(logits, params, counts, slots, max_logprobs=C)
        return got, record_output(counts, slots, got.tokens, slots >= 0)

    args = jnp.zeros((ROWS, vocab)), stack([Row()] * ROWS), new_counts(slots, vocab), jnp.arange(ROWS)
    text = jax.jit(step, donate_argnums=2).lower(*args).compile().as_text()
    assert "input_output_alias" in text
    lines = [line for line in text.splitlines() if f"s16[{slots + 1},{vocab}]" in line]
    assert lines
    assert not [line for line in lines if " copy(" in line]
    assert not [line for line in text.splitlines() if " sort(" in line and f",{vocab}]" in line]


def test_no_logprobs_compiled_for_none():
    got = jax.eval_shape(
        functools.partial(sample, max_logprobs=0),
        jnp.zeros((ROWS, 100)),
        stack([Row()] * ROWS),
        new_counts(ROWS, 100),
        jnp.arange(ROWS),
    )
    assert got.top_ids.shape == got.top_logprobs.shape == (ROWS, 0)
