"""Cases C16 and C18: lengths around the edges of pages, cold, warm and recycled; preempted requests, and priorities."""

import numpy as np
import pytest

from jinfer.config import SamplingParams, ServiceParams
from tests.engines import drain, golden, run, short_of_pages

LONG = golden("logits_llama_plain")["prompts"]["long"]["ids"]
PAGES = {4: {"page_size": 4, "kv_pages": 257, "decode_steps": 4, "max_rows": 3}, 8: {}, 16: {"page_size": 16, "max_rows": 2}}
EDGES = [1, 7, 8, 9, 64, 65]
slow = pytest.mark.slow


def serve(engine, prompt, params, cache=True):
    name = engine.submit(prompt, params, service=ServiceParams(cache=cache))
    return drain(engine)[0][name]


def assert_same(got, want):
    mine, theirs = got.completions[0], want.completions[0]
    assert (mine.token_ids, mine.text, mine.finish_reason) == (theirs.token_ids, theirs.text, theirs.finish_reason)
    np.testing.assert_allclose([x.logprob for x in mine.logprobs], [x.logprob for x in theirs.logprobs], atol=1e-3)


@pytest.mark.parametrize(("size", "lengths"), [
    (8, EDGES), pytest.param(4, range(1, 66), marks=slow), pytest.param(8, range(1, 66), marks=slow),
    pytest.param(16, range(1, 66), marks=slow)], ids=["8", "4-all", "8-all", "16-all"])
def test_lengths_cold_warm_and_recycled(engines, size, lengths):
    """C16. The reference has the cache off; that it equals transformers is said in test_equality."""
    engine = engines.get("llama_plain", **PAGES[size])
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, logprobs=0)
    want = {n: serve(engine, LONG[:n], params, cache=False) for n in sorted({*lengths, *(n + 1 for n in lengths)})}
    for n in lengths:
        with short_of_pages(engine, 128, preempts=False):  # nothing is cached
            got = [serve(engine, LONG[:n], params) for _ in range(3)] + [serve(engine, LONG[:n + 1], params)]
        for output in got[:3]:
            assert_same(output, want[n])
        assert_same(got[3], want[n + 1])
        full = [(length - 1) // size * size for length in (n, n, n + 1)]
        assert [output.cached_tokens for output in got] == [0, *full]  # never all: the last token is computed
    rng = np.random.default_rng(0)
    others = [rng.integers(0, 256, rng.integers(1, 70)).tolist() for _ in range(50)]
    with short_of_pages(engine, -(-90 * 2 // size), preempts=False):
        for n in lengths:
            assert_same(serve(engine, LONG[:n], params), want[n])
        run(engine, others, params)
        for n in lengths:
            assert_same(serve(engine, LONG[:n], params), want[n])
        assert engine.metrics.evictions > 50


@pytest.mark.parametrize("temperature", [0, 1.0])
def test_preempted_requests_lose_and_repeat_nothing(engines, temperature):
    """C18: page 8, 20 pages, eight requests of 24-40 prompt and 60 output tokens, staggered."""
    engine = engines.get("llama_plain")
    prompts = [LONG[i:i + 24 + (5 * i) % 17] for i in range(8)]
    params = [SamplingParams(temperature=temperature, seed=i, max_tokens=60, ignore_eos=True, logprobs=0) for i in range(8)]
    want = [serve(engine, prompt, each, cache=False) for prompt, each in zip(prompts, params, strict=True)]
    with short_of_pages(engine, 20):
        names, deltas, steps = [], [], engine.metrics.steps
        for prompt, each in zip(prompts, params, strict=True):
            names.append(engine.submit(prompt, each))
            deltas += engine.step() + engine.step()
        outputs, _ = drain(engine, deltas)  # which joins the deltas
        for name, other in zip(names, want, strict=True):
            assert_same(outputs[name], other)
            assert len(outputs[name].prompt_token_ids) == len(other.prompt_token_ids)
        preempted = [outputs[name].timing.preemptions for name in names]
    assert preempted[0] == 0 < sum(preempted)
    assert max(preempted) <= engine.config.max_preemptions
    # No request is computed more often than it may be preempted: its prompt in chunks, then a token a step.
    assert engine.metrics.steps - steps <= 8 * (1 + engine.config.max_preemptions) * (60 + 4)


def test_the_more_urgent_goes_first(engines):
    """C18: six long requests of low priority fill the pool, and wait; then comes a short one of high priority."""
    engine, params = engines.get("llama_plain"), SamplingParams(temperature=0, max_tokens=60, ignore_eos=True, logprobs=0)
    prompts, low, high = [LONG[i:i + 40] for i in range(6)], ServiceParams(priority=1), ServiceParams(priority=0)
    want = [serve(engine, prompt, params, cache=False) for prompt in [*prompts, LONG[:5]]]
    with short_of_pages(engine, 20):
        names, deltas = [engine.submit(prompt, params, service=low) for prompt in prompts], []
        for _ in range(12):
            deltas += engine.step()
        waiting = engine.metrics.requests_waiting
        assert waiting
        names.append(engine.submit(LONG[:5], params, service=high))
        steps = engine.metrics.steps
        outputs, _ = drain(engine, deltas)
        assert engine.metrics.steps - steps <= 7 * (1 + engine.config.max_preemptions) * (60 + 4)
    for name, other in zip(names, want, strict=True):
        assert_same(outputs[name], other)
    timing = [outputs[name].timing for name in names]
    assert timing[6].preemptions == 0
    assert sum(timing[6].scheduled < other.scheduled for other in timing[:6]) == waiting
    assert sum(timing[6].finished < other.finished for other in timing[:6]) >= waiting
