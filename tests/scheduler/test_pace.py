"""How many prompt tokens a step takes beside its decoding rows."""

import pytest

from jinfer.config import ServiceParams
from jinfer.kv import PagePool
from jinfer.scheduler import Scheduler, Status
from jinfer.scheduler.fit import Affine
from jinfer.scheduler.pace import LEAST_CHUNK, Pace
from jinfer.scheduler.policy import fcfs, priority
from jinfer.scheduler.step_time import StepTime
from tests.scheduler.fake_device import make_request

SIZES = (16, 32, 64, 128, 256, 512, 768, 1024)


def known() -> StepTime:
    """A token takes a millisecond, a decode step ten."""
    return StepTime(Affine(0.0, 1e-3, 0.0), Affine(10e-3, 0.0, 0.0))


@pytest.mark.parametrize(("target", "budget"), [
    (0.300, 256), (0.267, 256), (0.265, 128), (0.800, 768), (2.0, 1024), (0.045, LEAST_CHUNK), (0.001, LEAST_CHUNK)])
def test_a_time_budget_is_cut_to_a_size_that_calls_have(target, budget):
    pace = Pace(1024, None, target, known(), SIZES)
    assert pace.prefill_budget(1, 1, []) == budget
    loose = Pace(1024, None, target, known())
    assert loose.prefill_budget(1, 1, []) == pytest.approx(min(1024, max(LEAST_CHUNK, 1e3 * target - 10)), abs=1)
    assert pace.prefill_budget(0, 1, []) == 1024  # nobody waits for a token


@pytest.mark.parametrize(("policy", "evicted"), [(priority(60.0), True), (fcfs(60.0), False)])
def test_a_better_class_evicts_those_only_that_rank_behind_it(policy, evicted):
    scheduler = Scheduler([PagePool(32, 8)], max_rows=1, max_context=64, prefill_tokens=32, max_chunks=4, policy=policy)
    first = make_request("job", [1, 2, 3], max_tokens=20, context=64)
    first.service = ServiceParams(priority=1)
    scheduler.add(first)
    scheduler.collected(scheduler.plan(0.0))
    later = make_request("person", [4, 5, 6], max_tokens=20, context=64)
    later.arrival = 1.0
    scheduler.add(later)
    scheduler.plan(1.0)
    assert (first.status is Status.WAITING) == evicted
    assert (later.status is not Status.WAITING) == evicted
