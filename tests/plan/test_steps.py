"""Whole steps with the widths of Llama 3.1 8B, two layers deep, through the compilers of devices that are not here."""

import dataclasses
import importlib
import importlib.util
from pathlib import Path

import jax
import pytest

from jinfer.config import EngineConfig, LayerConfig, LayoutConfig, ModelConfig
from jinfer.config.loading import load_config
from jinfer.engine.catalog import Key
from jinfer.errors import ConfigError
from jinfer.plan.steps import compile_steps, expected_collectives
from jinfer.sharding import Layout
from pallas_kernels.aot.topology import gpu_devices, tpu_devices

H100 = (Path(__file__).parents[1] / "data" / "h100.txtpb").read_text()
DECODE, PREFILL = Key("decode", 64), Key("prefill", 512)
needs_libtpu = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed: TPU programs are NOT compiled")
needs_cuda = pytest.mark.skipif(
    importlib.util.find_spec("jax_cuda13_plugin") is None, reason="no CUDA plugin: GPU programs are NOT compiled")


@pytest.fixture
def changed_code(monkeypatch):
    """What a test changes, it changes before anything is traced, and nobody meets the traces after."""
    jax.clear_caches()
    yield monkeypatch
    jax.clear_caches()


def model(**changes) -> ModelConfig:
    """A small vocabulary: the sampler would take longer to compile than the layers, and has its own tests."""
    return dataclasses.replace(load_config(ModelConfig, "llama-3.1-8b"), **{"num_layers": 2, "vocab_size": 512, **changes})


def config(layout: str, **changes) -> EngineConfig:
    """A pool of two layers of 512 MiB: more than any memory on the chip holds."""
    return EngineConfig(**{"dtype": "bfloat16", "max_context": 8192, "kv_pages": 2048,
                           "layout": load_config(LayoutConfig, layout), **changes})


@pytest.mark.aot
@needs_libtpu
@pytest.mark.parametrize(("change", "message"), [
    ({"page_size": 8}, "S must be a multiple of 16"), ({"page_size": 256}, "S must be 128 at most")])
def test_pages_a_tpu_does_not_take_are_named_before_anything_is_compiled(change, message):
    with pytest.raises(ConfigError, match=rf"page_size: .*{message}"):
        compile_steps(model(), config("single", **change), tpu_devices("v6e:1x1"), keys=[DECODE])


@pytest.mark.aot
@needs_libtpu
@pytest.mark.parametrize(("layout", "topology", "layers"), [
    ("single", "v6e:1x1", (LayerConfig(window=512), LayerConfig())), ("tp8", "v5e:2x4", (LayerConfig(),))])
def test_a_step_copies_nothing_and_exchanges_what_its_layout_asks_for(layout, topology, layers):
    """Of one page group and of two, whose parts of the pool differ in size."""
    plan = compile_steps(model(layers=layers), config(layout), tpu_devices(topology), keys=[DECODE, PREFILL])
    for step in plan.steps.values():
        assert step.copies == []
        assert step.collectives == expected_collectives(model(), config(layout))
        assert step.aliased >= plan.pool
        assert step.arguments >= plan.weights + plan.pool
        assert step.temporaries < 64 * 2**20
        assert step.peak < plan.memory


@pytest.mark.aot
@needs_libtpu
def test_several_decode_steps_in_one_program():
    wanted = config("tp8", decode_steps=4)
    plan = compile_steps(model(), wanted, tpu_devices("v5e:2x4"), keys=[DECODE])
    assert plan.steps[DECODE].copies == []
    assert plan.steps[DECODE].collectives == expected_collectives(model(), wanted)


@pytest.mark.aot
@needs_libtpu
def test_activations_left_to_the_partitioner_cost_exchanges(changed_code):
    """The check sees it: without `Layout.whole` the compiler cuts activations where the sampler's rows are cut."""
    changed_code.setattr(Layout, "whole", lambda self, x: x)
    changed = model(num_layers=1)
    plan = compile_steps(changed, config("tp8"), tpu_devices("v5e:2x4"), keys=[DECODE])
    assert plan.steps[DECODE].collectives.total() > expected_collectives(changed, config("tp8")).total()


@pytest.mark.aot
@needs_libtpu
def test_attention_in_plain_jnp_copies_the_pool_on_a_tpu(changed_code):
    """The check sees it: pages gathered by XLA are laid out anew, all of them."""
    for operation in ("kv_update", "paged_attention"):
        api = importlib.import_module(f"pallas_kernels.{operation}.api")
        changed_code.setattr(api, "choose", lambda _: "reference")
    plan = compile_steps(model(num_layers=1), config("tp8"), tpu_devices("v5e:2x4"), keys=[DECODE])
    assert any(copy.startswith("copy bf16[256, 8, 64, 128]") for copy in plan.steps[DECODE].copies)


@pytest.mark.aot
@needs_cuda
@pytest.mark.parametrize(("layout", "count"), [("single", 1), ("tp8", 8)])
def test_a_step_for_gpus(layout, count):
    plan = compile_steps(model(), config(layout), gpu_devices(H100, count), keys=[DECODE, PREFILL])
    for step in plan.steps.values():
        assert step.copies == []
        assert step.collectives == expected_collectives(model(), config(layout))
        assert step.aliased >= plan.pool
