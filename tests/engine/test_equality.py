"""In float32 a request's tokens depend on nothing but itself: not on neighbours, chunks, preemption or the mesh."""

import numpy as np
import pytest

from jinfer.config import LayoutConfig, SamplingParams
from tests.engines import drain, golden, run, short_of_pages

LONG = golden("logits_llama_plain")["prompts"]["long"]
SHORT = golden("logits_llama_plain")["prompts"]["short"]
# Compiling is most of what these tests cost: few engines, shared, most with few rows; pages run short without another.
CHUNKED = {"prefill_tokens": 16}
SMALL_PAGES = {"page_size": 4, "kv_pages": 257, "decode_steps": 4, "max_rows": 3}
LARGE_PAGES = {"page_size": 16, "max_rows": 2}


def _prompts(count: int, seed: int = 0) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 256, n).tolist() for n in rng.integers(1, 70, count)]


def _ids(outputs):
    return [o.completions[0].token_ids for o in outputs]


@pytest.fixture(scope="module")
def alone(engines):
    """Greedy ids of twelve prompts, each run by itself."""
    engine = engines.get("llama_plain")
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    return [run(engine, [prompt], params)[0].completions[0].token_ids for prompt in _prompts(12)]


GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


@pytest.mark.parametrize("name", ["llama_plain", "llama_dynamic", "llama_bias", "llama_kv1"])
def test_greedy_ids_equal_transformers(engines, name):
    engine = engines.get(name) if name == "llama_plain" else engines.get(name, max_context=128, **CHUNKED)
    for prompt in golden(f"logits_{name}")["prompts"].values():
        got = run(engine, [prompt["ids"]], SamplingParams(temperature=0, max_tokens=16, ignore_eos=True))[0]
        # `dynamic` rotates cached keys for the length they were written at, a forward without cache for the last
        count = 1 if name == "llama_dynamic" and len(prompt["ids"]) > 64 else 16
        assert got.completions[0].token_ids[:count] == prompt["greedy16_nocache"][:count]


@pytest.mark.parametrize("overrides", [{}, CHUNKED, SMALL_PAGES, LARGE_PAGES], ids=str)
def test_batch_equals_alone(engines, alone, overrides):
    assert _ids(run(engines.get("llama_plain", **overrides), _prompts(12), GREEDY)) == alone


@pytest.mark.parametrize("overrides", [{}, SMALL_PAGES], ids=str)
def test_preempted_equals_alone(engines, alone, overrides):
    engine = engines.get("llama_plain", **overrides)
    with short_of_pages(engine, 160 // engine.config.page_size):
        assert _ids(run(engine, _prompts(12), GREEDY)) == alone


def _parallel(engines, tensor):
    """Two programs to compile, for a chunk and for a row or two, are enough here."""
    return engines.get("llama_plain", layout=LayoutConfig(mesh={"tensor": tensor}), max_logprobs=275, max_rows=2,
                       prefill_tokens=16)


@pytest.mark.parametrize("tensor", [2, 4])
def test_tensor_parallel_equals_alone(engines, alone, tensor):
    assert _ids(run(_parallel(engines, tensor), _prompts(12), GREEDY)) == alone


def test_kv_heads_are_replicated_where_ranks_outnumber_them(engines):
    prompt = golden("logits_llama_kv1")["prompts"]["long"]
    engine = engines.get("llama_kv1", layout=LayoutConfig(mesh={"tensor": 4}), max_context=128, **CHUNKED)
    got = run(engine, [prompt["ids"]], SamplingParams(temperature=0, max_tokens=16, ignore_eos=True))[0]
    assert got.completions[0].token_ids == prompt["greedy16_nocache"]
    assert engine.metrics.kv_bytes == 4 * engines.get("llama_kv1", max_context=128, **CHUNKED).metrics.kv_bytes


def test_seeded_sampling_depends_on_seed_and_position_only(engines):
    """Case C10, and C18 with temperature 1: alone, in a batch, and preempted."""
    def params(i):
        return SamplingParams(temperature=1.0, seed=i, max_tokens=24, ignore_eos=True, top_p=0.95)

    prompts = _prompts(8, seed=1)
    engine = engines.get("llama_plain")
    alone = [run(engine, [p], params(i))[0].completions[0].token_ids for i, p in enumerate(prompts)]
    assert _ids(run(engine, prompts, [params(i) for i in range(8)])) == alone
    with short_of_pages(engine, 20):
        assert _ids(run(engine, prompts, [params(i) for i in range(8)])) == alone
    assert _ids(run(engine, prompts, [params(i + 100) for i in range(8)])) != alone


def test_lengths_around_pages_cold_warm_and_recycled(engines):
    """Case C16: prompts of every length around page edges; the pages have had other owners before."""
    ids, logprob = LONG["ids"], {}
    prompts = [ids[:n] for n in range(1, 66)]
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, logprobs=0)
    for overrides, pages in ((SMALL_PAGES, 28), ({}, 24), (LARGE_PAGES, 8)):  # most of all pages are always in use
        engine = engines.get("llama_plain", **overrides)
        with short_of_pages(engine, pages):
            rounds = [run(engine, prompts, params), run(engine, prompts[::-1], params)[::-1]]
        for outputs in rounds:
            for n, output in enumerate(outputs):
                choice = output.completions[0]
                values = [e.logprob for e in choice.logprobs]
                first = logprob.setdefault(n, (choice.token_ids, values))
                assert choice.token_ids == first[0]
                np.testing.assert_allclose(values, first[1], atol=1e-3)
    assert logprob[64][0][:1] == run(engines.get("llama_plain"), [ids[:65]], GREEDY)[0].completions[0].token_ids[:1]


def test_logprobs_equal_the_golden_logits(engines):
    """Case C11 at engine level, whole and in chunks."""
    for overrides in ({}, CHUNKED):
        engine = engines.get("llama_plain", **overrides)
        for prompt in (SHORT, LONG):
            params = SamplingParams(temperature=0, max_tokens=1, logprobs=5, prompt_logprobs=2)
            output = run(engine, [prompt["ids"]], params)[0]
            entries = output.prompt_logprobs
            assert [e.token_id for e in entries] == prompt["ids"]
            assert entries[0].logprob is None
            got = [e.logprob for e in entries[1:]]
            np.testing.assert_allclose(got, prompt["prompt_logprobs"][1:], atol=1e-3)
            assert all(len(e.top) == 2 and e.top[0][1] >= e.logprob - 1e-5 for e in entries[1:])
            logits = np.array(prompt["last_logits"])
            want = logits - np.log(np.exp(logits).sum())
            first = output.completions[0].logprobs[0]
            assert [t for t, _ in first.top] == np.argsort(-want)[:5].tolist()
            np.testing.assert_allclose([v for _, v in first.top], np.sort(want)[::-1][:5], atol=1e-3)


@pytest.mark.parametrize("tensor", [2, 4])
def test_tensor_parallel_logprobs_equal_the_golden_logits(engines, tensor):
    """The vocabulary, 275, is padded to the mesh: the padding has no probability and is never listed."""
    output = run(_parallel(engines, tensor), [SHORT["ids"]], SamplingParams(temperature=0, max_tokens=1, logprobs=5, prompt_logprobs=275))[0]
    entries = output.prompt_logprobs[1:]
    np.testing.assert_allclose([e.logprob for e in entries], SHORT["prompt_logprobs"][1:], atol=1e-4)
    for entry in [*entries, *output.completions[0].logprobs]:
        assert all(0 <= token < 275 for token, _ in entry.top)
    np.testing.assert_allclose([np.exp([v for _, v in e.top]).sum() for e in entries], 1.0, atol=1e-4)


def test_scores_survive_preemption(engines):
    engine = engines.get("llama_plain")
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, prompt_logprobs=0)
    with short_of_pages(engine, 20):
        outputs = run(engine, [LONG["ids"][:50]] * 8, params)
    for index, output in enumerate(outputs):
        got = [e.logprob for e in output.prompt_logprobs[1:]]
        np.testing.assert_allclose(got, LONG["prompt_logprobs"][1:50], atol=1e-3, err_msg=str(index))


def test_cancelling_others_disturbs_nobody(engines, alone):
    engine = engines.get("llama_plain")
    ids = [engine.submit(p, GREEDY) for p in _prompts(12)]
    earlier = []
    for step in range(6):
        earlier += engine.step()
        engine.cancel(ids[2 * step])
    outputs, _ = drain(engine, earlier)
    for index in range(1, 12, 2):
        assert outputs[ids[index]].completions[0].token_ids == alone[index]
