"""The TPU kernels over pools of keys only, in both interpreters; their block sizes; what the compiler makes of them."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.chips import CHIPS
from pallas_kernels.kv_update import reference as update_reference
from pallas_kernels.kv_update import tpu as update_tpu
from pallas_kernels.paged_attention import reference, tpu
from pallas_kernels.paged_attention.blocks import VMEM_SHARE, choose
from pallas_kernels.pages import widen
from tests.kernels import oracle
from tests.kernels.cases import BOUND, paged
from tests.kernels.interpret import run_detecting_races

HEADS, WIDTH, LANES, VALUES, PAGE, ROW_PAGES, TOKENS, FIRST_PAGE = 6, 160, 256, 96, 32, 5, 40, 2
EDGES = [0, 1, 31, 32, 33, 64, 65, 100]
# dtype of q, format of k, options: each is one program, run over many lengths.
CONFIGS = {
    "float32": ("float32", None, {"window": 40, "sinks": jnp.linspace(-2, 2, HEADS, dtype=jnp.float32)}),
    "bfloat16": ("bfloat16", None, {}),
    "quantised": ("float32", "int8", {"soft_cap": 2.0}),
}


def latent(rng, starts, chunks, dtype, k_format, **options):
    return paged(rng, starts, chunks, **{
        "heads": HEADS, "kv_heads": 1, "width": WIDTH, "page_size": PAGE, "pages_per_row": ROW_PAGES, "dtype": dtype,
        "k_format": k_format, "first_page": FIRST_PAGE, "lanes": 128, "latent": True, **options})


@functools.cache
def program(name, decode, module=tpu):
    """The operation as api.py calls it; groups of three heads; in decode strips of one page, two or four a block, else
    windows of 16 queries and two pages a block."""
    options = {"scale": 0.1, "window": None, "soft_cap": None, "sinks": None, "first_page": jnp.int32(FIRST_PAGE),
               "value_lanes": VALUES, **CONFIGS[name][2]}
    interpret = {"interpret": True} if module is tpu else {}
    pages = 4 if decode and name == "bfloat16" else 2
    sizes = {"parts": 2, "pages": pages} | ({"depth": 3, "strip": 1} if decode else {"queries": 16})

    @jax.jit
    def run(q, *others):
        return module.paged_attention(widen(q, LANES), *others, **options, decode=decode, **interpret)[..., :VALUES]

    def call(case):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(tpu, "tuned", lambda *_: sizes)
            return run(*case)

    call.options = options
    return call


def check(name, case, decode):
    run = program(name, decode)
    out = run(case)
    assert out.dtype == case.q.dtype
    got = np.asarray(out.astype("float32"))
    assert np.isfinite(got).all()
    used = slice(case.used)
    want = oracle.paged_attention(*case, **run.options)
    assert oracle.error(got[used], want[used]) < BOUND[CONFIGS[name][0]]
    plain = program(name, decode, reference)(case)
    assert oracle.error(got[used], np.asarray(plain.astype("float32"))[used]) < BOUND[CONFIGS[name][0]]


@pytest.mark.parametrize("name", CONFIGS)
@settings(max_examples=3, deadline=None, derandomize=True)
@given(starts=st.lists(st.sampled_from([-1, *EDGES]), min_size=4, max_size=4), seed=st.integers(0, 99))
def test_decode(name, starts, seed):
    """Lengths 0 (unused rows), 1, page and block edges."""
    case = latent(np.random.default_rng(seed), [max(s, 0) for s in starts], [1] * 4, *CONFIGS[name][:2])
    case.kv_lengths = jnp.where(jnp.asarray(starts) < 0, 0, case.kv_lengths)
    check(name, case, True)


@pytest.mark.parametrize("name", ["float32", "quantised"])
@settings(max_examples=3, deadline=None, derandomize=True)
@given(starts=st.lists(st.sampled_from(EDGES), min_size=4, max_size=4), seed=st.integers(0, 99),
       chunks=st.sampled_from([[0, 0, 0, 0], [1, 1, 1, 1], [40, 0, 0, 0], [0, 16, 17, 0], [7, 0, 30, 3]]))
def test_chunks(name, starts, seed, chunks):
    """Windows shared by sequences, empty sequences, padding at the end."""
    check(name, latent(np.random.default_rng(seed), starts, chunks, *CONFIGS[name][:2], tokens=TOKENS), False)


@pytest.mark.parametrize(("decode", "dtype", "k_format", "sizes"), [
    (True, "bfloat16", None, {"pages": 2, "strip": 1}), (True, "float32", "int8", {"pages": 1, "splits": 2, "parts": 2}),
    (False, "bfloat16", "int8", {"pages": 1, "parts": 2, "queries": 16})])
def test_no_race_and_nothing_uninitialised(decode, dtype, k_format, sizes):
    """The full interpreter: copies land when they are awaited, memory nobody wrote is NaN, no index is out of bounds."""
    starts, chunks = ([0, 70], [1, 1]) if decode else ([0, 33], [9, 6])
    case = latent(np.random.default_rng(0), starts, chunks, dtype, k_format, heads=4, width=256, pages_per_row=3,
                  tokens=2 if decode else 16, first_page=0)
    options = {"scale": 0.1, "window": None, "soft_cap": None, "sinks": None, "first_page": None, "value_lanes": 128}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tpu, "tuned", lambda *_: sizes)
        got = run_detecting_races(
            lambda interpret: tpu.paged_attention(*case, **options, decode=decode, interpret=interpret))
    want = oracle.paged_attention(*case, **options)
    assert oracle.error(got[: case.used], want[: case.used]) < BOUND[dtype]


@pytest.mark.parametrize(("starts", "chunks", "decode", "fmt"), [
    ([0, 31], [1, 1], True, "bfloat16"), ([30, 0], [3, 2], False, "bfloat16")])
def test_an_update_writes_keys_only(starts, chunks, decode, fmt):
    """Bit by bit what the reference writes, but for the null page; with races as errors."""
    rng = np.random.default_rng(0)
    case = latent(rng, starts, chunks, "bfloat16", fmt, pages_per_row=2)
    k = jnp.asarray(rng.standard_normal((case.q.shape[0], 1, LANES)), jnp.bfloat16)
    arguments = case.k_pages, None, k, None, *case.sequences
    options = {"first_page": jnp.int32(FIRST_PAGE), "decode": decode}
    want, _ = update_reference.kv_update(*arguments, **options)

    def run(interpret):
        new, none = update_tpu.kv_update(*arguments, **options, interpret=interpret)
        assert none is None
        for got, wanted in zip(jax.tree.leaves(new), jax.tree.leaves(want), strict=True):
            got, wanted = (np.delete(np.asarray(x.astype("float32")), FIRST_PAGE, 0) for x in (got, wanted))
            np.testing.assert_array_equal(got, wanted)
        return case.q

    run_detecting_races(run)


@pytest.mark.parametrize("kind", [kind for kind in CHIPS if "TPU" in kind])
def test_sizes_fit(kind):
    """DeepSeek's keys of 576 lanes: V3 on one device or cut eight ways."""
    chip = CHIPS[kind]
    for heads, each in itertools.product((8, 16, 64, 128), ((2, 2, 0), (4, 4, 0), (2, 1, 0))):
        for chunk in (None, (16, 1), (512, 16), (8192, 1)):
            if chunk and heads > 16 and chip.vmem <= 16 << 20:
                continue  # the fewest query rows that are whole tiles do not fit
            sizes = choose(heads=heads, kv_heads=1, head_dim=640, value_dim=512, page_size=64, table_width=127,
                           chunk=chunk, bytes_each=each, chip=chip, tuned={})
            assert sizes.vmem(*each) <= chip.vmem * VMEM_SHARE
            assert heads % sizes.parts == 0
            assert sizes.strips * sizes.strip_positions == sizes.positions
            assert sizes.strip_counts[-1] == sizes.strips
