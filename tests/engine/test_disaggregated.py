"""Prefill and decode on device groups of their own: the same tokens as one engine, and nothing lost with a worker."""

import dataclasses

import numpy as np
import pytest

from jinfer.config import DisaggregationConfig, EngineConfig, LayoutConfig, SamplingParams
from jinfer.engine.engine import Engine
from jinfer.engine.runner import Pending
from jinfer.engine.transfer import BetweenProcesses
from jinfer.errors import ConfigError, JinferError, LayoutError
from jinfer.scheduler import Status
from tests.engines import DATA, SMALL, drain, run

FEW = {"max_rows": 2, "prefill_tokens": 16}  # few programs
WINDOWED = {**FEW, "max_context": 48, "page_size": 4, "kv_pages": 40}
ONE_TO_TWO = DisaggregationConfig(decode_workers=2)
WIDER = DisaggregationConfig(decode=LayoutConfig(mesh={"tensor": 2}))
NARROWER = DisaggregationConfig(prefill=LayoutConfig(mesh={"tensor": 2}))

rng = np.random.default_rng(0)
PROMPTS = [rng.integers(0, 256, n).tolist() for n in (1, 7, 8, 9, 15, 16, 17, 31, 40)]
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
# What the sampler keeps for a row beside its KV, and what ends a request, must survive the move.
FEATURES = [
    GREEDY, SamplingParams(temperature=1.0, seed=3, max_tokens=9, ignore_eos=True, top_p=0.9),
    SamplingParams(temperature=0, max_tokens=9, repetition_penalty=1.7, presence_penalty=0.5, ignore_eos=True),
    SamplingParams(temperature=0, max_tokens=9, logit_bias={5: 4.0}, ignore_eos=True),
    SamplingParams(temperature=0, max_tokens=6, logprobs=3, prompt_logprobs=2, ignore_eos=True),
    SamplingParams(temperature=1.0, seed=1, n=3, max_tokens=7, ignore_eos=True), SamplingParams(max_tokens=0, prompt_logprobs=1),
    SamplingParams(temperature=0, max_tokens=1, logprobs=0), SamplingParams(temperature=0, max_tokens=8, min_tokens=4)]


@pytest.fixture(scope="module")
def plain(engines):
    """What one engine makes of each."""
    engine = engines.get("llama_plain", **FEW)
    return run(engine, PROMPTS, GREEDY), run(engine, PROMPTS, FEATURES)


def ids(outputs):
    return [[c.token_ids for c in o.completions] for o in outputs]


def assert_same(got, want):
    assert ids(got) == ids(want)
    for mine, theirs in zip(got, want, strict=True):
        assert [c.finish_reason for c in mine.completions] == [c.finish_reason for c in theirs.completions]
        entries = [(mine.prompt_logprobs, theirs.prompt_logprobs)]
        entries += [(a.logprobs, b.logprobs) for a, b in zip(mine.completions, theirs.completions, strict=True)]
        for a, b in entries:
            assert (a is None) == (b is None)
            for x, y in zip(a or [], b or [], strict=True):
                assert (x.token_id, [t for t, _ in x.top]) == (y.token_id, [t for t, _ in y.top])
                if y.logprob is not None:
                    np.testing.assert_allclose(x.logprob, y.logprob, atol=1e-4)


@pytest.mark.parametrize("split", [ONE_TO_TWO, pytest.param(WIDER, marks=pytest.mark.slow),
                                   pytest.param(NARROWER, marks=pytest.mark.slow)], ids=["1-to-1", "1-to-2", "2-to-1"])
def test_tokens_equal_one_engine(engines, plain, split):
    engine = engines.get("llama_plain", disaggregation=split, **FEW)
    before = engine.metrics.snapshot()
    assert_same(run(engine, PROMPTS, FEATURES), plain[1])
    done = engine.metrics.since(before)
    moved = sum(p.n for p in FEATURES if p.max_tokens > 1)
    assert done.transfers == moved
    assert done.transfer_bytes > 0
    assert done.transfer_seconds > 0
    assert done.workers_lost == 0
    assert engine.workers[0].runner.metrics is engine.metrics
    assert all(not worker.scheduler.preemptions for worker in engine.workers)


def test_decode_does_not_wait_for_prefill(engines, plain, monkeypatch):
    """While a prefill call takes as long as seven decode calls, those are made."""
    engine = engines.get("llama_plain", disaggregation=ONE_TO_TWO, **FEW)
    prefill, *others = engine.workers
    monkeypatch.setattr("jinfer.engine.fleet.POLL", 0.0)
    first = engine.submit(PROMPTS[-1], GREEDY)
    early = []
    while not any(worker.scheduler.running for worker in others):
        early += engine.step()
    slow, made = [], []
    dispatch = prefill.runner.dispatch

    def slowly(plan):
        pending = dispatch(plan)
        slow.append(pending)
        return pending

    monkeypatch.setattr(prefill.runner, "dispatch", slowly)
    is_ready = Pending.is_ready
    monkeypatch.setattr(Pending, "is_ready", lambda p: is_ready(p) and (p not in slow or len(made) >= 7))
    collect = prefill.runner.collect

    def collected(pending):
        assert pending.is_ready(), "a prefill call is waited for"
        return collect(pending)

    monkeypatch.setattr(prefill.runner, "collect", collected)
    second = engine.submit(PROMPTS[-2], GREEDY)
    calls = engine.metrics.decode_calls
    while not slow:
        early += engine.step()
    for _ in range(7):
        early += engine.step()
        made.append(engine.metrics.decode_calls - calls)
    assert made[-1] >= 6
    assert engine.metrics.workers_lost == 0
    outputs, _ = drain(engine, early)
    assert ids([outputs[first], outputs[second]]) == ids([plain[0][-1], plain[0][-2]])


@pytest.mark.parametrize("name", ["gemma2", pytest.param("deepseek_v2", marks=pytest.mark.slow)])
def test_windows_and_latent_attention(engines, name):
    """Pages below a window do not go over; latent pages have one head, which each device of the target copies."""
    split = DisaggregationConfig() if name == "gemma2" else WIDER
    prompts, params = [p[:34] for p in PROMPTS], SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
    want = ids(run(engines.get(name, **WINDOWED), prompts, params))
    assert ids(run(engines.get(name, disaggregation=split, **WINDOWED), prompts, params)) == want


def test_what_the_budget_has_no_room_for_stays_with_the_prefill_worker(engines, plain, monkeypatch):
    engine = engines.get("llama_plain", disaggregation=ONE_TO_TWO, **FEW)
    monkeypatch.setattr(engine._fleet.handover, "_budget", 1)
    names = [engine.submit(prompt, GREEDY) for prompt in PROMPTS]
    deltas, held = [], 0
    while engine.has_work:
        deltas += engine.step()
        engine.check()
        assert all(len(worker.coming) <= 1 for worker in engine.workers)
        held = max(held, sum(r.status is Status.RUNNING and not r.in_flight for r in engine._fleet._ready))
    outputs, _ = drain(engine, deltas)
    assert ids([outputs[name] for name in names]) == ids(plain[0])
    assert held, "nobody had to wait"


def test_over_sockets(engines, plain, monkeypatch):
    """The engine needs nothing of a transfer that does not also work between processes."""
    engine = engines.get("llama_plain", disaggregation=ONE_TO_TWO, **FEW)
    monkeypatch.setattr(engine._fleet.handover, "transfer", BetweenProcesses(engine.workers[0].runner.weights[0].device))
    assert ids(run(engine, PROMPTS, GREEDY)) == ids(plain[0])


STATES = ["waiting", "prefilling", "prefilled", "in transit", "waiting to decode", "decoding"]


@pytest.mark.parametrize("state", STATES)
def test_cancelled_in_every_state(engines, plain, monkeypatch, state):
    engine = engines.get("llama_plain", disaggregation=ONE_TO_TWO, **FEW)
    fleet, handover = engine._fleet, engine._fleet.handover
    unknown = np.random.default_rng(STATES.index(state) + 1).integers(0, 256, 40).tolist()  # to the prefix cache
    names = [engine.submit(prompt, GREEDY) for prompt in (*PROMPTS[:-1], unknown)]
    victim = next(r for r in fleet._home if r.id == names[-1])
    if state == "prefilled":
        monkeypatch.setattr(handover, "takes", lambda worker, size: False)
    arrived = handover.arrived
    if state == "in transit":
        monkeypatch.setattr(handover, "arrived", lambda wait: iter(()))

    def here():
        home = fleet._home[victim]
        return {"waiting": home.role == "prefill" and victim.status is Status.WAITING,
                "prefilling": victim.status is Status.PREFILLING and 0 < victim.computed < 40,
                "prefilled": home.role == "prefill" and victim in fleet._ready,
                "in transit": victim in handover._transits,
                "waiting to decode": home.role == "decode" and victim.status is Status.WAITING and victim.given is not None,
                "decoding": home.role == "decode" and victim.status is Status.RUNNING and len(victim.outputs) > 2}[state]

    deltas = []
    if state in ("prefilled", "in transit"):  # nobody before it would leave
        for name in names[:-1]:
            engine.cancel(name)
    if state == "waiting to decode":  # no row is free
        for worker in engine.workers[1:]:
            monkeypatch.setattr(worker.scheduler, "_slots", [])
    for _ in range(200):
        if here():
            break
        deltas += engine.step()
    assert here()
    engine.cancel(names[-1])
    assert victim.status is Status.FINISHED
    assert victim not in fleet._home
    assert not any(victim in worker.coming for worker in engine.workers)
    monkeypatch.undo()
    assert handover.arrived.__func__ is arrived.__func__
    outputs, _ = drain(engine, deltas)
    assert outputs[names[-1]].completions[0].finish_reason == "cancelled"
    if state not in ("prefilled", "in transit"):
        assert ids([outputs[name] for name in names[:-1]]) == ids(plain[0])[:-1]


@pytest.fixture
def fragile(engines):
    """An engine of three workers to break, with the programs of the one that is kept."""
    kept = engines.get("llama_plain", disaggregation=ONE_TO_TWO, **FEW)
    engine = Engine(DATA / "models" / "llama_plain", kept.config)
    for mine, other in zip(engine.workers, kept.workers, strict=True):
        mine.runner.catalog._compiled = other.runner.catalog._compiled
    yield engine
    engine.close()


def break_after(worker, call, count):
    """The worker's device is gone once `call` was made so often."""
    whole = getattr(worker.runner, call)
    calls = iter(range(count))

    def broken(*arguments):
        if next(calls, None) is None:
            raise RuntimeError("the device is gone")
        return whole(*arguments)

    setattr(worker.runner, call, broken)


@pytest.mark.parametrize("broken", [
    [(1, "dispatch", 5)], [(1, "collect", 4)], [(0, "dispatch", 6)], [(0, "collect", 4)], [(0, "export", 2)],
    [(1, "dispatch", 3), (2, "collect", 5)], [(0, "dispatch", 9), (1, "dispatch", 9)]], ids=str)
def test_requests_of_a_lost_worker_are_computed_again(fragile, plain, broken):
    for index, call, count in broken:
        break_after(fragile.workers[index], call, count)
    names = [fragile.submit(prompt, params) for prompt, params in zip(PROMPTS, FEATURES, strict=True)]
    deltas = []
    for _ in range(2000):
        if not fragile.has_work:
            break
        deltas += fragile.step()
        fragile.check()
    assert not fragile.has_work, "somebody waits for ever"
    outputs, _ = drain(fragile, deltas)
    assert_same([outputs[name] for name in names], plain[1])
    assert fragile.metrics.workers_lost == len(broken)
    assert [i for i, worker in enumerate(fragile.workers) if worker.failure is not None] == sorted(b[0] for b in broken)
    assert_same(run(fragile, PROMPTS, FEATURES), plain[1])  # it goes on


def test_a_payload_that_is_lost_on_its_way_takes_its_target_along(fragile, plain, monkeypatch):
    target = fragile.workers[2]
    receive = fragile._fleet.handover.transfer.receive

    def lost(ticket, place):
        if place == target.placement:
            raise RuntimeError("no link to this device")
        return receive(ticket, place)

    monkeypatch.setattr(fragile._fleet.handover.transfer, "receive", lost)
    assert ids(run(fragile, PROMPTS, GREEDY)) == ids(plain[0])
    assert target.failure is not None
    assert not fragile._fleet.handover.transfer._payloads


def test_the_last_workers_error_goes_out_to_the_caller(fragile):
    fragile.submit(PROMPTS[0], GREEDY)
    for worker in fragile.workers:
        break_after(worker, "dispatch", 0)
    with pytest.raises(RuntimeError, match="the device is gone"):
        fragile.step()  # it went from one to the next
    assert fragile.metrics.workers_lost == 2
    with pytest.raises(JinferError, match="failed earlier"):
        fragile.step()


def test_an_interrupt_is_no_failure(fragile, monkeypatch):
    def interrupted(plan):
        raise KeyboardInterrupt

    monkeypatch.setattr(fragile.workers[0].runner, "dispatch", interrupted)
    fragile.submit(PROMPTS[0], GREEDY)
    with pytest.raises(KeyboardInterrupt):
        fragile.step()
    assert fragile.metrics.workers_lost == 0
    assert all(worker.failure is None for worker in fragile.workers)


def test_what_a_configuration_may_say():
    with pytest.raises(ConfigError, match=r"disaggregation\.decode_workers: must be a positive integer, got 0"):
        DisaggregationConfig(decode_workers=0)
    with pytest.raises(ConfigError, match=r"disaggregation\.transfer_gb: must be positive"):
        DisaggregationConfig(transfer_gb=0)
    with pytest.raises(ConfigError, match="layout: with disaggregation the meshes are"):
        EngineConfig(layout=LayoutConfig(mesh={"tensor": 2}), disaggregation=DisaggregationConfig())
    with pytest.raises(LayoutError, match="disaggregation: needs 9 devices, 8 present"):
        Engine(DATA / "models" / "llama_plain", EngineConfig(
            **SMALL, disaggregation=dataclasses.replace(WIDER, prefill_workers=7)))
