"""The TPU kernel in the interpreters, against the reference and the oracle; ahead of time by the TPU's compiler."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pallas_kernels import Pages, paged_attention
from pallas_kernels.aot.topology import tpu_devices
from pallas_kernels.paged_attention import reference, tpu
from tests.kernels import oracle
from tests.kernels.cases import BOUND, paged
from tests.kernels.interpret import run_detecting_races

HEADS, WIDTH, PAGE, ROW_PAGES, TOKENS = 6, 16, 32, 5, 40
EDGES = [0, 1, 31, 32, 33, 63, 64, 65, 100]
FIRST_PAGE = 2
# dtype of q, formats of k and v, static options: each is one program, run over many lengths.
CONFIGS = {
    "float32": ("float32", None, None, {}),
    "sinks": ("float32", None, None, {"window": 40, "sinks": True}),
    "bfloat16": ("bfloat16", None, None, {"window": 1}),
    "quantised": ("float32", "int8", "float8_e4m3fn", {"soft_cap": 2.0, "window": 33}),
    "mixed": ("bfloat16", "bfloat16", "int8", {"sinks": True, "soft_cap": 3.0}),
}


def make(rng, starts, chunks, dtype, k_format, v_format, *, tokens):
    return paged(rng, starts, chunks, heads=HEADS, width=WIDTH, page_size=PAGE, pages_per_row=ROW_PAGES, dtype=dtype,
                 k_format=k_format, v_format=v_format, tokens=tokens, first_page=FIRST_PAGE, lanes=128)


@functools.cache
def program(name, decode, module=tpu, sizes=()):
    """The operation as api.py calls it: q widened to the pools' lanes. `sizes`: entries of a tuning table."""
    options = dict(CONFIGS[name][3])
    has_sinks = options.pop("sinks", False)
    fixed = {"scale": 0.3, "window": None, "soft_cap": None, "first_page": jnp.int32(FIRST_PAGE), "decode": decode, **options}
    interpret = {} if module is reference else {"interpret": True}

    @jax.jit
    def run(q, k, v, table, starts, lengths, sinks):
        q = jnp.pad(q, ((0, 0), (0, 0), (0, 128 - WIDTH)))
        return module.paged_attention(q, k, v, table, starts, lengths, sinks=sinks if has_sinks else None, **fixed,
                                      **interpret)[..., :WIDTH]

    def call(case, sinks):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(tpu, "tuned", lambda *_: dict(sizes))
            return run(*case, sinks)

    call.options = {**{k: v for k, v in fixed.items() if k != "decode"}, "has_sinks": has_sinks}
    return call


def check(name, case, rng, decode, sizes):
    run = program(name, decode, tpu, sizes)
    sinks = jnp.asarray(rng.standard_normal(HEADS), jnp.float32)
    options = dict(run.options)
    options["sinks"] = sinks if options.pop("has_sinks") else None
    case.forget(options["window"])
    out = run(case, sinks)
    assert out.dtype == case.q.dtype  # else everything after it in a model is float32
    got = np.asarray(out.astype("float32"))
    assert np.isfinite(got).all()
    used = slice(case.used)
    want = oracle.paged_attention(*case, **options)
    bound = BOUND[CONFIGS[name][0]]
    assert oracle.error(got[used], want[used]) < bound
    plain = program(name, decode, reference)(case, sinks)
    assert oracle.error(got[used], np.asarray(plain.astype("float32"))[used]) < bound


@pytest.mark.parametrize("name", CONFIGS)
@settings(max_examples=8, deadline=None, derandomize=True)
@given(starts=st.lists(st.sampled_from([-1, *EDGES, 150]), min_size=5, max_size=5), seed=st.integers(0, 99))
def test_decode(name, starts, seed):
    """Lengths 0 (unused rows), 1, page and block edges; blocks of two pages."""
    rng = np.random.default_rng(seed)
    dtype, k_format, v_format, _ = CONFIGS[name]
    case = make(rng, [max(s, 0) for s in starts], [1] * 5, dtype, k_format, v_format, tokens=5)
    case.kv_lengths = jnp.where(jnp.asarray(starts) < 0, 0, case.kv_lengths)
    check(name, case, rng, True, (("pages", 2), ("depth", 3)))


@pytest.mark.parametrize("name", CONFIGS)
@settings(max_examples=8, deadline=None, derandomize=True)
@given(starts=st.lists(st.sampled_from(EDGES), min_size=4, max_size=4), seed=st.integers(0, 99),
       chunks=st.sampled_from([[0, 0, 0, 0], [1, 1, 1, 1], [40, 0, 0, 0], [0, 16, 17, 0], [5, 11, 16, 1], [7, 0, 30, 3]]))
def test_chunks(name, starts, seed, chunks):
    """Windows of 16 queries shared by sequences, empty sequences, padding at the end."""
    rng = np.random.default_rng(seed)
    dtype, k_format, v_format, _ = CONFIGS[name]
    case = make(rng, starts, chunks, dtype, k_format, v_format, tokens=TOKENS)
    check(name, case, rng, False, (("pages", 2), ("queries", 16)))


@pytest.mark.parametrize("decode", [False, True])
def test_two_cores_split_every_context(decode):
    """What chips with two cores do: parts of a context, merged; a split may see nothing."""
    rng = np.random.default_rng(0)
    starts, chunks = ([0, 130, 31], [1, 1, 1]) if decode else ([0, 100, 31], [20, 13, 3])
    case = make(rng, starts, chunks, "float32", None, None, tokens=3 if decode else TOKENS)
    for name in ("float32", "sinks"):
        check(name, case, rng, decode, (("pages", 1), ("splits", 2)) + (() if decode else (("queries", 16),)))


@pytest.mark.parametrize("decode", [False, True])
@pytest.mark.parametrize(("formats", "splits", "pages"), [
    (("float32", None, None), 1, 1), (("bfloat16", "int8", "bfloat16"), 1, 1), (("float32", None, None), 2, 2)])
def test_no_race_and_nothing_uninitialised(decode, formats, splits, pages):
    """The full interpreter: copies land when they are awaited, memory nobody wrote is NaN, no index is out of bounds.

    Two splits: the second one's blocks lie wholly past the end of a short row.
    """
    rng = np.random.default_rng(0)
    starts, chunks = ([0, 70], [1, 1]) if decode else ([0, 33], [9, 6])
    case = paged(rng, starts, chunks, heads=2, kv_heads=1, width=128, page_size=32, pages_per_row=3, dtype=formats[0],
                 k_format=formats[1], v_format=formats[2], tokens=2 if decode else 16, lanes=128)
    options = {"scale": 0.1, "window": None, "soft_cap": None, "sinks": None, "first_page": None}
    with pytest.MonkeyPatch.context() as patch:
        sizes = {"pages": pages, "splits": splits} | ({} if decode else {"queries": 16})
        patch.setattr(tpu, "tuned", lambda *_: sizes)
        got = run_detecting_races(lambda interpret: tpu.paged_attention(*case, **options, decode=decode, interpret=interpret))
    want = oracle.paged_attention(*case, **options)
    assert oracle.error(got[: case.used], want[: case.used]) < BOUND[formats[0]]


@pytest.mark.parametrize(("change", "message"), [
    ({"page_size": 8}, "S must be a multiple of 16"), ({"lanes": 1}, "H one of 128"),
])
def test_pools_must_lie_in_whole_tiles(change, message):
    arguments = {"width": 16, "page_size": 16, "pages_per_row": 1, "dtype": "bfloat16", "lanes": 128, **change}
    case = paged(np.random.default_rng(0), [0], [1], **arguments)
    with pytest.raises(ValueError, match=message):
        tpu.paged_attention(*case, scale=1.0, window=None, soft_cap=None, sinks=None, first_page=None, decode=True)


@pytest.mark.aot
@pytest.mark.parametrize("decode", [False, True])
def test_compiled_it_lists_its_work_once_for_all_layers(decode):
    """Two layers: each kernel gets the same list of tiles, and nothing the size of a pool is copied."""
    pytest.importorskip("libtpu", reason="compiling for TPUs needs the libtpu package")
    mesh = Mesh(np.array(tpu_devices("v6e:2x2")[:1]), ("x",))
    here = NamedSharding(mesh, PartitionSpec())

    def shape(*sizes, dtype="int32"):
        return jax.ShapeDtypeStruct(sizes, jnp.dtype(dtype), sharding=here)

    tokens, rows = (64, 64) if decode else (512, 8)
    pool = Pages(shape(40001, 8, 64, 128, dtype="bfloat16"))
    arguments = (shape(tokens, 32, 128, dtype="bfloat16"), pool, pool, shape(rows, 16), shape(rows + 1), shape(rows))

    def layers(q, *others):
        for layer in range(2):
            q = paged_attention(q, *others, scale=0.1, first_page=jnp.int32(20000 * layer), decode=decode)
        return q

    local = jax.shard_map(layers, mesh=mesh, in_specs=PartitionSpec(), out_specs=PartitionSpec(), check_vma=False)
    compiled = jax.jit(local).lower(*arguments).compile()
    text = compiled.as_text()
    calls = re.findall(r"custom-call\((.*?)\), custom_call_target=\"tpu_custom_call\"", text)
    assert len(calls) == 2
    first, second = (re.sub(r"/\*.*?\*/", "", call).split(", ") for call in calls)
    assert first[:9] == second[:9]  # Tiles and the page table
    assert first[9] != second[9]  # the first page
    assert not re.findall(r"= \S*\[40001,\S* copy", text)
    assert compiled.memory_analysis().temp_size_in_bytes < 32 << 20
