"""The reference against the list of places the oracle makes."""

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import Pages, kv_update
from pallas_kernels.pages import quantize, widen
from tests.kernels import oracle
from tests.kernels.cases import paged


def check(update, case, k, v, *, decode=False, first_page=None):
    """Every place got its vector, quantised as `quantize` does; no other page but the null page changed."""
    new = update(case.k_pages, case.v_pages, k, v, *case.sequences, first_page=first_page, decode=decode)
    places = oracle.kv_update(case.k_pages, case.v_pages, k, v, *case.sequences, first_page=first_page)
    null = int(first_page or 0)
    for old, got, values in zip((case.k_pages, case.v_pages), new, (k, v), strict=True):
        data, scales = quantize(widen(values, old.data.shape[3]), old.data.dtype)
        for before, after, written in ((old.data, got.data, data), (old.scales, got.scales, scales)):
            if before is None:
                assert after is None
                continue
            before, after, written = (np.asarray(x.astype("float32")) for x in (before, after, written))
            want = before.copy()
            for token, page, offset in places:
                want[page, :, offset] = written[token]
            want[null], after = after[null], after
            np.testing.assert_array_equal(after, want)


@pytest.mark.parametrize("formats", [("float32", "float32"), ("bfloat16", "int8"), ("int8", "float8_e4m3fn")])
@pytest.mark.parametrize("first_page", [None, 3])
def test_it_writes_its_positions_and_no_others(formats, first_page):
    rng = np.random.default_rng(0)
    for starts, chunks, decode in (([0, 3, 8, 5], [7, 6, 0, 1], False), ([0, 3, 8], [1, 1, 1], True)):
        case = paged(rng, starts, chunks, k_format=formats[0], v_format=formats[1], first_page=first_page or 0,
                     tokens=sum(chunks) + (0 if decode else 4))
        k, v = (jnp.asarray(rng.standard_normal((case.q.shape[0], 2, 8)), jnp.float32) for _ in range(2))
        check(kv_update, case, k, v, decode=decode, first_page=None if first_page is None else jnp.int32(first_page))


def test_an_unused_row_writes_nothing_in_decode():
    case = paged(np.random.default_rng(0), [3, 3], [1, 1])
    case.kv_lengths = jnp.array([4, 0], jnp.int32)
    k = jnp.ones((2, 2, 8))
    new, _ = kv_update(case.k_pages, case.v_pages, k, k, *case.sequences, decode=True)
    page = case.page_table[0, 0]
    same = np.asarray(new.data == case.k_pages.data) | np.isnan(case.k_pages.data)
    same[0] = True
    assert not same[page, :, 3].any()
    same[page, :, 3] = True
    assert same.all()


def test_a_nan_stays_a_nan_in_every_format():
    x = jnp.array([[1.0, jnp.nan], [1.0, -2.0], [0.0, 0.0]])
    for dtype in ("bfloat16", "int8", "float8_e4m3fn"):
        data, scales = quantize(x, dtype)
        values = oracle.dequantize(Pages(data, scales))
        assert np.isnan(values[0]).any()
        np.testing.assert_allclose(values[1:], x[1:], rtol=0.07)


@pytest.mark.parametrize(("change", "message"), [
    ({"k": jnp.zeros((4, 1, 8))}, "does not fit k_pages"),
    ({"v": jnp.zeros((3, 2, 8))}, "does not fit v_pages"),
    ({"page_table": jnp.zeros((2, 3))}, "page_table must be int32"),
])
def test_bad_arguments_are_named(change, message):
    case = paged(np.random.default_rng(0), [0, 0], [2, 2])
    names = ("page_table", "query_starts", "kv_lengths")
    args = {"k": jnp.zeros((4, 2, 8)), "v": jnp.zeros((4, 2, 8)), **dict(zip(names, case.sequences, strict=True))}
    with pytest.raises(ValueError, match=message):
        kv_update(case.k_pages, case.v_pages, **{**args, **change})
