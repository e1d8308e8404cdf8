"""The TPU kernel, interpreted, against the reference and the float64 oracle."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels import chips
from pallas_kernels.grouped_matmul import reference, tpu
from pallas_kernels.grouped_matmul.pairs import pairs
from pallas_kernels.grouped_matmul.tpu import Blocks
from tests.kernels.interpret import run_detecting_races
from tests.kernels.oracle import error
from tests.kernels.test_grouped_matmul import BOUND, make, oracle

ROWS, GROUPS = 90, 6
# Weights, their order, O and I, and blocks that meet every branch: columns that end in a part of a block, several
# turns over the inputs, a block of all rows.
CONFIGURATIONS = {
    "float32": ("float32", True, 200, 64, Blocks(32, 128, 64)),
    "bfloat16": ("bfloat16", False, 128, 256, Blocks(32, 128, 128)),
    "int8": ("int8", False, 200, 256, Blocks(96, 128, 128)),
    "int8 inputs first": ("int8", True, 128, 32, None),
}


@functools.cache
def prepared(name, interpret=True):
    """(kernel, reference), jitted."""
    _, inputs_first, _, _, blocks = CONFIGURATIONS[name]
    kernel = functools.partial(tpu.grouped_matmul, inputs_first=inputs_first, blocks=blocks, interpret=interpret)
    return jax.jit(kernel), jax.jit(functools.partial(reference.grouped_matmul, inputs_first=inputs_first))


def arguments(name, sizes, seed):
    dtype, inputs_first, outputs, inputs, _ = CONFIGURATIONS[name]
    return make(np.random.default_rng(seed), sizes, ROWS, inputs, outputs, dtype, inputs_first=inputs_first)


def check(name, sizes, seed):
    *args, scales = arguments(name, sizes, seed)
    kernel, plain = prepared(name)
    used = sum(sizes)
    got = np.asarray(kernel(*args, scales=scales))
    assert got.shape[0] == ROWS
    if used:
        assert error(got[:used], np.asarray(plain(*args, scales=scales), np.float64)[:used]) < BOUND
        want = oracle(*args, scales, inputs_first=CONFIGURATIONS[name][1])
        assert error(got[:used], want[:used]) < BOUND


@pytest.mark.parametrize("name", CONFIGURATIONS)
@settings(max_examples=6, deadline=None, derandomize=True)
@given(sizes=st.lists(st.sampled_from([0, 0, 1, 2, 15, 31, 32, 33]), min_size=GROUPS, max_size=GROUPS)
       .filter(lambda x: sum(x) <= ROWS), seed=st.integers(0, 99))
def test_rows_meet_their_own_matrix(name, sizes, seed):
    check(name, sizes, seed)


@pytest.mark.parametrize("name", CONFIGURATIONS)
@pytest.mark.parametrize("sizes", [[ROWS, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0], [32, 32, 0, 0, 25, 1]])
def test_whole_calls(name, sizes):
    check(name, sizes, 0)


@pytest.mark.parametrize("name", ["bfloat16", "int8 inputs first"])
def test_nothing_unwritten_is_read(name):
    sizes = [3, 0, 40, 2, 0, 0]
    *args, scales = arguments(name, sizes, 0)
    got = run_detecting_races(lambda interpret: prepared(name, interpret)[0](*args, scales=scales))[:sum(sizes)]
    assert error(got, oracle(*args, scales, inputs_first=CONFIGURATIONS[name][1])[:sum(sizes)]) < BOUND


def test_pairs_are_those_that_meet():
    rng, find = np.random.default_rng(0), jax.jit(functools.partial(pairs, rows=8, blocks=12))
    for _ in range(20):
        sizes = rng.integers(0, 12, 8) * rng.integers(0, 2, 8)
        starts = np.concatenate([[0], np.cumsum(sizes)])
        want = [(g, b) for g in range(8) for b in range(12)
                if max(starts[g], 8 * b) < min(starts[g + 1], 8 * b + 8)] or [None]
        group, block, count = find(jnp.asarray(starts, jnp.int32))
        assert int(count) == len(want)
        assert group.shape[0] >= len(want)
        if want != [None]:
            assert list(zip(group[:count].tolist(), block[:count].tolist(), strict=True)) == want


@pytest.mark.parametrize(("outputs", "inputs"), [(1536, 2048), (2048, 768), (28672, 4096), (4096, 14336), (5760, 2880),
                                                 (20, 24)])
@pytest.mark.parametrize("rows", [1, 64, 4096])
def test_blocks_fit_the_smallest_chip(rows, outputs, inputs, monkeypatch):
    monkeypatch.setattr(tpu, "local_chip", lambda: chips.SMALLEST_TPU)
    for itemsize in (1, 2, 4):
        blocks = tpu.blocks_for(rows, outputs, inputs, itemsize)
        assert blocks.vmem(itemsize) <= chips.SMALLEST_TPU.vmem // 2
        assert inputs % blocks.inputs == 0
        assert blocks.outputs == outputs or blocks.outputs % 128 == 0
    monkeypatch.setattr(tpu, "local_chip", lambda: dataclasses.replace(chips.SMALLEST_TPU, vmem=4096))
    with pytest.raises(ValueError, match="cannot plan"):
        tpu.blocks_for(rows, outputs, inputs, 2)
