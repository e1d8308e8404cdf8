"""The TPU kernel, interpreted, against the reference and the float64 oracle."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.chips import local_chip
from pallas_kernels.flash_attention import reference, tpu
from pallas_kernels.flash_attention.tpu import Blocks
from tests.kernels import oracle
from tests.kernels.cases import BOUND
from tests.kernels.interpret import run_detecting_races
from tests.kernels.test_flash_attention import case

TOKENS = 300
# Options and blocks that meet every branch: a tile of several blocks, a block of several tiles, heads
# of a group in different tiles, several heads in a piece, several pieces in a head.
CONFIGURATIONS = {
    "plain": ((4, 2), {}, Blocks(heads=2, queries=128, keys=256)),
    "bfloat16": ((3, 1), {"dtype": "bfloat16"}, Blocks(heads=3, queries=128, keys=128)),
    "window": ((4, 2), {"window": 130, "sinks": True}, Blocks(heads=1, queries=1024, keys=128)),
    "cap": ((2, 2), {"window": 1, "soft_cap": 2.0}, Blocks(heads=1, queries=128, keys=256)),
}


@functools.cache
def prepared(name, interpret=True):
    """(heads, dtype, options, jitted kernel, jitted reference) of a configuration."""
    heads, options, blocks = CONFIGURATIONS[name]
    options = {"scale": 0.3, "window": None, "soft_cap": None, "sinks": None} | options
    dtype = options.pop("dtype", "float32")
    if options["sinks"]:
        options["sinks"] = jnp.linspace(-1.0, 6.0, heads[0], dtype=jnp.float32)
    kernel = functools.partial(tpu.flash_attention, **options, blocks=blocks, interpret=interpret)
    return heads, dtype, options, jax.jit(kernel), jax.jit(functools.partial(reference.flash_attention, **options))


def check(name, lengths, seed):
    heads, dtype, options, kernel, plain = prepared(name)
    rng = np.random.default_rng(seed)
    args = case(rng, lengths, tokens=TOKENS, heads=heads[0], kv_heads=heads[1], width=16, dtype=dtype)
    used = sum(lengths)
    got = np.asarray(kernel(*args), np.float32)[:used]
    assert np.isfinite(got).all()
    if not used:
        return
    assert oracle.error(got, np.asarray(plain(*args), np.float64)[:used]) < BOUND[dtype]
    # The oracle is slow: a few queries of each sequence, those at the edges of blocks among them.
    want = np.stack([attended(args, options, t) for t in picked(lengths)])
    assert oracle.error(got[picked(lengths)], want) < BOUND[dtype]


def picked(lengths):
    ends = np.cumsum(lengths)
    near = {t for e in (0, 128, 256, *ends) for t in (e - 1, e, e + 1)}
    return sorted(t for t in near if 0 <= t < ends[-1])


def attended(args, options, t):
    q, k, v, starts = (np.asarray(x, np.float64) for x in args)
    low = int(starts[np.searchsorted(starts, t, side="right") - 1])
    low = low if options["window"] is None else max(low, t - options["window"] + 1)
    k, v = (x[low : t + 1].transpose(1, 0, 2) for x in (k, v))
    return oracle.attend(q[t], k, v, scale=options["scale"], soft_cap=options["soft_cap"], sinks=options["sinks"])


edges = st.sampled_from([0, 1, 2, 7, 63, 64, 65, 127, 128, 129, 172])


@pytest.mark.parametrize("name", CONFIGURATIONS)
@settings(max_examples=6, deadline=None, derandomize=True)
@given(lengths=st.lists(edges, min_size=4, max_size=4).filter(lambda x: sum(x) <= TOKENS), seed=st.integers(0, 1000))
def test_packed_sequences(name, lengths, seed):
    check(name, lengths, seed)


@pytest.mark.parametrize("name", CONFIGURATIONS)
@pytest.mark.parametrize("lengths", [[TOKENS, 0, 0, 0], [0, 0, 0, 0], [128, 128, 0, 44]])
def test_whole_calls(name, lengths):
    check(name, lengths, 0)


def test_the_values_of_another_sequence_leave_no_trace():
    """Not even where a sum of them is infinite: the second sequence's tile walks a block of which it sees nothing."""
    heads, _, _, kernel, _ = prepared("bfloat16")
    q, k, v, starts = case(np.random.default_rng(0), [200, 100, 0, 0], tokens=TOKENS, heads=heads[0],
                           kv_heads=heads[1], width=16, dtype="bfloat16")
    sound, *others = (np.asarray(kernel(q, *kv, starts), np.float32)[200:300] for kv in (
        (k, v), (k, v.at[:200].set(3e38)), (k.at[:200].set(np.nan), v), (k.at[:200].set(np.inf), v)))
    for other in others:
        np.testing.assert_array_equal(other, sound)


@pytest.mark.parametrize("lengths", [[0, 0, 0, 0], [100, 0, 0, 0]])
def test_padding_is_no_nan_where_the_queries_have_none(lengths):
    """Not even in tiles that the kernel never writes."""
    heads, _, _, kernel, _ = prepared("plain")
    q, k, v, starts = case(np.random.default_rng(0), lengths, tokens=TOKENS, heads=heads[0], kv_heads=heads[1],
                           width=16)
    assert np.isfinite(np.asarray(kernel(jnp.nan_to_num(q), k, v, starts))).all()


def test_all_padding_is_no_nan_either():
    """Where a window nothing wrote would be written back."""
    heads, *_ = prepared("plain")
    q, k, v, starts = case(np.random.default_rng(0), [0, 0, 0, 0], tokens=256, heads=heads[0], kv_heads=heads[1], width=16)
    got = run_detecting_races(lambda interpret: prepared("plain", interpret)[3](jnp.nan_to_num(q), k, v, starts))
    assert np.isfinite(got).all()


@pytest.mark.parametrize("name", ["plain", "cap"])
def test_nothing_unwritten_is_read(name):
    heads, _, _, _, plain = prepared(name)
    lengths = [40, 0, 90, 20]
    args = case(np.random.default_rng(0), lengths, tokens=256, heads=heads[0], kv_heads=heads[1], width=16)
    got = run_detecting_races(lambda interpret: prepared(name, interpret)[3](*args))[:sum(lengths)]
    assert oracle.error(got, np.asarray(plain(*args), np.float64)[:sum(lengths)]) < BOUND["float32"]


@pytest.mark.parametrize(("group", "kv_heads"), [(1, 8), (4, 8), (7, 4), (8, 1), (32, 1)])
@pytest.mark.parametrize("width", [64, 80, 128, 256])
@pytest.mark.parametrize("tokens", [1, 500, 8192, 131072])
def test_blocks_fit(group, kv_heads, width, tokens):
    """Here the chip is the smallest TPU."""
    for itemsize in (2, 4):
        blocks = tpu.blocks_for(tokens, group, kv_heads, width, itemsize, None)
        assert blocks.vmem(width, itemsize) <= local_chip().vmem // 2
        assert 4 * tpu.pairs_at_most(tokens, blocks, None) <= local_chip().smem * 3 // 4
        assert group % blocks.heads == 0


def test_too_many_tokens_are_refused():
    with pytest.raises(ValueError, match="cannot plan 100000000 tokens"):
        tpu.blocks_for(10**8, 1, 1, 128, 2, None)
