"""What service parameters do on a real engine: timeouts, queue limits, the prefix cache, pins, drains."""

import pytest

from jinfer.config import SamplingParams, ServiceParams
from jinfer.errors import CapacityError, ConfigError, OverloadError, RequestError
from jinfer.scheduler.policy import Policy
from tests.engines import drain, one, run, short_of_pages

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
LONG = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
PREFIX = [1 + i % 200 for i in range(40)]  # five pages


@pytest.fixture
def engine(engines):
    """With an empty prefix cache."""
    engine = engines.get("llama_plain")
    engine.before = engine.metrics.snapshot()
    return engine


def since(engine):
    return engine.metrics.since(engine.before)


def fresh(first):
    """A prompt of five pages that no other test uses."""
    return [first, *PREFIX[1:]]


def finish(engine):
    """As `drain`, with pages that stay held."""
    outputs = {}
    while engine.has_work:
        outputs.update({delta.request_id: delta.output for delta in engine.step() if delta.request_finished})
    engine.check()
    return outputs


@pytest.mark.parametrize("steps", [0, 1, 2, 5])
def test_a_timeout_ends_all_choices_in_whatever_state(engine, steps, monkeypatch):
    other = engine.submit([1, 2, 3], LONG)
    mine = engine.submit(PREFIX * 2, SamplingParams(n=2, temperature=0, max_tokens=100, ignore_eos=True),
                         service=ServiceParams(timeout=60))
    earlier = [delta for _ in range(steps) for delta in engine.step()]
    (worker,) = engine.workers
    expired = worker.scheduler.expired
    monkeypatch.setattr(worker.scheduler, "expired", lambda now: expired(now + 61))
    earlier += engine.step()
    assert engine.metrics.requests_running == 1
    outputs, _ = drain(engine, earlier)
    assert [c.finish_reason for c in outputs[mine].completions] == ["timeout"] * 2
    assert outputs[mine].error is None
    assert steps < 5 or all(c.token_ids for c in outputs[mine].completions)
    assert len(outputs[other].completions[0].token_ids) == 60
    assert (since(engine).requests_timed_out, since(engine).requests_finished) == (1, 1)


def test_a_full_queue_refuses_and_leaves_nothing(engines):
    engine = engines.get("llama_plain", max_waiting=3)
    with pytest.raises(RequestError, match=r"n: 4 choices .*max_waiting 3"):
        engine.submit([9], SamplingParams(n=4))  # it would be refused for ever
    ids = [engine.submit([i + 1], GREEDY) for i in range(2)]
    assert not engine.takes(2)
    with pytest.raises(OverloadError, match="3"):
        engine.submit([9], SamplingParams(n=2, max_tokens=4))
    assert engine.metrics.requests_waiting == 2
    ids.append(engine.submit([3], GREEDY))
    with pytest.raises(OverloadError):
        engine.submit([9], GREEDY)
    assert engine.metrics.requests_rejected == 2
    earlier = engine.step() + engine.step()
    assert engine.takes(3)
    outputs, _ = drain(engine, earlier)
    assert sorted(outputs) == sorted(ids)


def test_what_was_cached_is_counted(engine):
    first, again = (one(engine, fresh(201), temperature=0, max_tokens=8) for _ in range(2))
    assert (first.cached_tokens, again.cached_tokens) == (0, 32)  # the last page holds the last token
    assert first.completions[0].token_ids == again.completions[0].token_ids
    change = since(engine)
    assert (change.prefix_queries, change.prefix_hits, change.saved_tokens) == (80, 32, 32)
    assert change.hit_rate == pytest.approx(0.4)
    assert change.prefill_tokens == 48


def test_choices_of_a_prompt_share_it(engine):
    output = one(engine, fresh(202), temperature=0, max_tokens=8, n=3)
    assert output.cached_tokens == 0  # the prompt was computed, once
    assert since(engine).saved_tokens == 2 * 39
    assert since(engine).prefill_tokens == 40 + 2


@pytest.mark.parametrize("services", [
    (ServiceParams(cache=False), ServiceParams()), (ServiceParams(), ServiceParams(cache=False)),
    (ServiceParams(cache_salt="a"), ServiceParams(cache_salt="b")), (ServiceParams(), ServiceParams(cache_salt="b"))],
    ids=["not published", "not read", "other salt", "salt"])
def test_what_a_request_may_not_share(engine, services, request):
    prompt = fresh(203 + ["not published", "not read", "other salt", "salt"].index(request.node.callspec.id))
    outputs = []
    for service in services:
        name = engine.submit(prompt, GREEDY, service=service)
        outputs.append(drain(engine)[0][name])
    assert [output.cached_tokens for output in outputs] == [0, 0]
    assert outputs[0].completions[0].token_ids == outputs[1].completions[0].token_ids


def test_a_pin_keeps_its_pages(engine):
    prompt = fresh(210)
    name = engine.pin([*prompt, 5, 6])
    output = finish(engine)[name]
    assert output.prompt_token_ids == prompt  # whole pages
    assert output.error is None
    assert engine.metrics.pages_held == 5
    with pytest.raises(RequestError, match="in use"):
        engine.submit([1], GREEDY, request_id=name)
    flood = [[1 + i, *([7] * 60)] for i in range(14)]  # more pages than the pool has
    for each in flood:
        engine.submit(each, LONG)
    finish(engine)
    assert since(engine).evictions > 0
    again = engine.submit([*prompt, 9], GREEDY)
    assert finish(engine)[again].cached_tokens == 40
    engine.unpin(name)
    assert engine.metrics.pages_held == 0
    with pytest.raises(RequestError, match="is not pinned"):
        engine.unpin(name)
    run(engine, flood, LONG)
    assert run(engine, [[*prompt, 9]], GREEDY)[0].cached_tokens == 0


def test_what_cannot_be_pinned(engine):
    with pytest.raises(RequestError, match="prompt: 7 tokens do not fill a page of 8"):
        engine.pin([1] * 7)
    with pytest.raises(RequestError, match="cache: is off"):
        engine.pin(PREFIX, ServiceParams(cache=False))
    names = [engine.pin([220 + i, *([3] * (engine.max_context - 1))]) for i in range(8)]
    outputs = finish(engine)
    good = [name for name in names if outputs[name].error is None]
    assert 0 < len(good) < 8
    assert all(isinstance(outputs[name].error, CapacityError) for name in names if name not in good)
    left = engine.metrics.pages_total - engine.metrics.pages_held
    context = engine.max_context // 8
    assert context <= left < 2 * context
    with pytest.raises(RequestError, match="is not pinned"):
        engine.unpin(next(name for name in names if name not in good))
    for name in good:
        engine.unpin(name)
    drain(engine)


def test_a_pin_that_is_given_up_before_it_is_held(engine):
    name = engine.pin([230] * 64)
    earlier = engine.step()
    engine.unpin(name)
    outputs, _ = drain(engine, earlier)
    assert outputs[name].completions[0].finish_reason == "cancelled"
    engine.submit([1], GREEDY, request_id=name)  # the name is free
    drain(engine)


def test_the_engine_gives_no_request_the_name_of_a_pin(engine):
    number = int(engine.submit([1], GREEDY).removeprefix("req-"))
    name = engine.pin(fresh(231), request_id=f"req-{number + 1}")
    finish(engine)
    other = engine.submit([1], GREEDY)
    assert list(finish(engine)) == [other] != [name]
    engine.unpin(name)


def test_what_preempted_requests_compute_again_is_counted(engine):
    prompts = [[232 + i] * 30 for i in range(8)]
    with short_of_pages(engine, 40):
        outputs = run(engine, prompts, LONG)
    change = since(engine)
    assert sum(output.timing.preemptions for output in outputs) == change.preemptions > 0
    assert 0 < change.recomputed_tokens <= 90 * change.preemptions
    assert change.recomputed_tokens + change.restored_tokens >= 30 * change.preemptions
    assert change.prefill_tokens == 240 + change.recomputed_tokens
    assert all(output.cached_tokens == 0 for output in outputs)


def test_stalls_are_told_by_what_went_on(engine):
    engine.submit([1, 2, 3], LONG, service=ServiceParams(itl_target=1e-9))  # every gap is too long
    earlier = [delta for _ in range(10) for delta in engine.step()]
    before = since(engine)
    assert (before.stalls_preemption, before.stalls_prefill) == (0, 0)
    assert before.stalls_other > 0
    engine.submit(fresh(245), GREEDY)
    drain(engine, earlier)
    change = since(engine)
    assert change.stalls_prefill >= 1
    assert change.stalls_preemption == 0
    assert change.stalls >= 59


def test_memory_by_class_is_all_there_is(engine, monkeypatch):
    monkeypatch.setattr("jinfer.engine.engine.UNFILLED_EVERY", 1)
    total, earlier = engine.metrics.kv_bytes, []
    for first in (241, 242, 243):
        engine.submit([first] * 13, LONG)
        earlier += engine.step()
        memory = engine.metrics.memory()
        assert sum(size for name, size in memory.items() if name.startswith("kv_")) == total
    page = engine.metrics.page_bytes[0]
    assert memory["kv_held"] + memory["kv_fragmentation"] == 6 * page  # three prompts of two pages
    # the first has made two decode steps, the second one
    assert memory["kv_fragmentation"] == (1 + 2 + 3) * page // 8
    assert memory["weights"] == engine.metrics.weight_bytes > 0
    drain(engine, earlier)
    memory = engine.metrics.memory()
    assert (memory["kv_held"], memory["kv_fragmentation"]) == (0, 0)
    assert memory["kv_cached"] >= 3 * page


def test_a_drained_engine_finishes_what_it_has_begun(engine):
    ids = [engine.submit([250 + i], LONG) for i in range(10)]  # of which eight run
    earlier = []
    while engine.metrics.requests_running < 8:
        earlier += engine.step()
    assert engine.drain(hand_back=True) == ids[8:]
    with pytest.raises(OverloadError, match="draining"):
        engine.submit([1], GREEDY)
    outputs, _ = drain(engine, earlier)
    assert [len(outputs[i].completions[0].token_ids) for i in ids] == [60] * 8 + [0] * 2
    assert [type(outputs[i].error) for i in ids] == [type(None)] * 8 + [OverloadError] * 2
    engine.resume()
    assert len(run(engine, [[1]], GREEDY)[0].completions[0].token_ids) == 8


def test_a_policy_that_raises_refuses_all_choices(engine, monkeypatch):
    asked = []

    def key(candidate):
        asked.append(candidate)
        if len(asked) == 2:
            raise ZeroDivisionError("of the user's own")
        return candidate.arrival

    (worker,) = engine.workers
    monkeypatch.setattr(worker.scheduler, "policy", Policy("broken", key))
    with pytest.raises(ConfigError, match="policy: the key of 'broken' failed: of the user's own"):
        engine.submit([1, 2, 3], SamplingParams(n=2))
    assert not engine.has_work
    assert len(one(engine, [1, 2, 3], temperature=0, max_tokens=8, ignore_eos=True).completions[0].token_ids) == 8
