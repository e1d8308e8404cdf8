"""What must not happen in a hot step: compilation, hidden transfers, copies of the pool."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jinfer.config import EngineConfig, SamplingParams
from jinfer.engine import backend
from jinfer.engine.buckets import Buckets, ramp
from jinfer.engine.catalog import Key, ProgramCatalog
from jinfer.engine.engine import Engine
from jinfer.engine.page_moves import BLOCKS, PageMoves
from jinfer.errors import CacheError, ConfigError, JinferError, LayoutError, RetraceError
from pallas_kernels import Pages
from tests.engines import DATA, drain, one, run

PLAIN = DATA / "models" / "llama_plain"


@pytest.fixture(scope="module")
def warm(engines):
    return engines.get("llama_plain", warmup=True, forbid_compilation=True, max_rows=4, prefill_tokens=16)


def test_nothing_compiles_after_warm_up(warm):
    """Every feature of the sampler, every bucket: one set of programs."""
    compiled = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda name, seconds, **_: compiled.append(name) if "backend_compile" in name else None)
    rng = np.random.default_rng(0)
    features = [{}, {"temperature": 0.0}, {"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.1}, {"logprobs": 2}, {"prompt_logprobs": 1},
                {"presence_penalty": 1.0}, {"logit_bias": {5: 2.0}}, {"min_tokens": 3}, {"n": 2}, {"max_tokens": 0}]
    for count in (1, 2, 5, len(features)):
        prompts = [rng.integers(0, 256, n).tolist() for n in rng.integers(1, 40, count)]
        run(warm, prompts, [SamplingParams(**{"max_tokens": 6, **features[i]}) for i in range(count)])
    assert compiled == []
    assert warm.metrics.compilations == 0
    assert warm.metrics.warmup_compilations == len(warm.workers[0].runner.catalog.keys())


def test_a_missing_program_raises_where_compilation_is_forbidden(warm):
    with pytest.raises(RetraceError, match=r"decode\[7\] was not compiled"):
        warm.workers[0].runner.catalog.get(Key("decode", 7), warm.workers[0].runner.pages)


def test_a_missing_program_is_counted_otherwise(engines):
    engine = engines.get("llama_plain", max_rows=2)
    before = engine.metrics.compilations
    one(engine, [1, 2, 3], temperature=0, max_tokens=3)
    assert engine.metrics.compilations > before


def test_state_and_pool_are_donated(warm):
    kv, state = warm.workers[0].runner.kv, warm.workers[0].runner.state
    one(warm, [1, 2, 3], temperature=0, max_tokens=2)
    assert all(x.is_deleted() for x in jax.tree.leaves((kv, state)))


@pytest.mark.parametrize("key", [Key("decode", 4), Key("prefill", 16)])
def test_no_program_copies_the_pool(warm, key):
    """No instruction but parameters and in-place updates has the pool's shape: a copy would move all of it."""
    runner = warm.workers[0].runner
    text = runner.catalog.get(key, runner.pages).as_text()
    shape = ",".join(map(str, runner.kv[0].k.data.shape))
    assert f"f32[{shape}]" in text
    assert not re.findall(rf"= f32\[{shape}\]\S* copy\(", text)
    assert text.count("may-alias") + text.count("must-alias") >= 2 + len(runner.state)


def test_a_hidden_transfer_in_a_hot_step_is_an_error(engines, monkeypatch):
    """Dispatch runs under the guard: host arithmetic with jnp in it would upload something every step."""
    engine = engines.get("llama_plain", max_rows=3)
    join = type(engine.workers[0].runner)._join

    def leaky(self, request, slot):
        jnp.add(np.ones(3, np.float32), 1.0)
        join(self, request, slot)

    with monkeypatch.context() as patch:
        patch.setattr(type(engine.workers[0].runner), "_join", leaky)
        engine.submit([1, 2, 3])
        with pytest.raises(Exception, match="Disallowed host-to-device"):
            engine.step()
    with pytest.raises(JinferError, match="failed earlier"):
        engine.step()
    engine.close()
    engines.forget(engine)


def test_everything_a_call_gets_but_its_upload_is_on_the_device(warm):
    runner = warm.workers[0].runner
    assert all(isinstance(x, jax.Array) for x in jax.tree.leaves((runner.weights, runner.kv, runner.state)))


def test_an_empty_cache_name_switches_the_cache_off(tmp_path):
    config = EngineConfig(page_size=8, kv_pages=9, warmup=False, compilation_cache=tmp_path / "cache")
    Engine(PLAIN, config).close()
    assert jax.config.jax_compilation_cache_dir == str(tmp_path / "cache")
    Engine(PLAIN, dataclasses.replace(config, compilation_cache="")).close()
    assert jax.config.jax_compilation_cache_dir is None


def test_buckets_hold_every_size_and_waste_little():
    assert ramp(16, 512) == (16, 32, 64, 128, 256, 384, 512)
    assert ramp(1, 64) == (1, 2, 4, 8, 16, 32, 48, 64)
    assert ramp(2, 2) == (2,)
    buckets = Buckets.build(prefill_tokens=512, max_rows=64, smallest_rows=2)
    for n in range(1, 513):
        assert buckets.prefill_size(n) >= n
        assert buckets.prefill_size(n) < max(17, 2 * n)
    for n in range(1, 65):
        assert n <= buckets.decode_size(n) <= max(2, 2 * n)


def test_memory_by_class_adds_up(warm):
    metrics, runner = warm.metrics, warm.workers[0].runner
    assert metrics.kv_bytes == 2 * runner.kv[0].k.data.nbytes
    assert metrics.weight_bytes == sum(w.nbytes for w in runner.weights)
    assert metrics.workspace_bytes > 0


def test_the_pool_is_sized_from_memory(engines):
    token = 2 * 2 * 2 * 8 * 4  # layers, k and v, kv heads, head_dim, bytes
    engine = engines.get("llama_plain", kv_pages=None, kv_memory_gb=100 * 8 * token / 2**30)
    assert engine.metrics.pages_total == 99
    assert engine.workers[0].runner.catalog.workspace() > 0  # what accelerators subtract
    full = engines.get("llama_plain", kv_pages=None, max_rows=2)
    assert full.metrics.pages_total == 2 * 128 // 8
    with pytest.raises(ConfigError, match="max_context: 128 tokens need 17 KV pages"):
        Engine(PLAIN, EngineConfig(page_size=8, kv_memory_gb=10 * 8 * token / 2**30, warmup=False, compilation_cache=""))


def test_weights_do_not_eat_the_pool_of_a_cpu(engines, monkeypatch):
    """A model larger than the share still gets a pool: its weights are not part of the share."""
    weights = engines.get("llama_plain").metrics.weight_bytes
    monkeypatch.setattr(backend, "host_memory", lambda: 16 * weights)
    assert engines.get("llama_plain", kv_pages=None, max_rows=3).metrics.pages_total == 3 * 128 // 8


@pytest.mark.parametrize(("options", "error", "message"), [
    ({"max_context": 4096}, ConfigError, "max_context: 4096 is more than the model's 128"),
    ({"decode_steps": 32, "page_size": 16}, ConfigError, "decode_steps: 32 is more than page_size 16"),
    ({"dtype": "float16"}, ConfigError, "dtype: must be"),
    ({"quantization": "int3"}, ConfigError, "quantization: must be"),
    ({"max_rows": 0}, ConfigError, "max_rows: must be a positive integer"),
    ({"max_logprobs": -1}, ConfigError, "max_logprobs: must be an integer of at least 0"),
    ({"max_logit_bias": -1}, ConfigError, "max_logit_bias: must be an integer of at least 0"),
    ({"kv_pages": 1}, ConfigError, "kv_pages: 1 is the null page alone"),
    ({"kv_memory_gb": float("inf")}, ConfigError, "kv_memory_gb: must be positive"),
    ({"compilation_cache": "/proc/nothing"}, CacheError, "compilation_cache: /proc/nothing cannot be written"),
])
def test_bad_configuration_is_one_clear_line(options, error, message):
    with pytest.raises(error, match=message) as caught:
        Engine(PLAIN, EngineConfig(**options))
    assert "\n" not in str(caught.value)


def test_a_misspelt_logical_axis_is_refused():
    from jinfer.config import LayoutConfig

    with pytest.raises(ConfigError, match=r"layout\.rules\.kv_head: not a logical axis; known: vocab, kv_heads, ffn"):
        LayoutConfig(rules={"kv_head": "tensor"})


def test_too_few_devices_are_reported():
    from jinfer.config import LayoutConfig

    with pytest.raises(LayoutError, match="needs 16 devices, 8 present"):
        Engine(PLAIN, EngineConfig(layout=LayoutConfig(mesh={"tensor": 16})))


def test_broken_logits_fail_their_request_alone(engines, monkeypatch):
    """A NaN in one request's weights path: its neighbours finish as if it were not there."""
    engine = engines.get("llama_plain", max_rows=3)
    prompts = [[1, 2, 3], [4, 5, 6], [7, 8, 9]]
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    want = [o.completions[0].token_ids for o in run(engine, prompts, params)]
    ids = [engine.submit(p, params) for p in prompts]
    earlier = engine.step() + engine.step()
    broken = engine._outputs[ids[1]]
    slot = next(r.slot for r in engine._by_request if r.id == ids[1])
    page = next(r.pages[0][0] for r in engine._by_request if r.id == ids[1])
    runner = engine.workers[0].runner
    runner.kv = (runner.kv[0]._replace(v=Pages(runner.kv[0].v.data.at[page].set(np.nan))),)  # as a faulty kernel would
    outputs, _ = drain(engine, earlier)
    assert slot
    assert broken.completions[0].finish_reason == "error"
    assert "not finite" in str(broken.error)
    for index in (0, 2):
        assert outputs[ids[index]].completions[0].token_ids == want[index]
    # and whoever gets the poisoned page next is not harmed
    assert [o.completions[0].token_ids for o in run(engine, prompts, params)] == want


def test_catalog_lists_each_program_once():
    catalog = object.__new__(ProgramCatalog)
    catalog.buckets = Buckets.build(prefill_tokens=64, max_rows=8, smallest_rows=1)
    catalog.moves, catalog.exchanges = PageMoves((3, 2)), False
    keys = catalog.keys()
    assert len(keys) == len(set(keys)) == len(catalog.buckets.prefill) + len(catalog.buckets.decode) + 2
    catalog.exchanges = True
    assert len(set(catalog.keys())) == len(keys) + 2 * 2 * len(BLOCKS)
