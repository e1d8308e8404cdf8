"""The engine on the TPU kernels, interpreted on this CPU: the same greedy tokens as on the reference, in float32."""

import functools
import importlib

import jax
import numpy as np
import pytest

from jinfer.config import SamplingParams
from jinfer.sharding import Layout
from tests.engines import run

tpu = {name: pytest.importorskip(f"pallas_kernels.{name}.tpu") for name in ("kv_update", "paged_attention")}
rng = np.random.default_rng(0)
# With a chunk budget of 32 tokens: a whole prompt and a part of the next, its rest, then one in a slot used before.
PROMPTS = [rng.integers(0, 256, n).tolist() for n in (20, 44, 32)]
GREEDY = SamplingParams(temperature=0, max_tokens=7, ignore_eos=True)


@pytest.fixture
def calls(monkeypatch):
    """Lets every operation run its TPU kernel in the fast interpreter; counts how often each is traced."""
    jax.clear_caches()  # or a block traced by an earlier test is taken
    counted = dict.fromkeys(tpu, 0)

    def interpreted(name, function):
        @functools.wraps(function)
        def call(*args, **options):
            counted[name] += 1
            return function(*args, **options, interpret=True)

        return call

    for name, module in tpu.items():
        monkeypatch.setattr(module, name, interpreted(name, getattr(module, name)))
        monkeypatch.setattr(importlib.import_module(f"pallas_kernels.{name}.api"), "choose", lambda _: "tpu")
    monkeypatch.setattr(Layout, "platform", property(lambda self: "tpu"))  # the pool is shaped for it
    yield counted
    jax.clear_caches()


@pytest.mark.parametrize("steps", [1, pytest.param(4, marks=pytest.mark.slow)])
def test_tokens_equal_those_of_the_reference(engines, calls, monkeypatch, steps):
    """Chunked prefill, two chunks in a call, rows that come and go, one or several steps in a dispatch."""
    rows = 2 if steps == 1 else 1  # a program less to compile
    overrides = {"dtype": "float32", "kv_pages": 21, "page_size": 16, "max_rows": rows, "decode_steps": steps}
    kernels = engines.get("llama_plain", **overrides, compilation_cache="")
    got = [r.completions[0].token_ids for r in run(kernels, PROMPTS, GREEDY)]
    assert min(calls.values()) >= 2  # a trace of prefill and one of decode at least: nothing went by the kernels
    monkeypatch.undo()
    jax.clear_caches()
    reference = engines.get("llama_plain")  # which other tests compile too; tokens do not depend on the rest
    want = [r.completions[0].token_ids for r in run(reference, PROMPTS, GREEDY)]
    assert got == want
    assert all(len(tokens) == 7 for tokens in got)
