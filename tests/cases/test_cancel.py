"""Case C19: a request cancelled in any state frees everything at once and disturbs nobody."""

import pytest

from jinfer.config import SamplingParams
from tests.engines import drain, one

ENDLESS = SamplingParams(temperature=0, max_tokens=200)


def _idle(engine, earlier=()):
    outputs, _ = drain(engine, earlier)
    metrics = engine.metrics
    assert (metrics.requests_running, metrics.requests_waiting) == (0, 0)
    assert metrics.pages_free == metrics.pages_total
    return outputs


@pytest.mark.parametrize("steps", range(6))
@pytest.mark.parametrize("request_", [("r", ENDLESS), ([256] + [114] * 200, ENDLESS), ("r", SamplingParams(temperature=0, max_tokens=200, n=4))],
                         ids=["decoding", "chunked prefill", "n=4"])
def test_cancel_after_some_steps(engines, request_, steps):
    engine = engines.get("table_open")
    mine = engine.submit(*request_)
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


def test_two_hundred_in_a_row(engines):
    engine = engines.get("table_open")
    earlier = []
    for index in range(200):
        mine = engine.submit("r", ENDLESS)
        for _ in range(index % 4):
            earlier += engine.step()
        engine.cancel(mine)
    assert len(_idle(engine, earlier)) == 200
    ids = [engine.submit("r", SamplingParams(temperature=0, max_tokens=100)) for _ in range(8)]
    outputs = _idle(engine)
    assert {outputs[i].text for i in ids} == {"r" * 100}
