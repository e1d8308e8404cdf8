"""Rotary embedding against tables made with transformers 5.24 (tests/data/golden/rope_inv_freq.json)."""

import dataclasses
import json
import math
from pathlib import Path

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jinfer.config.model import RopeConfig
from jinfer.models.rope import cos_sin, dynamic_theta, inverse_frequencies, rotate
from jinfer.weights.hf_config import read_hf_config

DATA = Path(__file__).parents[1] / "data"
GOLDEN = json.loads((DATA / "golden/rope_inv_freq.json").read_text())
LLAMAS = [name for name in GOLDEN if (DATA / "models" / name).is_dir()]


def test_the_table_covers_every_kind():
    kinds = {GOLDEN[name]["rope_type"] for name in LLAMAS}
    assert kinds == {"default", "linear", "dynamic", "yarn", "llama3"}


@pytest.mark.parametrize("length", [12, 96])
@pytest.mark.parametrize("name", LLAMAS)
def test_tables_match_transformers(name, length):
    config = read_hf_config(DATA / "models" / name)
    want = GOLDEN[name][f"length_{length}"]
    positions = np.arange(length, dtype=np.int32)
    lengths = jnp.full(length, length, jnp.int32)
    cos, sin = cos_sin(config.rope, config.head_dim, jnp.asarray(positions), lengths)
    angles = positions[:, None] * np.asarray(want["inv_freq"])
    np.testing.assert_allclose(cos, np.cos(angles) * want["attention_factor"], atol=2e-5)
    np.testing.assert_allclose(sin, np.sin(angles) * want["attention_factor"], atol=2e-5)


@pytest.mark.parametrize("name", LLAMAS)
def test_static_frequencies_match_transformers(name):
    config = read_hf_config(DATA / "models" / name)
    want = GOLDEN[name]["length_12"]
    inverse, factor = inverse_frequencies(config.rope, config.head_dim)
    assert inverse.dtype == np.float32
    np.testing.assert_allclose(inverse, want["inv_freq"], rtol=1e-6)
    assert factor == pytest.approx(want["attention_factor"], rel=1e-6)


def test_partial_rotation_uses_the_rotated_lanes_only():
    inverse, _ = inverse_frequencies(RopeConfig(partial=0.5), 8)
    np.testing.assert_allclose(inverse, GOLDEN["phi3_partial"]["length_12"]["inv_freq"], rtol=1e-6)


def test_dynamic_theta_follows_each_token_s_own_sequence():
    rope = RopeConfig(kind="dynamic", factor=2.0, original_context=32)
    lengths = jnp.asarray([1, 32, 33, 96])
    want = [1e4 * (2 * max(n, 32) / 32 - 1) ** (8 / 6) for n in (1, 32, 33, 96)]
    np.testing.assert_allclose(dynamic_theta(rope, 8, lengths), want, rtol=1e-5)
    # decode at position 40 of a prompt of 12: length 41; inside a prompt of 96: length 96
    cos, _ = cos_sin(rope, 8, jnp.asarray([40, 40]), jnp.asarray([12, 96]))
    for row, length in zip(cos, (41, 96), strict=True):
        theta = 1e4 * (2 * length / 32 - 1) ** (8 / 6)
        np.testing.assert_allclose(row, np.cos(40 * theta ** -(np.arange(0, 8, 2) / 8)), atol=2e-5)


def test_llama3_bands():
    """Against the formula per wavelength as Meta published it, at the real Llama 3.1 values."""
    rope = RopeConfig(theta=5e5, kind="llama3", factor=8.0, original_context=8192)
    inverse, factor = inverse_frequencies(rope, 128)
    assert factor == 1.0
    for lane, got in enumerate(inverse):
        plain = 5e5 ** (-2 * lane / 128)
        wavelength = 2 * math.pi / plain
        if wavelength < 8192 / 4:
            want = plain
        elif wavelength > 8192:
            want = plain / 8
        else:
            smooth = (8192 / wavelength - 1) / (4 - 1)
            want = (1 - smooth) * plain / 8 + smooth * plain
        assert got == pytest.approx(want, rel=1e-6)


def test_yarn_without_truncation_keeps_the_exact_bounds():
    rope = RopeConfig(kind="yarn", factor=4.0, original_context=4096)
    rounded, _ = inverse_frequencies(rope, 64)
    exact, _ = inverse_frequencies(dataclasses.replace(rope, truncate=False), 64)
    low, high = (64 * math.log(4096 / (turns * 2 * math.pi)) / (2 * math.log(1e4)) for turns in (32.0, 1.0))
    plain = 1e4 ** -(np.arange(0, 64, 2) / 64)
    ramp = np.clip((np.arange(32) - low) / (high - low), 0, 1)
    np.testing.assert_allclose(exact, plain / 4 * ramp + plain * (1 - ramp), rtol=1e-6)
    assert np.abs(rounded - exact).max() > 1e-4


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_rotation_pairs_the_two_halves_as_complex_numbers(dtype):
    rng = np.random.default_rng(0)
    x = rng.standard_normal((5, 2, 3, 10)).astype(dtype)
    angle = rng.uniform(-3, 3, (5, 4)).astype(np.float32)
    got = rotate(jnp.asarray(x), jnp.cos(angle), jnp.sin(angle))
    assert got.dtype == dtype
    wide = x.astype(np.float64)
    turned = (wide[..., :4] + 1j * wide[..., 4:8]) * np.exp(1j * angle)[:, None, None]
    want = np.concatenate([turned.real, turned.imag, wide[..., 8:]], -1)
    np.testing.assert_allclose(np.asarray(got, np.float64), want, atol=1e-5 if dtype == np.float32 else 0.02)
    np.testing.assert_array_equal(got[..., 8:], x[..., 8:])  # lanes past R pass untouched
