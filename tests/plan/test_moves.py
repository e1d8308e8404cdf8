"""The programs that move pages, for the pools of real models, through the compilers of devices that are not here."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from jinfer.config import EngineConfig, LayerConfig, LayoutConfig, ModelConfig
from jinfer.config.loading import load_config
from jinfer.engine.assembly import Assembly
from jinfer.engine.catalog import Key, ProgramCatalog, shard_bytes
from jinfer.engine.page_moves import COPIES
from jinfer.observe.metrics import Metrics
from jinfer.plan import checks
from jinfer.plan.hlo import Module
from jinfer.sharding import Layout
from pallas_kernels.aot.topology import gpu_devices, tpu_devices
from tests.plan.test_steps import H100, needs_cuda, needs_libtpu

PAGES = 2048
WINDOWED = (LayerConfig(window=512), LayerConfig())

pytestmark = pytest.mark.aot


def catalog(name: str, layout: str, devices, dtype: str = "bfloat16", **changes) -> ProgramCatalog:
    """Of a model with a few layers, and pages in this format."""
    model = dataclasses.replace(load_config(ModelConfig, name), num_layers=2, vocab_size=512, **changes)
    config = EngineConfig(dtype="bfloat16", max_context=8192, host_kv_gb=1.0, layout=load_config(LayoutConfig, layout))
    parts = Assembly.build(model, config, Layout.build(config.layout, devices))
    programs = parts.catalog(parts.abstract_weights(), Metrics())
    programs.kv_dtype = jnp.dtype(dtype)
    return programs


def check(programs: ProgramCatalog) -> None:
    """Nothing of the pool but the pages named is written anew, and devices exchange nothing."""
    pages = (PAGES,) * len(programs.moves.layers)
    pools = programs.abstract_kv(pages)
    page = max(sum(shard_bytes(x) for x in jax.tree.leaves(pool)) // PAGES for pool in pools)
    keys = [Key("copy", COPIES), *(Key(kind, 8, group) for kind in ("gather", "scatter") for group in range(len(pages)))]
    for key in keys:
        compiled = programs.compile(key, pages)
        module = Module(compiled.as_text() or "")
        arguments = pools if key.kind == "copy" else (pools[key.group],)
        numbers = range(len(jax.tree.leaves(arguments)))
        layer = min(shard_bytes(x) for x in jax.tree.leaves(arguments)) // 2
        assert checks.pool_copies(module, numbers, layer) == []
        assert not checks.collectives(module), key
        # Small arrays are kept on a TPU in whole tiles.
        assert compiled.memory_analysis().temp_size_in_bytes < 2 * page + 2**19, key
        if key.kind != "gather":
            assert checks.not_donated(module, numbers) == []


@needs_libtpu
@pytest.mark.parametrize(("name", "layout", "topology", "dtype", "changes"), [
    ("llama-3.1-8b", "single", "v5e:1x1", "bfloat16", {"layers": WINDOWED}),
    ("llama-3.1-8b", "tp8", "v5e:2x4", "int8", {}),
    ("deepseek-v2-lite", "single", "v5e:1x1", "bfloat16", {}),
])
def test_on_tpus(name, layout, topology, dtype, changes):
    check(catalog(name, layout, tpu_devices(topology), dtype, **changes))


@needs_cuda
@pytest.mark.parametrize(("layout", "count", "dtype", "changes"), [
    ("single", 1, "bfloat16", {"layers": WINDOWED}), ("tp8", 8, "int8", {})])
def test_on_gpus(layout, count, dtype, changes):
    check(catalog("llama-3.1-8b", layout, gpu_devices(H100, count), dtype, **changes))


@needs_libtpu
def test_a_tpu_keeps_pages_in_pinned_memory_of_the_host():
    """The sharding of a slot is one its compiler knows, and a page has its size there."""
    programs = catalog("llama-3.1-8b", "single", tpu_devices("v5e:1x1"))
    block = programs.abstract_block(0, 1)
    host = jax.tree.map(lambda x: x.sharding.with_memory_kind("pinned_host"), block)
    memory = jax.jit(lambda x: x, out_shardings=host).lower(block).compile().memory_analysis()
    assert memory.host_output_size_in_bytes >= sum(shard_bytes(x) for x in jax.tree.leaves(block))
