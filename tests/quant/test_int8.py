"""int8 quantisation against float64 NumPy."""

import jax.numpy as jnp
import numpy as np

from jinfer.models.parameter import plain
from jinfer.quant.int8 import quantised_rows
from pallas_kernels.grouped_matmul.reference import quantise_rows


class _Reader:
    def __init__(self, weight):
        self.weight = weight

    def read(self, name, index=()):
        return self.weight[index]


def test_weights_round_to_the_nearest_step_of_their_channel():
    weight = np.random.default_rng(0).standard_normal((6, 40)).astype(np.float32)
    weight[3] = 0.0
    values, scale = quantised_rows(plain("w", (6, 40), (None, None)))
    reader, everything = _Reader(weight), (slice(0, 6), slice(0, 40))
    q, s = values.read(reader, everything), scale.read(reader, everything[:1])
    assert q.dtype == np.int8
    assert s.shape == (6,)
    assert np.abs(q).max() == 127
    assert np.abs(q * s[:, None].astype(np.float64) - weight).max() <= np.abs(weight).max() / 254 + 1e-7


def test_a_shard_has_the_scale_of_its_whole_channel():
    """Cut along the inputs, every part must use the channel's one scale."""
    weight = np.random.default_rng(1).standard_normal((4, 16)).astype(np.float32)
    values, _ = quantised_rows(plain("w", (4, 16), (None, None)))
    reader = _Reader(weight)
    whole = values.read(reader, (slice(0, 4), slice(0, 16)))
    parts = [values.read(reader, (slice(1, 3), slice(i, i + 8))) for i in (0, 8)]
    np.testing.assert_array_equal(np.concatenate(parts, axis=1), whole[1:3])


def test_tokens_are_scaled_one_by_one():
    x = np.random.default_rng(2).standard_normal((5, 32)).astype(np.float32) * np.array([[1e3], [1], [1e-3], [0], [1]], np.float32)
    q, scale = quantise_rows(jnp.asarray(x))
    assert np.abs(np.asarray(q, np.float64) * np.asarray(scale)[:, None] - x).max(axis=1).tolist() <= (
        np.abs(x).max(axis=1) / 250 + 1e-12).tolist()
    assert not np.asarray(q[3]).any()
