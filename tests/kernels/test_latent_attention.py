"""Latent attention (keys whose first lanes are the values), the reference against the float64 oracle."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import kv_update, paged_attention
from pallas_kernels.paged_attention import reference
from pallas_kernels.pages import quantize
from tests.kernels import oracle
from tests.kernels.cases import BOUND, paged

WIDTH, VALUES = 24, 16


def latent(rng, starts, chunks, **options):
    return paged(rng, starts, chunks, **{"kv_heads": 1, "width": WIDTH, "latent": True, "first_page": 3, **options})


@pytest.mark.parametrize("decode", [False, True])
@pytest.mark.parametrize(("dtype", "k_format", "options"), [
    ("float32", None, {"window": 5, "sinks": jnp.linspace(-2, 2, 4, dtype=jnp.float32)}),
    ("float32", "int8", {"soft_cap": 2.0}), ("bfloat16", None, {})])
def test_it_equals_the_oracle(monkeypatch, decode, dtype, k_format, options):
    for name, value in (("DECODE_PAGES", 3), ("CHUNK_BLOCK", 8), ("CHUNK_QUERIES", 4)):
        monkeypatch.setattr(reference, name, value)
    options = {"scale": 0.3, "first_page": jnp.int32(3), "value_lanes": VALUES, **options}
    run = jax.jit(functools.partial(paged_attention, **options, decode=decode))
    for seed, (starts, chunks) in enumerate([((0, 3, 15), (4, 1, 8)), ((8, 7, 4), (0, 13, 5))]):
        if decode:
            chunks = (1, 1, 1)
        case = latent(np.random.default_rng(seed), starts, chunks, dtype=dtype, k_format=k_format,
                      tokens=3 if decode else 20)
        got = np.asarray(run(*case), np.float32)
        assert got.shape == (case.q.shape[0], 4, VALUES)
        assert np.isfinite(got).all()
        want = oracle.paged_attention(*case, **options)
        assert oracle.error(got[: case.used], want[: case.used]) < BOUND[dtype]


@pytest.mark.parametrize(("fmt", "decode"), [("float32", True), ("int8", False)])
def test_an_update_writes_keys_only(fmt, decode):
    rng = np.random.default_rng(0)
    case = latent(rng, [3, 8], [1, 1] if decode else [4, 2], k_format=fmt)
    k = jnp.asarray(rng.standard_normal((case.q.shape[0], 1, WIDTH)), jnp.float32)
    new, none = kv_update(case.k_pages, None, k, None, *case.sequences, first_page=jnp.int32(3), decode=decode)
    assert none is None
    data, scales = quantize(k, fmt)
    want = [None if x is None else np.array(x) for x in case.k_pages]
    for token, page, offset in oracle.kv_update(case.k_pages, None, k, None, *case.sequences, first_page=3):
        for pool, written in zip(want, (data, scales), strict=True):
            if pool is not None:
                pool[page, :, offset] = written[token]
    for got, pool in zip(new, want, strict=True):
        np.testing.assert_array_equal(got, pool)


@pytest.mark.parametrize(("change", "message"), [
    ({"value_lanes": None}, "value_lanes must be given without v_pages"),
    ({"value_lanes": 25}, "value_lanes must be between 1 and H=24"),
    ({"value_lanes": 0}, "value_lanes must be between 1 and H=24"),
])
def test_bad_arguments_are_named(change, message):
    case = latent(np.random.default_rng(0), [0], [2])
    with pytest.raises(ValueError, match=message):
        paged_attention(*case, **{"scale": 1.0, "value_lanes": VALUES, **change})


def test_values_of_their_own_take_no_lanes():
    case = paged(np.random.default_rng(0), [0], [2])
    with pytest.raises(ValueError, match="value_lanes must be given without v_pages"):
        paged_attention(*case, scale=1.0, value_lanes=4)
    with pytest.raises(ValueError, match="v must be given with v_pages"):
        kv_update(case.k_pages, None, case.q[:, :2], case.q[:, :2], *case.sequences)
