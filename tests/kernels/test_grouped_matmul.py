"""The reference and the GPU kernel, interpreted, against float64 NumPy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import grouped_matmul
from pallas_kernels.grouped_matmul import gpu
from pallas_kernels.grouped_matmul.reference import block_rows, quantise_rows
from tests.kernels.oracle import error

BOUND = 1e-6  # against what the formats hold: products are added up in float32


def make(rng, sizes, rows, inputs, outputs, dtype, *, inputs_first=False):
    """(x, weights, group_sizes, scales): padding rows hold NaN, and so do the matrices of groups without rows."""
    x = rng.standard_normal((rows, inputs)).astype(np.float32)
    x[sum(sizes):] = np.nan
    weights = rng.standard_normal((len(sizes), outputs, inputs)).astype(np.float32)
    scales = None
    if dtype == "int8":
        scales = jnp.asarray(np.abs(weights).max(axis=2) / 127)
        weights = np.rint(weights / np.asarray(scales)[:, :, None])
    else:
        weights[np.array(sizes) == 0] = np.nan
    weights = weights.swapaxes(1, 2) if inputs_first else weights
    activations = "float32" if dtype == "int8" else dtype
    return jnp.asarray(x, activations), jnp.asarray(weights, dtype), jnp.asarray(sizes, jnp.int32), scales


def oracle(x, weights, group_sizes, scales, *, inputs_first):
    """float64 [T, O]: row by row; NaN for padding."""
    if scales is not None:
        values, row_scales = quantise_rows(x)
        x = np.asarray(values, np.float64) * np.asarray(row_scales, np.float64)[:, None]
    x, weights = np.asarray(x).astype(np.float64), np.asarray(weights).astype(np.float64)
    weights = weights.swapaxes(1, 2) if inputs_first else weights
    out = np.full((x.shape[0], weights.shape[1]), np.nan)
    row = 0
    for group, size in enumerate(group_sizes):
        for _ in range(int(size)):
            out[row] = weights[group] @ x[row] * (1 if scales is None else np.asarray(scales[group], np.float64))
            row += 1
    return out


SIZES = [[0, 37, 1, 0, 5, 16, 0, 3], [1] * 8, [0, 0, 0, 70, 0, 0, 0, 0], [0] * 7 + [1], [0] * 8]


@pytest.mark.parametrize("implementation", ["reference", "gpu"])
@pytest.mark.parametrize(("dtype", "inputs_first"), [("float32", True), ("float32", False), ("bfloat16", False),
                                                     ("int8", False), ("int8", True)])
def test_rows_meet_their_own_matrix(implementation, dtype, inputs_first):
    rng = np.random.default_rng(0)
    function = functools.partial(gpu.grouped_matmul, interpret=True) if implementation == "gpu" else grouped_matmul
    run = jax.jit(functools.partial(function, inputs_first=inputs_first))
    for sizes in SIZES:
        x, weights, group_sizes, scales = make(rng, sizes, 70, 24, 20, dtype, inputs_first=inputs_first)
        got, used = run(x, weights, group_sizes, scales=scales), sum(sizes)
        want = oracle(x, weights, group_sizes, scales, inputs_first=inputs_first)
        assert got.shape == (70, 20)
        assert got.dtype == jnp.float32
        assert np.isfinite(got[:used]).all()
        assert used == 0 or error(got[:used], want[:used]) < BOUND


def test_a_row_does_not_feel_the_others():
    """The same rows in a different company, with the same block size and with another."""
    rng = np.random.default_rng(1)
    x, weights, _, _ = make(rng, [9] * 6, 54, 64, 48, "float32")
    rows = [x[9 * g] for g in range(6)]
    alone = [np.asarray(grouped_matmul(rows[g][None], weights, jnp.eye(6, dtype=jnp.int32)[g]))[0] for g in range(6)]
    together = np.asarray(grouped_matmul(x, weights, jnp.full(6, 9, jnp.int32)))[::9]
    sparse = np.asarray(grouped_matmul(jnp.stack(rows), weights, jnp.ones(6, jnp.int32)))
    np.testing.assert_allclose(together, alone, rtol=2e-6, atol=2e-6)
    np.testing.assert_allclose(sparse, alone, rtol=2e-6, atol=2e-6)


def test_the_work_follows_the_rows_and_not_the_groups():
    """No temporary of the size of the stack, and blocks that grow with the rows of a group."""
    shape = jax.ShapeDtypeStruct
    arguments = shape((64, 256), jnp.float32), shape((128, 256, 128), jnp.float32), shape((128,), jnp.int32)
    compiled = jax.jit(functools.partial(grouped_matmul, inputs_first=True)).lower(*arguments).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 3 * 256 * 128 * 4
    assert [block_rows(rows, 8, quantised=False) for rows in (2, 8, 16, 64, 128, 1024)] == [1, 2, 4, 16, 32, 64]


@pytest.mark.parametrize(("change", "message"), [
    ({"x": jnp.zeros((4, 5))}, "x .* does not fit weights"),
    ({"x": jnp.zeros((4, 6), jnp.int8)}, "x must be float32"),
    ({"x": jnp.zeros((0, 6))}, "a row at least"),
    ({"weights": jnp.zeros((2, 3, 6), jnp.int8)}, "scales must come with int8"),
    ({"weights": jnp.zeros((2, 3, 6), jnp.int32)}, "weights must be float32"),
    ({"group_sizes": jnp.zeros(3, jnp.int32)}, r"group_sizes must be int32 \[2\]"),
    ({"group_sizes": jnp.zeros(2)}, r"group_sizes must be int32 \[2\]"),
    ({"scales": jnp.ones((2, 3))}, "scales must come with int8"),
    ({"weights": jnp.zeros((2, 3, 6), jnp.int8), "scales": jnp.ones((2, 6))}, r"scales must be float32 \[2, 3\]"),
])
def test_bad_arguments_are_named(change, message):
    arguments = {"x": jnp.zeros((4, 6)), "weights": jnp.zeros((2, 3, 6)), "group_sizes": jnp.zeros(2, jnp.int32)}
    with pytest.raises(ValueError, match=message):
        grouped_matmul(**{**arguments, **change})
