"""The GPU kernel, interpreted, against the list of places the oracle makes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.kv_update import gpu
from pallas_kernels.pages import widen
from tests.kernels import oracle
from tests.kernels.cases import paged
from tests.kernels.test_kv_update import check


@functools.cache
def kernel(decode):
    return jax.jit(functools.partial(gpu.kv_update, decode=decode, interpret=True))


@pytest.mark.parametrize(("formats", "first_page", "lanes"), [
    (("float32", "float32"), None, 1), (("bfloat16", "int8"), 3, 16), (("int8", "float8_e4m3fn"), 3, 1)])
def test_it_writes_its_positions_and_no_others(monkeypatch, formats, first_page, lanes):
    monkeypatch.setattr(gpu, "PROGRAM_ELEMENTS", 16)  # two programs for three heads
    rng = np.random.default_rng(0)
    for starts, chunks, decode in (([0, 3, 8, 5], [7, 6, 0, 1], False), ([0, 3, 8], [1, 1, 1], True)):
        case = paged(rng, starts, chunks, heads=3, kv_heads=3, k_format=formats[0], v_format=formats[1],
                     first_page=first_page or 0, tokens=sum(chunks) + (0 if decode else 4), lanes=lanes)
        k, v = (widen(jnp.asarray(rng.standard_normal((case.q.shape[0], 3, 8)), jnp.float32),
                      case.k_pages.data.shape[3]) for _ in range(2))
        check(lambda *args, decode, **more: kernel(decode)(*args, **more), case, k, v, decode=decode,
              first_page=None if first_page is None else jnp.int32(first_page))


def test_a_nan_stays_a_nan_in_every_format():
    rng = np.random.default_rng(0)
    for formats in (("int8", "float8_e4m3fn"), ("float32", "float32")):
        case = paged(rng, [3, 3], [1, 1], k_format=formats[0], v_format=formats[1])
        k = jnp.asarray(rng.standard_normal((2, 2, 8)), jnp.float32).at[1, 0, 5].set(jnp.nan)
        new = kernel(True)(case.k_pages, case.v_pages, k, k, *case.sequences, first_page=None)
        for pages in new:
            values = oracle.dequantize(pages)[case.page_table[:, 0], :, 3]
            assert np.isnan(values).any(axis=-1).tolist() == [[False, False], [True, False]]


def test_an_unused_row_writes_only_to_the_null_page():
    case = paged(np.random.default_rng(0), [3, 3], [1, 1])
    case.kv_lengths = jnp.array([4, 0], jnp.int32)
    new, _ = kernel(True)(case.k_pages, case.v_pages, jnp.ones((2, 2, 8)), jnp.ones((2, 2, 8)), *case.sequences,
                          first_page=None)
    changed = ~(np.asarray(new.data == case.k_pages.data) | np.isnan(np.asarray(new.data)))
    assert changed[case.page_table[0, 0], :, 3].all()
    changed[case.page_table[0, 0], :, 3] = changed[0] = False
    assert not changed.any()


def test_halves_are_rounded_to_even():
    """Every multiple of a half up to 127, and its neighbours."""
    halves = np.arange(-254, 255, dtype=np.float32) / 2
    x = np.concatenate([halves, np.nextafter(halves, np.float32(200)), np.nextafter(halves, np.float32(-200))])
    np.testing.assert_array_equal(jax.jit(gpu._round)(x), np.round(x))
