"""Sizes, step times and pools of models and devices that are not here."""

import dataclasses
import math

import jax
import pytest
from flax import nnx

from jinfer.config import EngineConfig, LayoutConfig, ModelConfig
from jinfer.config.device import DeviceConfig, EfficiencyConfig, ProfileConfig
from jinfer.config.loading import config_names, load_config
from jinfer.config.resolve import resolve
from jinfer.errors import ConfigError, LayoutError
from jinfer.models import build_model
from jinfer.models.parameter import Precision
from jinfer.plan.roofline import Roofline, Shard, pairs_seen
from jinfer.plan.sizes import ModelSizes
from jinfer.scheduler import Chunk, DecodeRow
from jinfer.sharding import Layout
from jinfer.simulate.cost import Link, Measured
from jinfer.simulate.machine import Machine
from pallas_kernels.chips import CHIPS
from tests.simulate.build import job

IDEAL = EfficiencyConfig(compute=1, attention=1, bandwidth=1, interconnect=1, link=1)
DEVICE = DeviceConfig(kind="x", platform="gpu", memory=80e9, bandwidth=1e12, flops=1e14, interconnect=1e11,
                      interconnect_latency=1e-6, call_seconds=0.0, efficiency=IDEAL)
LLAMA = load_config(ModelConfig, "llama-3.1-8b")


def roofline(model=LLAMA, device=DEVICE, **config):
    return Roofline.of(model, resolve(EngineConfig(**config), model, device.platform), device)


def chunk(start, length, final=False):
    return Chunk(None, 1, start, length, final, start == 0)


@pytest.mark.parametrize("name", ["llama-3.1-8b", "deepseek-v2-lite", "gpt-oss-20b", "gemma-3-27b", "qwen3-30b-a3b",
                                  "olmo-2-7b", "phi-4"])
def test_sizes_are_those_of_the_model_that_would_be_built(name):
    config = load_config(ModelConfig, name)
    model = build_model(config, Layout.build(LayoutConfig()), Precision.of("bfloat16", None))
    sources = {}
    for parameter in jax.tree.leaves(nnx.split(model)[1]):
        sources.update(parameter.sources)
    assert ModelSizes.of(config).total == pytest.approx(sum(map(math.prod, sources.values())), rel=1e-4)


@pytest.mark.parametrize("name", [n for n in config_names("devices") if n != "cpu2"])
def test_device_files_agree_with_what_kernels_are_written_for(name):
    device = load_config(DeviceConfig, name)
    chip = CHIPS[device.kind]
    assert (device.memory, device.bandwidth, device.flops) == (chip.hbm, chip.bandwidth, chip.flops)
    assert device.platform == ("tpu" if "TPU" in device.kind else "gpu")


def test_every_chip_has_a_file():
    assert {load_config(DeviceConfig, name).kind for name in config_names("devices")} == {*CHIPS, "cpu"}


def test_a_decode_step_reads_weights_and_kv():
    rows = [DecodeRow(None, i, 999) for i in range(4)]
    weights = 2 * (8030e6 - 128256 * 4096)  # all but the embedding
    kv = 4 * 1000 * 2 * 32 * 8 * 128 * 2
    assert roofline().decode(rows, 1) == pytest.approx((weights + kv) / 1e12, rel=1e-3)
    assert roofline(decode_steps=4).decode(rows, 4) == pytest.approx((4 * weights + 4 * kv) / 1e12, rel=2e-3)


def test_a_large_prefill_computes():
    tokens = 4096
    products = 2 * (8030e6 - 2 * 128256 * 4096) * tokens
    scores = 32 * 4 * 32 * 128 * tokens * (tokens + 1) / 2
    alone = roofline(prefill_tokens=tokens).prefill([chunk(0, tokens)])
    assert alone == pytest.approx((products + scores) / 1e14, rel=1e-3)
    later = roofline(prefill_tokens=tokens).prefill([chunk(8192, tokens)])
    assert later - alone == pytest.approx(32 * 4 * 32 * 128 * tokens * 8192 / 1e14, rel=1e-3)


def test_windows_bound_what_is_read_and_scored():
    kinds = dataclasses.replace(LLAMA, layers=(dataclasses.replace(LLAMA.layers[0], window=512),))
    short, long = ([DecodeRow(None, 1, position)] for position in (511, 100_000))
    model = roofline(kinds)
    assert model.decode(short, 1) == model.decode(long, 1)
    assert model.prefill([chunk(512, 64)]) == model.prefill([chunk(50_000, 64)])
    assert model.prefill([chunk(0, 256)]) < model.prefill([chunk(512, 256)])


@pytest.mark.parametrize("window", [None, 1, 5, 8, 100])
def test_pairs_are_what_a_count_gives(window):
    for start in range(12):
        for stop in range(start + 1, 20):
            count = sum(min(i + 1, window or i + 1) for i in range(start, stop))
            assert pairs_seen(start, stop, window) == count


def test_experts_are_read_as_far_as_they_are_hit():
    sizes = ModelSizes.of(load_config(ModelConfig, "mixtral-8x7b"))
    assert sizes.experts_hit(1) == pytest.approx(2)
    assert sizes.experts_hit(2) == pytest.approx(3.5)
    assert sizes.experts_hit(1000) == pytest.approx(8)


def test_tensor_parallel_divides_the_work_and_adds_exchanges():
    rows = [DecodeRow(None, i, 999) for i in range(64)]
    one, four = roofline(), roofline(layout=LayoutConfig(mesh={"tensor": 4}))
    # 64 sums in the layers and 3 about the vocabulary, each 1 us and 2 * 3/4 of 64 x 4096 bfloat16 over 100 GB/s
    exchanges = 67 * (1e-6 + 1.5 * 64 * 4096 * 2 / 1e11)
    assert four.decode(rows, 1) == pytest.approx(one.decode(rows, 1) / 4 + exchanges, rel=1e-2)
    with pytest.raises(LayoutError, match="32 query heads and 8 kv heads"):
        roofline(layout=LayoutConfig(mesh={"tensor": 3}))


@pytest.mark.parametrize(("model", "device", "ranks", "pages"), [
    # what the engine's own sizing gives for these, from compiled programs (scripts/aot_steps.py, docs/performance.md)
    ("llama-3.1-8b", "v6e", 1, (1667,)), ("llama-3.1-8b", "v5e", 8, (8193,)), ("llama-3.1-70b", "v5e", 16, (2311,)),
    ("qwen3-30b-a3b", "v5e", 8, (4704,)), ("deepseek-v2-lite", "v5e", 4, (3220,)), ("gemma-3-27b", "v5e", 8, (6802, 1129))])
def test_pools_are_sized_as_by_the_engine(model, device, ranks, pages):
    config = load_config(EngineConfig, "accelerator", [f"layout.mesh.tensor={ranks}", "prefill_tokens=512"])
    machine = Machine.build(load_config(ModelConfig, model), config, load_config(DeviceConfig, device))
    assert machine.pages == pytest.approx(pages, rel=0.04)


def test_what_does_not_fit_is_refused_with_both_numbers():
    with pytest.raises(ConfigError, match=r"weights and .* reserve on each of 1 devices leave nothing of 14.18 GiB"):
        Machine.build(LLAMA, load_config(EngineConfig, "accelerator"), load_config(DeviceConfig, "v5e"))


def test_int8_halves_weights_and_uses_the_faster_units():
    device = dataclasses.replace(DEVICE, int8_flops=2e14)
    plain, narrow = roofline(device=device), roofline(device=device, quantization="int8")
    rows = [DecodeRow(None, 1, 9)]
    assert narrow.decode(rows, 1) == pytest.approx(plain.decode(rows, 1) / 2, rel=0.01)
    assert narrow.prefill([chunk(0, 512)]) < 0.6 * plain.prefill([chunk(0, 512)])


def test_a_measured_profile_takes_the_place_of_the_roofline():
    profile = ProfileConfig(prefill=(1.0, 0.1, 0.01), decode=(2.0, 0.5, 0.001))
    assert Measured(profile).prefill([chunk(10, 4), chunk(0, 2)]) == pytest.approx(1.0 + 0.6 + 0.01 * (50 + 3))
    assert Measured(profile).decode([DecodeRow(None, 1, 100), DecodeRow(None, 2, 50)], 2) == pytest.approx(
        2 * (2.0 + 1.0 + 0.001 * (150 + 1)))
    machine = Machine.build(LLAMA, EngineConfig(kv_pages=600, max_context=4096), DEVICE, profile)
    recorder = machine.simulate([job(0.0, 100, 2)])
    assert recorder.jobs.ttft[0] == pytest.approx(DEVICE.host_seconds + 1.0 + 12.8 + 0.01 * 5050)  # padded to 128
    with pytest.raises(ConfigError, match=r"profile.decode: must be three numbers"):
        ProfileConfig(prefill=(1.0, 0.1, 0.01), decode=(2.0, 0.5))


def test_shards_follow_the_rules():
    config = resolve(EngineConfig(layout=LayoutConfig(mesh={"tensor": 2}, rules={"ffn": "tensor"})), LLAMA, "gpu")
    whole = Shard.of(LLAMA, resolve(EngineConfig(), LLAMA, "gpu"), DEVICE)
    cut = Shard.of(LLAMA, config, DEVICE)
    assert cut.page == whole.page
    assert whole.weights - cut.weights == pytest.approx(2 * 32 * 3 * 4096 * 14336 / 2)
    assert cut.sums == 32


class Moves:
    """A plan's moves."""

    def __init__(self, outs=0, ins=0, copies=0):
        from jinfer.scheduler.plan import PageCopy, PageIn, PageOut
        self.outs = [PageOut(0, 1, 1)] * outs
        self.ins = [PageIn(0, 1, 1)] * ins
        self.copies = [PageCopy(0, 1, 2)] * copies
        self.received = ()


def test_pages_come_in_while_the_step_before_computes():
    def link(overlap=True):
        return Link((100,), rate=1000.0, network=1.0, copy=1e9, overlap=overlap)
    assert link().start(Moves(), 3.0, 5.0) == (5.0, 0.0)
    assert link().start(Moves(ins=10), 3.0, 5.0) == (5.0, 0.0)  # a second from 3 on
    assert link().start(Moves(ins=30), 3.0, 5.0) == (6.0, 1.0)
    assert link(overlap=False).start(Moves(ins=10), 3.0, 5.0) == (6.0, 1.0)
    busy = link()
    assert busy.start(Moves(outs=20), 3.0, 5.0) == pytest.approx((5.0, 0.0), abs=1e-4)
    assert busy.start(Moves(outs=1), 5.0, 6.0) == pytest.approx((7.0, 1.0), abs=1e-4)  # the place aside is taken till then
