"""Block sizes fit every chip, whatever the shapes."""

import itertools

import pytest

from pallas_kernels.chips import CHIPS, SMALLEST_GPU
from pallas_kernels.gpu_blocks import LEAST_ROWS, ROWS, estimate, shared_memory

GPUS = [SMALLEST_GPU, *(chip for kind, chip in CHIPS.items() if "NVIDIA" in kind)]
FORMATS = [("float32", "float32", "float32"), ("bfloat16", "bfloat16", "bfloat16"),
           ("bfloat16", "int8", "float8_e4m3fn"), ("float32", "int8", "int8")]


@pytest.mark.parametrize("chip", GPUS)
def test_they_fit(chip):
    widths, calls = (64, 80, 96, 128, 192, 256), ((1, 1), (2048, 4), (256, 64))
    shapes = itertools.product(widths, (1, 3, 8, 16), FORMATS, calls, (False, True))
    for head_dim, group, (dtype, *formats), (tokens, sequences), decode in shapes:
        blocks = estimate(chip, {}, tokens=tokens, sequences=tokens if decode else sequences, decode=decode,
                          longest=8192, group=group, kv_heads=8, head_dim=head_dim, dtype=dtype,
                          formats=tuple(formats))
        needed = shared_memory(blocks.rows, blocks.width, blocks.positions, blocks.stages, dtype, tuple(formats))
        assert needed <= chip.vmem
        assert LEAST_ROWS <= blocks.rows <= ROWS
        assert blocks.group >= group
        assert blocks.width >= head_dim
        assert blocks.positions >= 16
        assert blocks.splits >= 1
        assert blocks.queries == 1 or not decode


def test_few_rows_are_split_and_many_are_not():
    def splits(rows):
        return estimate(CHIPS["NVIDIA H200"], {}, tokens=rows, sequences=rows, decode=True, longest=8192, group=4,
                        kv_heads=8, head_dim=128, dtype="bfloat16", formats=("bfloat16", "bfloat16")).splits

    assert splits(1) == 32
    assert splits(256) == 1


def test_measured_values_win():
    tuned = {"rows": 64, "positions": 32, "splits": 5, "warps": 2, "stages": 4}
    blocks = estimate(SMALLEST_GPU, tuned, tokens=2048, sequences=1, decode=False, longest=8192, group=4, kv_heads=8,
                      head_dim=64, dtype="bfloat16", formats=("bfloat16", "bfloat16"))
    assert (blocks.rows, blocks.positions, blocks.splits, blocks.warps, blocks.stages) == (64, 32, 5, 2, 4)
