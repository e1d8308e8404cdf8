"""Layers against float64 NumPy where precision matters (case C24)."""

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jinfer.models.layers import RMSNorm


@pytest.mark.parametrize("size", [1e3, 1.0, 1e-3])
def test_the_norm_is_float32_inside(size):
    rng = np.random.default_rng(0)
    x = (rng.standard_normal((4, 96)) * size).astype(ml_dtypes.bfloat16)
    weight = rng.standard_normal(96).astype(np.float32)
    norm = RMSNorm(jnp.asarray(weight), 1e-6)
    got = np.asarray(norm(jnp.asarray(x)), np.float64)
    wide = x.astype(np.float64)
    want = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-6) * weight
    assert np.abs(got / want - 1).max() < 2**-8  # one rounding to bfloat16 at the end, none before
