"""The GPU kernels over pools of keys only, interpreted, against the reference and the oracle."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.chips import CHIPS, SMALLEST_GPU
from pallas_kernels.gpu_blocks import LEAST_ROWS, Blocks, estimate, shared_memory
from pallas_kernels.kv_update import gpu as update_gpu
from pallas_kernels.kv_update import reference as update_reference
from pallas_kernels.paged_attention import gpu
from pallas_kernels.pages import widen
from tests.kernels import oracle
from tests.kernels.cases import BOUND, paged

HEADS, WIDTH, VALUES = 6, 20, 12


def latent(rng, starts, chunks, **options):
    return paged(rng, starts, chunks, **{"heads": HEADS, "kv_heads": 1, "width": WIDTH, "latent": True, "first_page": 3,
                                         **options})


@pytest.mark.parametrize(("decode", "dtype", "k_format", "splits", "lanes", "options"), [
    (True, "float32", None, 3, 1, {"window": 5, "sinks": jnp.linspace(-2, 2, HEADS, dtype=jnp.float32)}),
    (False, "float32", "int8", 1, 32, {"soft_cap": 2.0}),
    (False, "bfloat16", "float8_e4m3fn", 3, 1, {})])
def test_it_equals_the_oracle(monkeypatch, decode, dtype, k_format, splits, lanes, options):
    """Lanes in two products, heads in two programs, several tiles, turns and splits."""
    blocks = Blocks(queries=1 if decode else 4, group=4, width=16, positions=8, splits=splits, warps=4, stages=3, rest=16,
                    parts=2)
    monkeypatch.setattr(gpu, "estimate", lambda *_, **__: blocks)
    options = {"scale": 0.3, "first_page": jnp.int32(3), "value_lanes": VALUES, "window": None, "soft_cap": None,
               "sinks": None, **options}
    run = jax.jit(functools.partial(gpu.paged_attention, **options, decode=decode, interpret=True))
    for seed, (starts, chunks) in enumerate([((0, 3, 15), (4, 1, 8)), ((8, 7, 4), (0, 13, 5))]):
        if decode:
            chunks = (1, 1, 1)
        case = latent(np.random.default_rng(seed), starts, chunks, dtype=dtype, k_format=k_format, lanes=lanes,
                      tokens=3 if decode else 20)
        got = np.asarray(run(widen(case.q, case.k_pages.data.shape[3]), *list(case)[1:]), np.float32)
        assert got.shape == (case.q.shape[0], HEADS, VALUES)
        assert np.isfinite(got).all()
        want = oracle.paged_attention(*case, **options)
        assert oracle.error(got[: case.used], want[: case.used]) < BOUND[dtype]


def test_an_update_writes_keys_only():
    rng = np.random.default_rng(0)
    case = latent(rng, [3, 8], [1, 1], k_format="int8")
    k = jnp.asarray(rng.standard_normal((2, 1, WIDTH)), jnp.float32)
    arguments, options = (case.k_pages, None, k, None, *case.sequences), {"first_page": jnp.int32(3), "decode": True}
    got, none = jax.jit(functools.partial(update_gpu.kv_update, **options, interpret=True))(*arguments)
    want, _ = update_reference.kv_update(*arguments, **options)
    assert none is None
    for new, old in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        new, old = (np.delete(np.asarray(x, np.float32), 3, 0) for x in (new, old))  # all but the null page
        np.testing.assert_array_equal(new, old)


@pytest.mark.parametrize("chip", [SMALLEST_GPU, *(chip for kind, chip in CHIPS.items() if "NVIDIA" in kind)], ids=str)
def test_blocks_fit(chip):
    """DeepSeek's keys of 576 lanes, any share of V3's 128 heads."""
    for heads in (8, 16, 96, 128):
        for dtype, fmt in (("bfloat16", "bfloat16"), ("float32", "float32"), ("bfloat16", "int8")):
            for tokens, sequences, decode in ((1, 1, True), (256, 256, True), (2048, 4, False)):
                blocks = estimate(chip, {}, tokens=tokens, sequences=sequences, decode=decode, longest=8192, group=heads,
                                  kv_heads=1, head_dim=512, rest=64, dtype=dtype, formats=(fmt,))
                needed = shared_memory(blocks.rows, blocks.width + blocks.rest, blocks.positions, blocks.stages, dtype,
                                       (fmt,))
                assert needed <= chip.vmem
                assert blocks.rows >= LEAST_ROWS
                assert blocks.parts * blocks.group >= heads
