"""The TPU kernels in both interpreters, against the oracle and the reference; and what the compiler makes of them."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pallas_kernels import Pages, chips, kv_update
from pallas_kernels.aot.topology import tpu_devices
from pallas_kernels.kv_update import plan, reference, tpu
from pallas_kernels.pages import pool_shapes
from tests.kernels.cases import paged
from tests.kernels.interpret import run_detecting_races
from tests.kernels.test_kv_update import check

KV_HEADS, LANES, PAGE, ROW_PAGES, TOKENS, ROWS = 2, 128, 32, 7, 160, 5
FIRST_PAGE = 2
# Formats of k and v, and the VMEM to plan for: at 600 KB a call takes several blocks of tokens, head by head.
CONFIGS = {"roomy": ("float32", "float8_e4m3fn", 16 << 20), "tight": ("bfloat16", "int8", 600_000)}
EDGES = [0, 1, 2, 31, 32, 33, 47, 63, 64]


@functools.cache
def program(name, decode, module=tpu, interpret=True):
    """update(k_pages, v_pages, k, v, *sequences) -> (k_pages, v_pages)."""
    options = {"decode": decode, "first_page": jnp.int32(FIRST_PAGE)}
    if module is tpu:
        options["interpret"] = interpret
    run = jax.jit(functools.partial(module.kv_update, **options))

    def update(*arguments, **_):
        with pytest.MonkeyPatch.context() as patch:
            chip = dataclasses.replace(chips.SMALLEST_TPU, vmem=CONFIGS[name][2])
            patch.setattr(plan, "local_chip", lambda: chip)
            return run(*arguments)

    return update


def make(name, rng, starts, chunks, tokens):
    """Arguments, and k and v, bfloat16 with one token of NaN."""
    k_format, v_format, _ = CONFIGS[name]
    case = paged(rng, starts, chunks, kv_heads=KV_HEADS, width=LANES, page_size=PAGE, pages_per_row=ROW_PAGES,
                 tokens=tokens, k_format=k_format, v_format=v_format, first_page=FIRST_PAGE, lanes=LANES)
    k, v = rng.standard_normal((2, tokens, KV_HEADS, LANES))
    k[rng.integers(tokens)] = np.nan
    return case, jnp.asarray(k, jnp.bfloat16), jnp.asarray(v, jnp.bfloat16)


def check_all(name, case, k, v, decode):
    check(program(name, decode), case, k, v, decode=decode, first_page=FIRST_PAGE)
    plain = program(name, decode, reference)
    same(*(update(case.k_pages, case.v_pages, k, v, *case.sequences) for update in (program(name, decode), plain)))


def same(got, want):
    """All pages but the null page, bit by bit (or both NaN)."""
    for new, old in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        new, old = (np.delete(np.asarray(x.astype("float32")), FIRST_PAGE, 0) for x in (new, old))
        np.testing.assert_array_equal(new, old)


@pytest.mark.parametrize("name", CONFIGS)
@settings(max_examples=6, deadline=None, derandomize=True)
@given(starts=st.lists(st.sampled_from([*EDGES, 100]), min_size=ROWS, max_size=ROWS),
       chunks=st.lists(st.sampled_from([*EDGES, 90]), min_size=ROWS, max_size=ROWS), seed=st.integers(0, 99))
def test_chunks(name, starts, chunks, seed):
    """Page edges, pages with several tokens of one sequence, empty sequences, padding, pages that blocks cut."""
    room = TOKENS
    for i, chunk in enumerate(chunks):
        chunks[i] = min(chunk, room)
        room -= chunks[i]
    check_all(name, *make(name, np.random.default_rng(seed), starts, chunks, TOKENS), decode=False)


@pytest.mark.parametrize("name", CONFIGS)
@settings(max_examples=6, deadline=None, derandomize=True)
@given(starts=st.lists(st.sampled_from([-1, *EDGES, 150]), min_size=12, max_size=12), seed=st.integers(0, 99))
def test_decode(name, starts, seed):
    """Unused rows (-1), first and last rows of a page, of a tile and of a word."""
    case, k, v = make(name, np.random.default_rng(seed), [max(s, 0) for s in starts], [1] * 12, 12)
    used = np.array(starts) >= 0
    case.kv_lengths = jnp.where(used, case.kv_lengths, 0)
    same(*(program(name, True, module)(case.k_pages, case.v_pages, k, v, *case.sequences)
           for module in (tpu, reference)))
    if used.all():
        check_all(name, case, k, v, decode=True)


@pytest.mark.parametrize(("decode", "starts", "chunks"), [(True, [0, 31, 64, 37, 9, 1, 2, 3, 4], [1] * 9),
                                                          (False, [30, 5, 0], [70, 1, 72])])
def test_no_copy_races_another(decode, starts, chunks):
    """Several blocks of tokens, more pages than the ring holds, a page that the blocks cut."""
    case, k, v = make("tight", np.random.default_rng(0), starts, chunks, sum(chunks))

    def run(interpret):
        update = program("tight", decode, interpret=interpret)
        check(update, case, k, v, decode=decode, first_page=FIRST_PAGE)
        return case.q

    run_detecting_races(run)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("kv_heads", [1, 8, 32])
@pytest.mark.parametrize("tokens", [1, 300, 8192])
def test_plans_fit(dtype, kv_heads, tokens):
    """Here the chip is the smallest TPU."""
    pages = pool_shapes(100, kv_heads, 128, 256, dtype, "tpu")
    for decode in (True, False):
        made = plan.make_plan(tpu.__file__, (pages, pages), tokens, decode=decode)
        assert 2 * plan.vmem_bytes(pages, made) <= chips.local_chip().vmem // 2
        assert kv_heads % made.heads == 0


@pytest.mark.parametrize(("shape", "dtype", "message"), [
    ((3, 2, 32, 96), "bfloat16", "H one of 128"), ((3, 2, 16, 128), "int8", "S must be a multiple of 32"),
    ((3, 2, 32, 128), "float16", "bfloat16 takes the place of float16"), ((3, 2, 256, 128), "bfloat16", "128 at most")])
def test_pools_without_a_kernel_are_named(shape, dtype, message):
    pages = Pages(jnp.zeros(shape, dtype), jnp.zeros((3, 2, 128)) if dtype == "int8" else None)
    new, table = jnp.zeros((4, 2, shape[3])), jnp.zeros((4, 1), jnp.int32)
    with pytest.raises(ValueError, match=message):
        kv_update(pages, pages, new, new, table, jnp.arange(5, dtype=jnp.int32), jnp.ones(4, jnp.int32), decode=True,
                  implementation="tpu")


@pytest.mark.aot
@pytest.mark.parametrize("topology", ["v5e:2x2", "v6e:2x2", "tpu7x:2x2x1"])
@pytest.mark.parametrize("decode", [False, True])
def test_compiled_it_is_in_place_and_lists_its_work_once(topology, decode):
    """Two layers of one pool, donated: no copy of the pool, and both calls take the same list."""
    pytest.importorskip("libtpu", reason="compiling for TPUs needs the libtpu package")
    mesh = Mesh(np.array(tpu_devices(topology)[:1]), ("x",))
    tokens, rows = (64, 64) if decode else (512, 8)
    new = jax.ShapeDtypeStruct((tokens, 8, 128), jnp.bfloat16)
    sequences = [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((rows, 16), (rows + 1,), (rows,))]
    # Pools beyond VMEM: XLA may keep smaller ones there for the length of a program.
    pools = [pool_shapes(40001, 8, 64, 128, dtype, "tpu") for dtype in ("bfloat16", "int8")]

    def layers(k_pages, v_pages, k, v, *sequences):
        for layer in range(2):
            first = jnp.int32(20000 * layer)
            k_pages, v_pages = kv_update(k_pages, v_pages, k, v, *sequences, first_page=first, decode=decode)
        return k_pages, v_pages

    local = jax.shard_map(layers, mesh=mesh, in_specs=PartitionSpec(), out_specs=PartitionSpec(), check_vma=False)
    here = NamedSharding(mesh, PartitionSpec())
    arguments = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=here),
                             (*pools, new, new, *sequences))
    compiled = jax.jit(local, donate_argnums=(0, 1)).lower(*arguments).compile()
    text, memory = compiled.as_text(), compiled.memory_analysis()
    pool_bytes = sum(np.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(pools))
    assert memory.alias_size_in_bytes >= pool_bytes
    assert memory.temp_size_in_bytes < 16 << 20
    assert not re.findall(r"= \S*\[40001,\S* copy", text)
    calls = re.findall(r"custom-call\((.*?)\).*kv_update", text)
    assert len(calls) == 2
    first, second = (re.sub(r"/\*.*?\*/", "", call).split(", ") for call in calls)
    assert first[:5] == second[:5]
    assert first[5] != second[5]
