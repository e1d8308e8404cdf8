"""Every family through the engine: eight rows at once, one prefill of 512, alone and over 2 and 4 devices."""

import pytest

from jinfer.config import EngineConfig, LayoutConfig, SamplingParams
from jinfer.engine.catalog import Key
from jinfer.engine.engine import Engine
from tests.engines import DATA, golden, run
from tests.models.forward import QUICK

FAMILIES = ["deepseek_v2", "deepseek_v3", "gemma", "gemma2", "gemma3", "gpt_oss", "llama_plain", "mistral", "mixtral",
            "olmo2", "phi4", "qwen2", "qwen3", "qwen3_moe_norm"]
TOKENS = 16  # of the golden outputs; their two best logits are never nearer than 0.01


def build(name: str, cache, tensor: int = 1) -> Engine:
    """An engine that has the two programs of this test and must not compile others."""
    config = EngineConfig(
        page_size=8, kv_pages=160, max_rows=8, prefill_tokens=512, warmup=False, forbid_compilation=True, prefix_cache=False,
        compilation_cache=cache, layout=LayoutConfig(mesh={"tensor": tensor}))
    engine = Engine(DATA / "models" / name, config)
    catalog, pages = engine.workers[0].runner.catalog, engine.workers[0].runner.pages
    # Half the time; that models are exact as XLA optimises them is for tests/models and test_equality to say.
    catalog.compile = lambda key, pages: catalog.lower(key, pages).compile(compiler_options=QUICK)
    for key in (Key("prefill", 512), Key("decode", 8)):
        catalog.get(key, pages)
    catalog.warm = True
    return engine


@pytest.mark.parametrize("tensor", [1, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 4))])
@pytest.mark.parametrize("name", FAMILIES)
def test_greedy_ids_equal_transformers(name, tensor, pytestconfig):
    engine = build(name, pytestconfig.rootpath / ".cache" / "xla", tensor)
    prompts = list(golden(f"logits_{name}")["prompts"].values())
    rows = [prompts[i % len(prompts)] for i in range(8)]
    assert 384 < sum(len(prompt["ids"]) for prompt in rows) <= 512, "another prefill program would run"
    outputs = run(engine, [prompt["ids"] for prompt in rows],
                  SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True))
    assert (engine.metrics.prefill_calls, engine.metrics.decode_calls) == (1, TOKENS - 1)
    for output, prompt in zip(outputs, rows, strict=True):
        assert output.completions[0].token_ids == prompt["greedy16_nocache"]
    engine.close()
