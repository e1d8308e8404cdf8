"""The reference against the float64 oracle."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest
from jax import jit

from pallas_kernels import flash_attention
from pallas_kernels.flash_attention import reference
from tests.kernels import oracle
from tests.kernels.cases import BOUND


def case(rng, lengths, *, tokens, heads=4, kv_heads=2, width=8, dtype="float32"):
    """Packed sequences, padded to `tokens` with NaN."""
    used = sum(lengths)

    def array(count):
        x = rng.standard_normal((tokens, count, width))
        x[used:] = np.nan
        return jnp.asarray(x, dtype)

    starts = jnp.asarray(np.concatenate([[0], np.cumsum(lengths)]), jnp.int32)
    return array(heads), array(kv_heads), array(kv_heads), starts


@pytest.mark.parametrize("lengths", [[1], [7, 0, 1, 12], [20], [0, 0]])
@pytest.mark.parametrize("window", [None, 1, 5])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("pick", [0, 1, 2])
def test_it_equals_the_oracle(monkeypatch, lengths, window, dtype, pick):
    monkeypatch.setattr(reference, "TILE", 8)
    rng = np.random.default_rng(0)
    args = case(rng, lengths, tokens=21, dtype=dtype)
    options = [{}, {"soft_cap": 2.0}, {"sinks": jnp.asarray(rng.standard_normal(4), jnp.float32)}][pick]
    options |= {"scale": 0.3, "window": window}
    used = sum(lengths)
    got = jit(functools.partial(flash_attention, **options))(*args)[:used]
    assert np.isfinite(np.asarray(got, np.float32)).all()
    assert oracle.error(got, oracle.flash_attention(*args, **options)[:used]) < BOUND[dtype]


@pytest.mark.parametrize(("change", "message"), [
    (lambda q, k, v, s: (q[:, :3], k, v, s), "does not fit k"),
    (lambda q, k, v, s: (q, k, v[1:], s), "v must be"),
    (lambda q, k, v, s: (q, k, v, s.astype("float32")), "starts must be int32"),
])
def test_bad_arguments_are_named(change, message):
    with pytest.raises(ValueError, match=message):
        flash_attention(*change(*case(np.random.default_rng(0), [3], tokens=4)), scale=1.0)
