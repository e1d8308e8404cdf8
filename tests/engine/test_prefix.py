"""In float32 what requests share changes nothing: prefixes in the pool and in host memory, swaps, forks, recomputing."""

import dataclasses

import numpy as np
import pytest

from jinfer.config import SamplingParams, ServiceParams
from tests.engines import drain, run, short_of_pages

SIZE = 4
SHARED = {"page_size": SIZE, "kv_pages": 97, "max_context": 64, "max_rows": 4, "prefill_tokens": 16, "host_kv_gb": 0.01}
MODELS = ["llama_plain", "gemma2", "deepseek_v2", "mistral"]  # full attention, two groups, latent attention, a window
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=0)
ALONE = ServiceParams(cache=False)
GOLDEN_RATIO = 0x9E3779B97F4A7C15

rng = np.random.default_rng(5)
SYSTEM = rng.integers(0, 256, 22).tolist()
TURNS = [rng.integers(0, 256, n).tolist() for n in (5, 9, 3, 16, 1)]
# One system prompt, and a conversation; all begin alike. The ends lie before, at and behind the edges of pages.
PROMPTS = [SYSTEM + turn for turn in TURNS] + [SYSTEM[:n] for n in (1, 15, 16, 17)] + [
    SYSTEM + TURNS[0] + TURNS[1], SYSTEM + TURNS[0] + TURNS[1] + TURNS[2]]

STRANGERS = [rng.integers(0, 256, n).tolist() for n in (9, 14, 20, 25, 17, 22)]
LONGER = dataclasses.replace(GREEDY, max_tokens=24)


@pytest.fixture
def engine(engines, request):
    """With an empty prefix cache, and a host tier that is always worth it."""
    engine = engines.get(request.param, **SHARED)
    (worker,) = engine.workers
    worker.scheduler.observe_swap = lambda moved, seconds: None
    with short_of_pages(engine, 1, preempts=False):
        pass
    return engine


every_model = pytest.mark.parametrize("engine", MODELS, indirect=True)
one_model = pytest.mark.parametrize("engine", MODELS[:1], indirect=True)


def models_and(name, values, quick, ids=None):
    """All values with the first model, and a few with the others; the rest is slow."""
    cases = [pytest.param(model, value, id=f"{model}-{word}", marks=[] if model == MODELS[0] or value in quick else pytest.mark.slow)
             for model in MODELS for value, word in zip(values, ids or values, strict=True)]
    return pytest.mark.parametrize(("engine", name), cases, indirect=["engine"])


def serve(engine, prompt, params=GREEDY, service=None):
    name = engine.submit(prompt, params, service=service)
    return drain(engine)[0][name]


ALONES = {}


def alone(engine, prompts=PROMPTS, params=GREEDY):
    """Each prompt by itself, and nothing in the cache. Computed once an engine."""
    key = id(engine), str(prompts)
    if key not in ALONES:
        ALONES[key] = [serve(engine, prompt, params, ALONE) for prompt in prompts]
        assert not any(output.cached_tokens for output in ALONES[key])
    return ALONES[key]


def assert_same(got, want):
    """Ids and logprobs of every choice."""
    for mine, theirs in zip(got, want, strict=True):
        for a, b in zip(mine.completions, theirs.completions, strict=True):
            assert (a.token_ids, a.finish_reason, a.text) == (b.token_ids, b.finish_reason, b.text)
            np.testing.assert_allclose([x.logprob for x in a.logprobs], [x.logprob for x in b.logprobs], atol=1e-4)


@every_model
def test_prefixes_that_are_found(engine):
    want = alone(engine)
    cold, warm = ([serve(engine, prompt) for prompt in PROMPTS] for _ in range(2))
    assert_same(cold, want)
    assert_same(warm, want)
    for prompt, output in zip(PROMPTS, warm, strict=True):  # all of it but the page with the last token
        assert output.cached_tokens == (len(prompt) - 1) // SIZE * SIZE
    assert sum(bool(output.cached_tokens) for output in cold) >= 6


@every_model
def test_prefixes_that_come_back_from_host_memory(engine):
    want, metrics = alone(engine), engine.metrics
    before = metrics.pages_swapped_in, metrics.pages_swapped_out
    flood = [rng.integers(0, 256, 40).tolist() for _ in range(3)]
    with short_of_pages(engine, 24, host_pages=200, preempts=False):
        for _ in range(2):
            for prompt, output in zip(PROMPTS, want, strict=True):
                assert_same([serve(engine, prompt)], [output])
            run(engine, flood, GREEDY)
        index = engine.workers[0].scheduler.pages.index
        assert index.host_hit > 0
        assert all(index.host.most)
    assert metrics.pages_swapped_in > before[0]
    assert metrics.pages_swapped_out > before[1]


@models_and("host_pages", [0, 12, 200], [200], ids=["recomputed", "some swapped", "swapped"])
def test_preempted_and_resumed(engine, host_pages):
    """In a pool that hardly holds two of them, each more urgent than those before."""
    want, scheduler = alone(engine, STRANGERS, LONGER), engine.workers[0].scheduler
    swaps, windowed = scheduler.swaps, all(pool.window for pool in scheduler.pages.pools)
    with short_of_pages(engine, 8 if windowed else 16, host_pages):
        names, deltas = [], []
        for i, prompt in enumerate(STRANGERS):
            names.append(engine.submit(prompt, LONGER, service=ServiceParams(priority=-i)))
            for _ in range(4):
                deltas += engine.step()
        outputs, _ = drain(engine, deltas)
        assert_same([outputs[name] for name in names], want)
        if host_pages == 200 or (host_pages and not windowed):  # 12 may be other pages than windows need
            assert scheduler.swaps > swaps
        if host_pages == 200:
            assert scheduler.pages.index.host_hit > 0


@every_model
def test_who_comes_together_computes_a_prefix_once(engine):
    prompt, before = SYSTEM + TURNS[0], engine.metrics.prefill_tokens
    others = [SYSTEM + turn for turn in TURNS[1:4]]
    want = alone(engine)
    before = engine.metrics.prefill_tokens
    got = run(engine, [prompt] * 4, GREEDY)
    assert_same(got, [want[0]] * 4)
    assert engine.metrics.prefill_tokens - before == len(prompt) + 3 * (len(prompt) - 24)
    assert [output.cached_tokens for output in got] == [0, 24, 24, 24]
    assert_same(run(engine, others, GREEDY), want[1:4])


# Choices of one prompt


def separately(engine, prompt, params, service=ALONE):
    """Each choice as a request of its own."""
    return [serve(engine, prompt, dataclasses.replace(params, n=1, seed=None if params.seed is None else (
        params.seed + i * GOLDEN_RATIO) % 2**64), service).completions[0] for i in range(params.n)]


@models_and("length", [3 * SIZE - 1, 3 * SIZE, 3 * SIZE + 1, 1, 2], [3 * SIZE - 1])
def test_choices_equal_requests_of_their_own(engine, length):
    """n is more than there are rows: some fork from a sibling that has gone on."""
    before = engine.metrics.forked_pages
    for params in (dataclasses.replace(GREEDY, n=6, max_tokens=6),
                   SamplingParams(n=6, temperature=1.0, seed=9, max_tokens=6, ignore_eos=True, logprobs=0, top_p=0.95,
                                  repetition_penalty=1.5, presence_penalty=0.4, frequency_penalty=0.3, logit_bias={7: 5.0, 9: 4.0}),
                   SamplingParams(n=3, temperature=1.0, seed=4, max_tokens=1, ignore_eos=True, logprobs=0)):
        output = serve(engine, SYSTEM[:length], params)
        want = separately(engine, SYSTEM[:length], params)
        assert [c.token_ids for c in output.completions] == [c.token_ids for c in want]
        for a, b in zip(output.completions, want, strict=True):
            np.testing.assert_allclose([x.logprob for x in a.logprobs], [x.logprob for x in b.logprobs], atol=1e-4)
        kinds = {tuple(c.token_ids) for c in output.completions}
        assert len(kinds) == 1 or params.temperature
        assert len(kinds) > 1 or params.n < 6 or not params.temperature
    assert (engine.metrics.forked_pages > before) == ((length - 1) % SIZE > 0)


@one_model
def test_choices_that_end_early(engine):
    """Their siblings go on with the pages they shared; the first to end is the one that computed the prompt."""
    params = SamplingParams(n=4, temperature=1.0, seed=11, max_tokens=20, ignore_eos=True, logprobs=0)
    want = separately(engine, SYSTEM, params)
    ends = want[0].token_ids[2]
    stopped = dataclasses.replace(params, stop_token_ids=(ends,))
    assert_same([serve(engine, SYSTEM, stopped)], [serve(engine, SYSTEM, stopped, ALONE)])
    output = serve(engine, SYSTEM, stopped)
    assert output.completions[0].finish_reason == "stop"
    for choice, whole in zip(output.completions, want, strict=True):
        assert choice.token_ids == whole.token_ids[:len(choice.token_ids)]


@one_model
def test_a_cancelled_choice_leaves_its_siblings_alone(engine):
    params = SamplingParams(n=4, temperature=1.0, seed=12, max_tokens=20, ignore_eos=True, logprobs=0)
    want = separately(engine, SYSTEM, params)
    for index in range(4):
        for steps in (1, 2, 3, 6):
            name, deltas = engine.submit(SYSTEM, params), []
            for _ in range(steps):
                deltas += engine.step()
            choice = engine._choices[name][index]
            engine._end(choice, "cancelled", "", ())
            output = drain(engine, deltas)[0][name]
            for i, (mine, theirs) in enumerate(zip(output.completions, want, strict=True)):
                assert mine.token_ids == theirs.token_ids[:len(mine.token_ids)]
                assert mine.finish_reason == ("cancelled" if i == index else "length")


# Who may share


@one_model
@pytest.mark.parametrize("n", [1, 3])
def test_nothing_is_left_of_who_opted_out(engine, n):
    params = SamplingParams(n=n, temperature=1.0, seed=1, max_tokens=9, ignore_eos=True, stop_token_ids=tuple(range(0, 256, 20)))
    pool = engine.workers[0].scheduler.pages.pools[0]
    serve(engine, SYSTEM, params)
    free = pool.free
    for service in (ALONE, ServiceParams(cache=False, cache_salt="a")):
        assert serve(engine, SYSTEM, params, service).cached_tokens == 0
        assert pool.free == free
    assert serve(engine, SYSTEM, params).cached_tokens == 20


@pytest.mark.parametrize("name", ["llama_dynamic", "phi3_longrope"])
def test_a_prefix_is_shared_only_where_positions_are_rotated_alike(engines, name, monkeypatch):
    """32 positions are the original context of both: a longer prompt rotates its first tokens otherwise."""
    engine = engines.get(name, max_context=64, page_size=SIZE, kv_pages=97, max_rows=2, prefill_tokens=16)
    one, two, three = (rng.integers(0, 256, n).tolist() for n in (30, 10, 6))
    prompts = [one, one[:20], one + two, one + two + three, one + two + three[::-1]]
    want = alone(engine, prompts)
    got = [serve(engine, prompt) for prompt in prompts]
    assert_same(got, want)
    long = 40 if name == "phi3_longrope" else 0  # `dynamic` rotates each length in its own way
    assert [output.cached_tokens for output in got] == [0, 16, 0, long, 40]
    monkeypatch.setattr("jinfer.engine.admission.prompt_regime", lambda rope, length: 0)
    with short_of_pages(engine, 96, preempts=False):
        wrong = [serve(engine, prompt) for prompt in (prompts[0], prompts[2])]
    assert wrong[1].cached_tokens == 28
    errors = np.array([x.logprob for x in wrong[1].completions[0].logprobs]) - [x.logprob for x in want[2].completions[0].logprobs]
    assert np.abs(errors).max() > 0.01  # what the regime is for


def test_half_precision_pages_are_shared(engines):
    engine = engines.get("llama_plain", **{**SHARED, "kv_dtype": "bfloat16", "max_rows": 2})
    with short_of_pages(engine, 14, 200):
        outputs = run(engine, PROMPTS[:3] + STRANGERS, LONGER)
    assert all(len(output.completions[0].token_ids) == 24 for output in outputs)
