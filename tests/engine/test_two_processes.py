"""Prefill in one process, decode in another: KV pages over jax.experimental.transfer."""

import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from jinfer.config import DisaggregationConfig, EngineConfig, LayoutConfig, SamplingParams
from jinfer.engine.engine import Engine
from jinfer.engine.transfer import BetweenProcesses
from jinfer.scheduler.request import Given
from tests.engines import DATA, SMALL, run

PROMPTS = [list(range(3, 40)), list(range(90, 99))]
PARAMS = SamplingParams(temperature=1.0, seed=5, max_tokens=10, ignore_eos=True, repetition_penalty=1.3)
SPLIT = DisaggregationConfig(decode=LayoutConfig(mesh={"tensor": 2}))


def build(cache) -> Engine:
    """Both processes build the same engine; each uses its half of it."""
    config = EngineConfig(**{**SMALL, "max_rows": 2, "prefill_tokens": 16, "compilation_cache": cache}, disaggregation=SPLIT)
    return Engine(DATA / "models" / "llama_plain", config)


def prefill(cache) -> None:
    """Says what it has prefilled, one pickled line a request: its first token, positions, a ticket. Ends with its input."""
    engine = build(cache)
    fleet = engine._fleet
    fleet.handover.takes = lambda worker, size: False  # it keeps what it has prefilled
    worker = engine.workers[0]
    transfer = BetweenProcesses(worker.runner.weights[0].device)
    for prompt in PROMPTS:
        engine.submit(prompt, PARAMS)
    while len(fleet._ready) < len(PROMPTS):
        engine.step()
    for request in list(fleet._ready):
        ticket = transfer.send(fleet.handover.export(request, worker))
        print(pickle.dumps((request.id, request.outputs, request.computed, ticket)).hex(), flush=True)
        fleet.finish(request, "cancelled")
    sys.stdin.read()


@pytest.mark.slow
def test_a_request_goes_on_in_another_process(engines):
    want = [o.completions[0].token_ids for o in run(engines.get("llama_plain", max_rows=2, prefill_tokens=16), PROMPTS, PARAMS)]
    code = (f"import jax; jax.config.update('jax_num_cpu_devices', 4)\n"
            f"from tests.engine.test_two_processes import prefill; prefill({str(engines._cache)!r})")
    other = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                             cwd=Path(__file__).parents[2])
    try:
        engine = build(engines._cache)
        fleet, worker = engine._fleet, engine.workers[1]
        transfer = BetweenProcesses(worker.runner.weights[0].sharding.mesh.devices.flat[0])
        got = {}
        assert other.stdout is not None
        for prompt in PROMPTS:
            name, outputs, tokens, ticket = pickle.loads(bytes.fromhex(other.stdout.readline()))
            assert (len(outputs), tokens) == (1, len(prompt))
            engine.submit(prompt, PARAMS, request_id=name)
            request = next(r for r in fleet._home if r.id == name)
            choice = engine._by_request[request]
            fleet._home[request].scheduler.withdraw(request)
            kept, _, _ = choice.push(outputs, [])
            request.outputs.extend(kept)
            request.given = Given(tokens, transfer.receive(ticket, worker.placement))
            fleet._home[request] = worker
            worker.scheduler.add(request, again=True)
            got[name] = choice.completion
        while engine.has_work:
            engine.step()
        assert [c.token_ids for c in got.values()] == want
        assert engine.workers[0].scheduler.estimate is not None
        assert engine.metrics.prefill_tokens == len(PROMPTS), "only the last token known of each is computed here"
        engine.check()
    finally:
        assert other.stdin is not None
        other.stdin.close()
        other.wait(60)
        engine.close()
