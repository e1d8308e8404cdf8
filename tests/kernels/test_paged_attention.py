"""The reference against the float64 oracle, over drawn shapes: page edges, window edges, poisoned pages."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import jit

from pallas_kernels import kv_update, paged_attention
from pallas_kernels.paged_attention import reference
from tests.kernels import oracle


def _case(rng, starts, chunks, *, heads, kv_heads, width, page_size, pages_per_row, dtype, tokens):
    """Pages with NaN wherever no sequence wrote, a shuffled page table, packed queries."""
    rows = len(starts)
    pool = rows * pages_per_row + 1
    k_pages = np.full((pool, kv_heads, page_size, width), np.nan, np.float32)
    v_pages = k_pages.copy()
    page_table = (1 + rng.permutation(pool - 1)).reshape(rows, pages_per_row).astype(np.int32)
    lengths = np.array([s + c for s, c in zip(starts, chunks, strict=True)], np.int32)
    for row, length in enumerate(lengths):
        for position in range(length):
            page, offset = page_table[row, position // page_size], position % page_size
            k_pages[page, :, offset] = rng.standard_normal((kv_heads, width))
            v_pages[page, :, offset] = rng.standard_normal((kv_heads, width))
    query_starts = np.concatenate([[0], np.cumsum(chunks)]).astype(np.int32)
    q = rng.standard_normal((tokens, heads, width)).astype(np.float32)
    cast = functools.partial(jnp.asarray, dtype=dtype)
    return cast(q), cast(k_pages), cast(v_pages), jnp.asarray(page_table), jnp.asarray(query_starts), jnp.asarray(lengths)


def _error(got, want):
    return np.linalg.norm(np.asarray(got, np.float64) - want) / max(np.linalg.norm(want), 1e-30)


@settings(max_examples=12, deadline=None, derandomize=True)
@given(
    data=st.data(), window=st.sampled_from([None, 1, 5, 8]), heads=st.sampled_from([(4, 2), (3, 1), (2, 2)]),
    dtype=st.sampled_from(["float32", "bfloat16"]), seed=st.integers(0, 1000))
def test_chunks_equal_the_oracle(data, window, heads, dtype, seed):
    edges = st.sampled_from([0, 1, 3, 4, 5, 7, 8, 9, 15])
    starts = data.draw(st.lists(edges, min_size=3, max_size=3))
    chunks = data.draw(st.lists(st.sampled_from([0, 1, 4, 8, 9]), min_size=3, max_size=3))
    args = _case(np.random.default_rng(seed), starts, chunks, heads=heads[0], kv_heads=heads[1], width=8,
                 page_size=4, pages_per_row=6, dtype=dtype, tokens=32)
    run = jit(functools.partial(paged_attention, scale=0.3, window=window))
    used = sum(chunks)
    want = oracle.paged_attention(*args, scale=0.3, window=window)[:used]
    got = run(*args)
    assert np.isfinite(np.asarray(got, np.float32)).all()
    assert _error(got[:used], want) < (1e-5 if dtype == "float32" else 1e-2)


@pytest.mark.parametrize("rows", [1, 5, 40])
@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_decode_equals_the_oracle(rows, window, dtype):
    rng = np.random.default_rng(rows)
    starts = rng.integers(0, 23, rows).tolist()
    args = _case(rng, starts, [1] * rows, heads=6, kv_heads=2, width=8, page_size=4, pages_per_row=6, dtype=dtype,
                 tokens=rows)
    got = jit(functools.partial(paged_attention, scale=0.3, window=window, decode=True))(*args)
    want = oracle.paged_attention(*args, scale=0.3, window=window)
    assert _error(got, want) < (1e-5 if dtype == "float32" else 1e-2)


@pytest.mark.parametrize("decode", [False, True])
def test_several_blocks_and_tiles(monkeypatch, decode):
    for name, value in (("DECODE_PAGES", 3), ("CHUNK_BLOCK", 8), ("CHUNK_QUERIES", 4)):
        monkeypatch.setattr(reference, name, value)
    rng = np.random.default_rng(0)
    starts, chunks = ([30, 0, 17], [1, 1, 1]) if decode else ([11, 0, 17], [13, 6, 3])
    args = _case(rng, starts, chunks, heads=4, kv_heads=2, width=8, page_size=4, pages_per_row=9, dtype="float32",
                 tokens=sum(chunks))
    for window in (None, 7):
        got = paged_attention(*args, scale=0.3, window=window, decode=decode)
        assert _error(got, oracle.paged_attention(*args, scale=0.3, window=window)) < 1e-5


def test_an_empty_row_gives_zeros_in_decode():
    q, k, v, table, starts, _ = _case(np.random.default_rng(0), [3, 3], [1, 1], heads=2, kv_heads=1, width=8, page_size=4,
                                      pages_per_row=2, dtype="float32", tokens=2)
    got = paged_attention(q, k, v, table, starts, jnp.array([4, 0], jnp.int32), scale=1.0, decode=True)
    assert np.isfinite(np.asarray(got)).all()
    assert not np.asarray(got[1]).any()


def test_kv_update_writes_only_its_positions():
    rng = np.random.default_rng(0)
    k_pages, v_pages = (jnp.asarray(rng.standard_normal((5, 2, 4, 8)), "float32") for _ in range(2))
    k, v = (jnp.asarray(rng.standard_normal((3, 2, 8)), "float32") for _ in range(2))
    pages, offsets = jnp.array([3, 3, 1], jnp.int32), jnp.array([2, 3, 0], jnp.int32)
    new_k, new_v = kv_update(k_pages, v_pages, k, v, pages, offsets)
    for new, old, values in ((new_k, k_pages, k), (new_v, v_pages, v)):
        want = np.array(old)
        for t in range(3):
            want[pages[t], :, offsets[t]] = values[t]
        np.testing.assert_array_equal(new, want)


@pytest.mark.parametrize(("change", "message"), [
    (lambda a: a | {"q": a["q"][:, :3]}, "does not fit pages"),
    (lambda a: a | {"kv_lengths": a["kv_lengths"].astype("float32")}, "kv_lengths must be int32"),
    (lambda a: a | {"query_starts": a["query_starts"][1:]}, "query_starts must be int32"),
    (lambda a: a | {"v_pages": a["v_pages"][1:]}, "equal pools"),
])
def test_bad_shapes_are_named(change, message):
    names = ("q", "k_pages", "v_pages", "page_table", "query_starts", "kv_lengths")
    args = dict(zip(names, _case(np.random.default_rng(0), [0, 0], [2, 2], heads=4, kv_heads=2, width=8, page_size=4,
                                 pages_per_row=2, dtype="float32", tokens=4), strict=True))
    with pytest.raises(ValueError, match=message):
        paged_attention(**change(args), scale=1.0)


@pytest.mark.parametrize("decode", [False, True])
def test_a_broken_sequence_breaks_only_itself(decode):
    """A NaN that is really visible to one sequence must show there, and nowhere else."""
    starts, chunks = ([5, 9, 2], [1, 1, 1]) if decode else ([0, 3, 0], [5, 4, 6])
    q, k, v, table, begins, lengths = _case(np.random.default_rng(0), starts, chunks, heads=4, kv_heads=2, width=8, page_size=4,
                                            pages_per_row=4, dtype="float32", tokens=sum(chunks))
    args = (table, begins, lengths)
    sound = np.asarray(paged_attention(q, k, v, *args, scale=0.3, decode=decode))
    for pools in ((k.at[table[1, 0], :, 0].set(np.nan), v), (k, v.at[table[1, 0], :, 0].set(np.nan))):
        got = np.asarray(paged_attention(q, *pools, *args, scale=0.3, decode=decode))
        mine = slice(int(begins[1]), int(begins[2]))
        assert np.isnan(got[mine]).any(axis=(1, 2)).all()
        np.testing.assert_array_equal(np.delete(got, range(mine.start, mine.stop), 0), np.delete(sound, range(mine.start, mine.stop), 0))
