"""The GPU kernel, interpreted, against the reference and the float64 oracle."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.flash_attention import gpu, reference
from pallas_kernels.gpu_blocks import Blocks
from tests.kernels import oracle
from tests.kernels.cases import BOUND
from tests.kernels.test_flash_attention import case

TOKENS = 32


@functools.cache
def jitted(function, window, soft_cap, with_sinks, **more):
    def run(args, sinks):
        options = {"scale": 0.3, "window": window, "soft_cap": soft_cap, "sinks": sinks if with_sinks else None}
        return function(*args, **options, **more)

    return jax.jit(run)


@pytest.mark.parametrize(("heads", "dtype", "window", "soft_cap", "with_sinks", "splits"), [
    ((4, 2), "float32", None, None, False, 1),
    ((3, 1), "float32", 5, 2.0, True, 2),
    ((2, 2), "bfloat16", 1, None, True, 1),
])
@settings(max_examples=6, deadline=None, derandomize=True)
@given(lengths=st.lists(st.sampled_from([0, 1, 3, 4, 8, 9]), min_size=3, max_size=3), seed=st.integers(0, 1000))
def test_it_equals_the_oracle(heads, dtype, window, soft_cap, with_sinks, splits, lengths, seed):
    args = case(np.random.default_rng(seed), lengths, tokens=TOKENS, heads=heads[0], kv_heads=heads[1], dtype=dtype)
    sinks, used = jnp.linspace(-2, 2, heads[0], dtype=jnp.float32), sum(lengths)
    blocks = Blocks(queries=4, group=4 if heads[1] == 1 else heads[0] // heads[1], width=16, positions=8,
                    splits=splits, warps=4, stages=3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpu, "estimate", lambda *_, **__: blocks)
        got = jitted(gpu.flash_attention, window, soft_cap, with_sinks, interpret=True)(args, sinks)
    plain = jitted(reference.flash_attention, window, soft_cap, with_sinks)(args, sinks)
    options = {"scale": 0.3, "window": window, "soft_cap": soft_cap, "sinks": sinks if with_sinks else None}
    want = oracle.flash_attention(*args, **options)[:used]
    assert not np.asarray(got[used:], np.float32).any()
    assert np.isfinite(np.asarray(got, np.float32)).all()
    assert oracle.error(got[:used], want) < BOUND[dtype]
    assert oracle.error(got[:used], np.asarray(plain[:used], np.float64)) < BOUND[dtype]
