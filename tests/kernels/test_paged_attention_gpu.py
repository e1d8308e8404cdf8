"""The GPU kernel, interpreted, against the reference and the float64 oracle."""

import dataclasses
import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels import Pages, paged_attention
from pallas_kernels.gpu_blocks import Blocks
from pallas_kernels.paged_attention import gpu
from pallas_kernels.pages import widen
from tests.kernels import oracle
from tests.kernels.cases import BOUND, paged


@dataclasses.dataclass(frozen=True)
class Setup:
    """What is compiled once, for all the lengths drawn."""

    decode: bool
    heads: tuple[int, int] = (4, 2)
    dtype: str = "float32"
    formats: tuple[str | None, str | None] = (None, None)
    window: int | None = None
    soft_cap: float | None = None
    sinks: bool = False
    splits: int = 1
    lanes: int = 1

    def case(self, seed, starts, chunks=(1, 1, 1), tokens=3):
        return paged(np.random.default_rng(seed), starts, chunks, heads=self.heads[0], kv_heads=self.heads[1],
                     dtype=self.dtype, k_format=self.formats[0], v_format=self.formats[1], tokens=tokens,
                     first_page=3, lanes=self.lanes)

    def blocks(self):
        """Small enough that a few tokens need several tiles, turns and splits."""
        lanes = 1 << (self.heads[0] // self.heads[1] - 1).bit_length()
        return Blocks(queries=1 if self.decode else 4, group=lanes, width=16, positions=8, splits=self.splits,
                      warps=4, stages=3)

    def options(self, sinks):
        return {"scale": 0.3, "window": self.window, "soft_cap": self.soft_cap, "first_page": jnp.int32(3),
                "sinks": sinks if self.sinks else None}


@functools.cache
def kernel(setup):
    def run(case, sinks):
        q, k_pages, *rest = case
        wide = widen(q, k_pages.data.shape[3])
        out = gpu.paged_attention(wide, k_pages, *rest, **setup.options(sinks), decode=setup.decode, interpret=True)
        return out[..., : q.shape[2]]

    return jax.jit(run)


@functools.cache
def plain(setup):
    return jax.jit(lambda case, sinks: paged_attention(
        *case, **setup.options(sinks), decode=setup.decode, implementation="reference"))


def check(setup, case):
    sinks = jnp.linspace(-2, 2, setup.heads[0], dtype=jnp.float32)
    case.forget(setup.window)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpu, "estimate", lambda *_, **__: setup.blocks())
        got = kernel(setup)(tuple(case), sinks)
    assert np.isfinite(np.asarray(got, np.float32)).all()
    assert not np.asarray(got[case.used:], np.float32).any()
    bound = BOUND[setup.dtype]
    want = oracle.paged_attention(*case, **setup.options(sinks))[: case.used]
    assert oracle.error(got[: case.used], want) < bound
    same = plain(setup)(tuple(case), sinks)[: case.used]
    assert oracle.error(got[: case.used], np.asarray(same, np.float64)) < bound
    return got


EDGES = st.lists(st.sampled_from([0, 1, 3, 4, 5, 7, 8, 9, 15]), min_size=3, max_size=3)
CHUNKS = st.lists(st.sampled_from([0, 1, 4, 8, 9]), min_size=3, max_size=3)


@pytest.mark.parametrize("setup", [
    Setup(False, heads=(3, 1), window=5, sinks=True),
    Setup(False, formats=("int8", "int8"), soft_cap=2.0, splits=3, lanes=16),
    Setup(False, dtype="bfloat16", formats=(None, "float8_e4m3fn"), window=1, splits=3),
], ids=str)
@settings(max_examples=6, deadline=None, derandomize=True)
@given(starts=EDGES, chunks=CHUNKS, seed=st.integers(0, 1000))
def test_chunks_equal_the_oracle(setup, starts, chunks, seed):
    check(setup, setup.case(seed, starts, chunks, tokens=32))


@pytest.mark.parametrize("setup", [
    Setup(True, heads=(3, 1), window=5, sinks=True, splits=3),
    Setup(True, formats=("float8_e4m3fn", "int8"), soft_cap=2.0),
    Setup(True, dtype="bfloat16", splits=3),
], ids=str)
@settings(max_examples=6, deadline=None, derandomize=True)
@given(starts=EDGES, seed=st.integers(0, 1000))
def test_decode_equals_the_oracle(setup, starts, seed):
    check(setup, setup.case(seed, starts))


@pytest.mark.parametrize("splits", [1, 3])
def test_an_empty_row_gives_zeros_and_a_broken_one_breaks_alone(splits):
    setup = Setup(True, heads=(3, 1), window=5, sinks=True, splits=splits)
    case = setup.case(0, [3, 8, 5])
    case.kv_lengths = jnp.array([4, 9, 0], jnp.int32)
    sinks = jnp.zeros(3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpu, "estimate", lambda *_, **__: setup.blocks())
        sound = np.asarray(kernel(setup)(tuple(case), sinks))
        page = 3 + case.page_table[1, 2]
        case.v_pages = case.v_pages._replace(data=case.v_pages.data.at[page, :, 0].set(np.nan))
        broken = np.asarray(kernel(setup)(tuple(case), sinks))
    assert sound[:2].all()
    assert not sound[2].any()
    assert np.isnan(broken[1]).all()
    np.testing.assert_array_equal(broken[[0, 2]], sound[[0, 2]])


@pytest.mark.parametrize(("pages", "kernels"), [(2**15, 1), (2**16 - 1, 0), (2**16, 0), (2**16 + 1, 1)])
def test_pools_the_backend_cannot_address_go_to_the_reference(pages, kernels):
    """One-byte pools of more than 2 and up to 4 GiB."""
    data = jax.ShapeDtypeStruct((pages, 16, 32, 128), jnp.int8)
    pool = Pages(data, jax.ShapeDtypeStruct(data.shape[:-1], jnp.float32))
    q, table = jax.ShapeDtypeStruct((1, 16, 128), jnp.bfloat16), jax.ShapeDtypeStruct((1, 2), jnp.int32)
    args = q, pool, pool, table, jax.ShapeDtypeStruct((2,), jnp.int32), jax.ShapeDtypeStruct((1,), jnp.int32)
    for decode in (True, False):
        run = functools.partial(gpu.paged_attention, **Setup(decode).options(None), decode=decode)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", RuntimeWarning)
            text = str(jax.make_jaxpr(run)(*args))
        assert text.count("pallas_call[") == kernels
        assert len(caught) == 1 - kernels
