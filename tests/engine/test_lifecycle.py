"""What an engine must survive: hostile numbers, ids used again, failures, interrupts, its own end."""

import signal

import jax
import numpy as np
import pytest

from jinfer import LLM, SamplingParams
from jinfer.config import EngineConfig
from jinfer.engine.engine import Engine
from jinfer.errors import JinferError, RequestError
from pallas_kernels import Pages
from tests.engines import DATA, SMALL, drain, one, run

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


@pytest.fixture
def fresh(engines):
    """An engine to break."""
    config = EngineConfig(**{**SMALL, "compilation_cache": engines._cache})
    return Engine(DATA / "models" / "llama_plain", config)


def test_min_tokens_of_any_size(engines):
    engine = engines.get("llama_plain", max_context=64)
    output = one(engine, [1, 2, 3], temperature=0, max_tokens=None, min_tokens=2**31 - 1)
    assert output.completions[0].finish_reason == "length"
    assert len(output.completions[0].token_ids) == 61


def test_an_id_used_again_after_a_cancellation(engines):
    """The cancelled request's last delta must not end the new one."""
    engine = engines.get("llama_plain")
    engine.submit([1, 2, 3], GREEDY, request_id="a")
    earlier = engine.step() + engine.step()
    engine.cancel("a")
    engine.submit([4, 5, 6], GREEDY, request_id="a")
    deltas = []
    while engine.has_work:
        deltas += engine.step()
    assert all(d.output.prompt_token_ids == [1, 2, 3] for d in earlier)
    assert all(d.output.prompt_token_ids == [4, 5, 6] for d in deltas)
    assert [d.request_finished for d in deltas].count(True) == 1


def test_an_id_like_the_engines_own(engines):
    engine = engines.get("llama_plain")
    number = int(engine.submit([1], GREEDY).removeprefix("req-"))
    mine = engine.submit([1], GREEDY, request_id=f"req-{number + 1}")
    other = engine.submit([1], GREEDY)
    assert len({mine, other}) == 2
    drain(engine)


@pytest.mark.parametrize("index", [0, 1])
def test_prompt_scores_that_are_no_numbers_fail_their_request_alone(engines, index):
    engine = engines.get("llama_plain", prefill_tokens=16)
    prompts = [list(range(1, 31)), list(range(31, 61))]
    params = SamplingParams(max_tokens=0, prompt_logprobs=1)
    want = [[e.logprob for e in o.prompt_logprobs] for o in run(engine, prompts, params)]
    ids = [engine.submit(p, params) for p in prompts]
    earlier = []
    while not (request := next(r for r in engine._by_request if r.id == ids[index])).pages:
        earlier += engine.step()
    runner = engine.workers[0].runner
    (pool,) = runner.kv
    runner.kv = (pool._replace(v=Pages(pool.v.data.at[request.pages[0][0], :, 0].set(np.nan))),)
    if request.computed < 16:  # its first chunk has not been dispatched, and would write over it
        pytest.fail("the test does not test anything")
    outputs, _ = drain(engine, earlier)
    assert "not finite" in str(outputs[ids[index]].error)
    assert outputs[ids[index]].completions[0].finish_reason == "error"
    other = outputs[ids[1 - index]]
    assert other.error is None
    np.testing.assert_allclose([e.logprob for e in other.prompt_logprobs[1:]], want[1 - index][1:], atol=1e-5)


def test_a_failed_step_makes_the_engine_unusable_and_says_so(fresh, monkeypatch):
    fresh.submit([1, 2, 3], GREEDY)
    monkeypatch.setattr(fresh.workers[0].runner, "dispatch", lambda plan: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        fresh.step()
    for call in (fresh.step, lambda: fresh.submit([1], GREEDY)):
        with pytest.raises(JinferError, match="the engine failed earlier"):
            call()
    fresh.close()


def test_a_closed_engine_says_so_and_holds_no_memory(fresh):
    llm = LLM.from_engine(fresh)
    stream = llm.stream([1, 2, 3], GREEDY)
    next(stream)
    llm.close()
    with pytest.raises(JinferError, match="the engine is closed"):
        llm.generate([1, 2, 3], GREEDY)
    assert not fresh.has_work
    assert all(x.is_deleted() for x in jax.tree.leaves((fresh.workers[0].runner.weights, fresh.workers[0].runner.kv)))


@pytest.fixture
def interrupts():
    """Ctrl-C as a terminal's process sees it; one in the background may have been started to ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interrupts")
def test_an_interrupt_waits_for_the_end_of_the_step(engines, monkeypatch):
    """Ctrl-C in the middle of a step would lose tokens of other requests, or the donated pool."""
    engine = engines.get("llama_plain")
    llm = LLM.from_engine(engine)
    want = llm.generate([[1, 2, 3], [4, 5, 6]], GREEDY)
    other = llm.stream([4, 5, 6], GREEDY)
    first = next(other)
    collect = engine.workers[0].runner.collect

    def interrupted(pending):
        signal.raise_signal(signal.SIGINT)
        return collect(pending)

    monkeypatch.setattr(engine.workers[0].runner, "collect", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate([1, 2, 3], GREEDY)
    monkeypatch.undo()
    assert llm.generate([1, 2, 3], GREEDY).completions[0].token_ids == want[0].completions[0].token_ids
    rest = [d.token_ids for d in other]
    assert [*first.token_ids, *(t for ids in rest for t in ids)] == want[1].completions[0].token_ids
    drain(engine)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_stream_collected_in_the_middle_of_a_step_is_cancelled_after_it(engines, monkeypatch):
    engine = engines.get("llama_plain")
    llm = LLM.from_engine(engine)
    streams = [llm.stream([1, 2, 3], GREEDY)]
    next(streams[0])
    before = engine.metrics.requests_cancelled
    plan = engine.workers[0].scheduler.plan

    def collecting(now):
        made = plan(now)
        if streams:
            streams.clear()  # as the garbage collector may at any allocation
            assert engine.metrics.requests_cancelled == before
        return made

    monkeypatch.setattr(engine.workers[0].scheduler, "plan", collecting)
    llm.generate([4, 5, 6], GREEDY)
    assert engine.metrics.requests_cancelled == before + 1
    monkeypatch.undo()
    drain(engine)


def test_only_one_choice_scores_the_prompt(engines):
    engine = engines.get("llama_plain")
    engine.submit([1, 2, 3], SamplingParams(n=3, max_tokens=1, prompt_logprobs=1))
    assert sorted(r.scores_prompt for r in engine._by_request) == [False, False, True]
    outputs, _ = drain(engine)
    assert all(e.logprob is not None for o in outputs.values() for e in o.prompt_logprobs[1:])


def test_a_request_may_not_ask_for_more_alternatives_than_tokens_exist(engines):
    engine = engines.get("llama_plain", max_logprobs=1000)
    assert engine.config.max_logprobs == 275
    with pytest.raises(RequestError, match="logprobs: 276 is more than the engine's max_logprobs 275"):
        engine.submit([1], SamplingParams(logprobs=276))
    assert len(one(engine, [1], max_tokens=1, logprobs=275).completions[0].logprobs[0].top) == 275
