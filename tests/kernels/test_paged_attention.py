"""The reference against the float64 oracle, over drawn shapes: page edges, window edges, poisoned pages."""

import dataclasses
import functools

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import jit

from pallas_kernels import paged_attention
from pallas_kernels.paged_attention import reference
from tests.kernels import oracle
from tests.kernels.cases import BOUND, paged

FORMATS = [(None, None), ("int8", "int8"), ("float8_e4m3fn", "int8"), (None, "float8_e4m3fn")]


def draw_options(rng, heads, pick):
    """One of the combinations of options, soft cap and sinks in numbers that matter."""
    return [{}, {"soft_cap": 2.0}, {"sinks": jnp.asarray(rng.standard_normal(heads), jnp.float32)}][pick]


@settings(max_examples=14, deadline=None, derandomize=True)
@given(
    data=st.data(), window=st.sampled_from([None, 1, 5, 8]), heads=st.sampled_from([(4, 2), (3, 1), (2, 2)]),
    dtype=st.sampled_from(["float32", "bfloat16"]), formats=st.sampled_from(FORMATS), pick=st.integers(0, 2),
    seed=st.integers(0, 1000))
def test_chunks_equal_the_oracle(data, window, heads, dtype, formats, pick, seed):
    edges = st.sampled_from([0, 1, 3, 4, 5, 7, 8, 9, 15])
    starts = data.draw(st.lists(edges, min_size=3, max_size=3))
    chunks = data.draw(st.lists(st.sampled_from([0, 1, 4, 8, 9]), min_size=3, max_size=3))
    rng = np.random.default_rng(seed)
    case = paged(rng, starts, chunks, heads=heads[0], kv_heads=heads[1], dtype=dtype, k_format=formats[0],
                 v_format=formats[1], tokens=32, first_page=3)
    options = {"scale": 0.3, "window": window, "first_page": jnp.int32(3), **draw_options(rng, heads[0], pick)}
    case.forget(window)
    want = oracle.paged_attention(*case, **options)[: case.used]
    got = jit(functools.partial(paged_attention, **options))(*case)
    assert np.isfinite(np.asarray(got, np.float32)).all()
    assert oracle.error(got[: case.used], want) < BOUND[dtype]


@pytest.mark.parametrize("rows", [1, 40])
@pytest.mark.parametrize(("window", "pick"), [(None, 0), (6, 1), (6, 2)])
@pytest.mark.parametrize(("dtype", "formats"), [("float32", f) for f in FORMATS] + [("bfloat16", f) for f in FORMATS[:2]])
def test_decode_equals_the_oracle(rows, window, pick, dtype, formats):
    rng = np.random.default_rng(rows)
    starts = rng.integers(0, 23, rows).tolist()
    case = paged(rng, starts, [1] * rows, heads=6, dtype=dtype, k_format=formats[0], v_format=formats[1], first_page=2)
    options = {"scale": 0.3, "window": window, "first_page": jnp.int32(2), **draw_options(rng, 6, pick)}
    case.forget(window)
    got = jit(functools.partial(paged_attention, **options, decode=True))(*case)
    assert oracle.error(got, oracle.paged_attention(*case, **options)) < BOUND[dtype]


@pytest.mark.parametrize("decode", [False, True])
@pytest.mark.parametrize("formats", FORMATS[:2])
def test_several_blocks_and_tiles(monkeypatch, decode, formats):
    for name, value in (("DECODE_PAGES", 3), ("CHUNK_BLOCK", 8), ("CHUNK_QUERIES", 4)):
        monkeypatch.setattr(reference, name, value)
    rng = np.random.default_rng(0)
    starts, chunks = ([30, 0, 17], [1, 1, 1]) if decode else ([11, 0, 17], [13, 6, 3])
    case = paged(rng, starts, chunks, pages_per_row=9, k_format=formats[0], v_format=formats[1])
    for window, pick in ((None, 0), (7, 1), (7, 2)):
        options = {"scale": 0.3, "window": window, **draw_options(rng, 4, pick)}
        case.forget(window)
        got = paged_attention(*case, **options, decode=decode)
        assert oracle.error(got, oracle.paged_attention(*case, **options)) < 1e-5


def test_an_empty_row_gives_zeros_in_decode():
    case = paged(np.random.default_rng(0), [3, 3], [1, 1], heads=2, kv_heads=1, pages_per_row=2)
    case.kv_lengths = jnp.array([4, 0], jnp.int32)
    for sinks in (None, jnp.ones(2)):
        got = paged_attention(*case, scale=1.0, sinks=sinks, decode=True)
        assert np.isfinite(np.asarray(got)).all()
        assert not np.asarray(got[1]).any()


@pytest.mark.parametrize(("change", "message"), [
    (lambda c: {"q": c.q[:, :3]}, "does not fit pages"),
    (lambda c: {"q": c.q.astype("int32")}, "q must be float32"),
    (lambda c: {"kv_lengths": c.kv_lengths.astype("float32")}, "kv_lengths must be int32"),
    (lambda c: {"query_starts": c.query_starts[1:]}, "query_starts must be int32"),
    (lambda c: {"v_pages": c.v_pages._replace(data=c.v_pages.data[1:])}, "v_pages.data must have the shape"),
    (lambda c: {"k_pages": c.k_pages._replace(data=c.k_pages.data.astype("int8"))}, "k_pages.scales must be given"),
    (lambda c: {"k_pages": c.k_pages._replace(data=c.k_pages.data.astype("int16"))}, "k_pages.data must be one of"),
])
def test_bad_arguments_are_named(change, message):
    case = paged(np.random.default_rng(0), [0, 0], [2, 2], pages_per_row=2)
    with pytest.raises(ValueError, match=message):
        paged_attention(*dataclasses.replace(case, **change(case)), scale=1.0)


@pytest.mark.parametrize(("options", "message"), [
    ({"window": 0}, "window must be at least 1"),
    ({"soft_cap": 0.0}, "soft_cap must be positive"),
    ({"sinks": jnp.zeros(3)}, r"sinks must be float32 \[4\]"),
    ({"first_page": jnp.zeros(2, jnp.int32)}, "first_page must be int32"),
    ({"implementation": "cuda"}, "implementation must be"),
    ({"decode": True}, "decode wants one query a sequence"),
])
def test_bad_options_are_named(options, message):
    case = paged(np.random.default_rng(0), [0, 0], [2, 2], pages_per_row=2)
    with pytest.raises(ValueError, match=message):
        paged_attention(*case, scale=1.0, **options)


@pytest.mark.parametrize("decode", [False, True])
def test_a_broken_sequence_breaks_only_itself(decode):
    """A NaN that is really visible to one sequence must show there, and nowhere else."""
    starts, chunks = ([5, 9, 2], [1, 1, 1]) if decode else ([0, 3, 0], [5, 4, 6])
    case = paged(np.random.default_rng(0), starts, chunks, pages_per_row=4)
    sound = np.asarray(paged_attention(*case, scale=0.3, decode=decode))
    page = case.page_table[1, 0]
    for field in ("k_pages", "v_pages"):
        pool = broken(getattr(case, field), page)
        got = np.asarray(paged_attention(*dataclasses.replace(case, **{field: pool}), scale=0.3, decode=decode))
        mine = range(int(case.query_starts[1]), int(case.query_starts[2]))
        assert np.isnan(got[mine]).any(axis=(1, 2)).all()
        np.testing.assert_array_equal(np.delete(got, mine, 0), np.delete(sound, mine, 0))


def broken(pages, page):
    return pages._replace(data=pages.data.at[page, :, 0].set(np.nan))
