"""Case C19: a request cancelled in any state frees everything at once and disturbs nobody."""

import pytest

from jinfer.config import SamplingParams, ServiceParams
from tests.engines import drain, one

ENDLESS = SamplingParams(temperature=0, max_tokens=200)

STATES = {"decoding": ([256, 114], ENDLESS), "chunked prefill": ([256] + [114] * 249, ENDLESS),
          "n=4": ([256, 114], SamplingParams(temperature=0, max_tokens=200, n=4))}


def _idle(engine, earlier=()):
    outputs, _ = drain(engine, earlier)
    metrics = engine.metrics
    assert (metrics.requests_running, metrics.requests_waiting) == (0, 0)
    assert metrics.pages_free == metrics.pages_total
    return outputs


@pytest.mark.parametrize("steps", range(6))
@pytest.mark.parametrize("state", ["decoding", "chunked prefill", "n=4"])
def test_cancel_after_some_steps(engines, state, steps):
    engine = engines.get("table_open")
    mine = engine.submit(*STATES[state])
    earlier = [delta for _ in range(steps) for delta in engine.step()]
    assert engine.cancel(mine)
    assert engine.metrics.requests_running == 0
    assert engine.metrics.pages_free == engine.metrics.pages_total
    outputs = _idle(engine, earlier)
    choices = outputs[mine].completions
    assert {c.finish_reason for c in choices} == {"cancelled"}
    assert not engine.cancel(mine)
    assert one(engine, "T", temperature=0).text == "HIJK"


def test_cancel_while_queued_and_a_full_pool_afterwards(engines):
    engine = engines.get("table_open", max_rows=3)
    ids = [engine.submit("r", ENDLESS) for _ in range(9)]
    earlier = engine.step() + engine.step()
    assert engine.metrics.requests_waiting == 6
    for queued in ids[3:]:
        assert engine.cancel(queued)
    assert engine.metrics.requests_waiting == 0
    outputs = _idle(engine, earlier)
    assert all(outputs[i].text == "r" * 200 for i in ids[:3])
    assert all(outputs[i].text == "" for i in ids[3:])


def test_after_one_delta(engines):
    engine = engines.get("table_open")
    mine, deltas = engine.submit("r", ENDLESS), []
    while not deltas:
        deltas += engine.step()
    assert deltas[0].token_ids
    engine.cancel(mine)
    assert engine.metrics.pages_free == engine.metrics.pages_total
    assert _idle(engine, deltas)[mine].text in ("r", "rr")


def test_two_hundred_in_a_row(engines):
    """In every state, beside a request that is not disturbed; then the whole pool is filled once more."""
    engine, states = engines.get("table_open"), list(STATES.values())
    steady = engine.submit("r", ENDLESS)
    earlier = engine.step()
    for index in range(200):
        mine = engine.submit(*states[index % 3])
        for _ in range(index % 4):  # 0: it never left the queue
            earlier += engine.step()
        engine.cancel(mine)
        assert engine.metrics.requests_waiting == 0
        assert engine.metrics.requests_running <= 1
        assert engine.metrics.pages_held <= 26
    outputs = _idle(engine, earlier)
    assert len(outputs) == 201
    assert outputs[steady].text == "r" * 200
    params, most = SamplingParams(temperature=0, max_tokens=101), 0
    ids = [engine.submit([256, *[114] * 27], params, service=ServiceParams(cache=False)) for _ in range(8)]
    earlier = []
    while engine.has_work:
        earlier += engine.step()
        most = max(most, engine.metrics.pages_held)
    assert most == engine.metrics.pages_total  # 8 requests of 16 pages
    outputs = _idle(engine, earlier)
    assert {outputs[i].text for i in ids} == {"r" * 101}
