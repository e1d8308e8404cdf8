"""The loop in virtual time, against arithmetic by hand, counts by brute force, and conservation."""

import subprocess
import sys
from collections import Counter

import pytest

from jinfer.bench.jobs import Prompt
from jinfer.bench.synthetic import make_jobs
from jinfer.config.service import ServiceParams
from jinfer.config.workload import ArrivalConfig, ChatConfig, ClassConfig, LengthConfig, SharingConfig, WorkloadConfig
from jinfer.kv.host import HostTier
from jinfer.simulate.recorder import Cause, Outcome
from jinfer.simulate.report import Targets, make_report
from tests.simulate.build import S, check_idle, job, simulator


def busy_workload(requests=300, rate=40.0, **values):
    return make_jobs(WorkloadConfig(**{
        "requests": requests, "arrivals": ArrivalConfig(rate=rate), "output": LengthConfig(kind="uniform", low=1, high=60),
        "prompt": LengthConfig(kind="lognormal", mean=60, sigma=1.0, most=700), **values}))


def test_nothing_here_imports_jax():
    code = ("import jinfer.simulate.machine, jinfer.simulate.report, jinfer.simulate.html, jinfer.simulate.table, "
            "jinfer.plan.capacity, jinfer.bench.synthetic, jinfer.cli.simulate, jinfer.cli.plan, sys; "
            "print('jax' in sys.modules)")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_one_request_takes_its_prefill_and_its_decode_steps():
    sim = simulator(host_seconds=1e-3)
    report = make_report(sim.run([job(5.0, 100, 4)]))
    # chunks of 64 and 36 tokens, back to back: the host has planned the second while the first ran
    assert report.all.ttft.p50 == pytest.approx(1e-3 + 100e-3)
    assert report.all.queue.p50 == pytest.approx(1e-3)
    assert report.all.itl.p50 == report.all.itl.most == pytest.approx(10e-3)
    assert report.all.e2e.p50 == pytest.approx(1e-3 + 100e-3 + 3 * 10e-3)
    assert report.all.output_tokens == 4


def test_a_host_slower_than_the_device_sets_the_pace():
    report = make_report(simulator(host_seconds=15e-3).run([job(0.0, 10, 4)]))
    assert report.all.itl.p50 == pytest.approx(15e-3)


def test_the_second_waits_for_the_only_row():
    sim = simulator(rows=1)
    recorder = sim.run([job(0.0, 50, 3, name=1), job(0.0, 50, 3, name=2)])
    first, second = recorder.jobs.ttft
    assert first == pytest.approx(50e-3)
    # The row is free once the last token of the first is known, which ends a step after it is planned for: prefill
    # 50, two decode steps of 10; then its own prefill.
    assert recorder.jobs.queue[1] == pytest.approx(50e-3 + 2 * 10e-3)
    assert second == pytest.approx(50e-3 + 2 * 10e-3 + 50e-3)


def test_a_prefill_beside_decode_stretches_the_gap_and_is_its_cause():
    sim = simulator(stall=30e-3)
    recorder = sim.run([job(0.0, 10, 20, name=1), job(0.05, 60, 1, name=2)])
    assert recorder.stalls == {Cause.PREFILL: 1}
    assert max(recorder.gaps.gap) == pytest.approx(70e-3)
    # six tokens take less than the decode step beside them, but without them nobody would have waited too long
    recorder = simulator(stall=12e-3).run([job(0.0, 10, 20, name=1), job(0.05, 6, 1, name=2)])
    assert recorder.stalls == {Cause.PREFILL: 1}
    assert simulator(stall=5e-3).run([job(0.0, 10, 20)]).stalls == {Cause.DECODE: 19}


def test_tokens_of_several_decode_steps_come_together():
    report = make_report(simulator(decode_steps=4).run([job(0.0, 10, 9)]))
    assert (report.all.itl.p50, report.all.itl.most) == (0.0, pytest.approx(40e-3))
    assert report.all.output_tokens == 9
    assert report.all.request_itl.p50 == pytest.approx(10e-3)


@pytest.mark.parametrize("options", [
    {}, {"decode_steps": 4}, {"rows": 3, "prefill_tokens": 32}, {"windows": (None, 40)}, {"cache": False}])
def test_every_request_ends_once_with_its_tokens(options):
    jobs = busy_workload(declared_factor=2.0, sharing=SharingConfig(groups=3, length=LengthConfig(value=40), share=0.5))
    check_conservation(jobs, simulator(context=1024, **options))


@pytest.mark.parametrize("options", [{}, {"host": 100_000}, {"windows": (None, 40)}])
def test_every_request_ends_once_with_its_tokens_though_pages_are_short(options):
    """Requests that take far less than they declare make admission bold, and then come others that do not."""
    jobs = [job(0.1 * i, 40, 2, name=i, declared=200) for i in range(100)]
    jobs += [job(10.0 + 0.01 * i, 40, 200, name=100 + i, declared=200) for i in range(30)]
    if "host" in options:
        options = {"host": HostTier(options["host"], (1000,))}
    sim = simulator(pages=80, rows=32, context=1024, **options)
    recorder = check_conservation(jobs, sim)
    assert recorder.preemptions > 0
    assert recorder.recomputed > 0
    assert recorder.evictions > 0
    assert recorder.stalls[Cause.PREEMPTION] + recorder.stalls[Cause.SWAP_IN] > 0
    assert (recorder.swapped_in > 0) == (recorder.returned_swapped > 0) == ("host" in options)


def check_conservation(jobs, sim):
    recorder = sim.run(jobs)
    assert list(recorder.jobs.outcome) == [Outcome.FINISHED] * len(jobs)
    assert sum(recorder.jobs.tokens) == sum(job.output for job in jobs) == sum(recorder.steps.tokens)
    assert sorted(recorder.jobs.arrival) == [job.time for job in jobs]
    assert sum(recorder.gaps.count) == sum(job.output - 1 for job in jobs)
    check_idle(sim)
    return recorder


def test_virtual_time_is_deterministic():
    runs = [simulator(pages=90, context=1024).run(busy_workload()) for _ in range(2)]
    assert runs[0].jobs.ttft == runs[1].jobs.ttft
    assert runs[0].gaps == runs[1].gaps
    assert runs[0].steps == runs[1].steps


def test_all_ways_to_end():
    jobs = busy_workload(400, 200.0, classes=(ClassConfig(cancel=0.3, cancel_after=1.0, timeout=1.5),))
    jobs += [job(0.0, 5000, 3, name=10**6)]
    sim = simulator(max_waiting=60, context=1024)
    recorder = sim.run(jobs)
    counts = Counter(recorder.jobs.outcome)
    assert sum(counts.values()) == len(jobs)
    assert all(counts[kind] for kind in Outcome)
    report = make_report(recorder, targets=Targets(ttft=0.5))
    assert 0 < report.all.goodput < report.all.finished / (len(jobs) - report.all.cancelled)
    check_idle(sim)


def test_who_is_late_is_ended_at_the_next_step():
    sim = simulator()
    recorder = sim.run([job(0.0, 10, 1000, service=ServiceParams(timeout=0.1))])
    assert recorder.jobs.outcome[0] == Outcome.TIMEOUT
    assert 0.1 <= recorder.jobs.e2e[0] <= 0.12


def test_later_turns_come_after_the_answer():
    config = WorkloadConfig(requests=3, prompt=LengthConfig(value=64), output=LengthConfig(value=5),
                            chat=ChatConfig(turns=LengthConfig(value=3), message=LengthConfig(value=11), think=2.0))
    jobs = make_jobs(config)
    recorder = simulator().run(jobs)
    ends = [a + e for a, e in zip(recorder.jobs.arrival, recorder.jobs.e2e, strict=True)]
    assert list(recorder.jobs.arrival[1:]) == pytest.approx([end + job.time for end, job in zip(ends, jobs[1:], strict=False)])
    # what was said is found again, in whole pages: 64 of 80, 80 of 96 (the last token of an answer is never fed)
    assert recorder.saved == 64 + 80
    assert recorder.asked == 64 + 80 + 96


def test_hit_rate_is_what_an_infinite_pool_finds():
    config = WorkloadConfig(requests=200, arrivals=ArrivalConfig(rate=2.0), prompt=LengthConfig(kind="uniform", low=1, high=90),
                            output=LengthConfig(value=2),
                            sharing=SharingConfig(groups=5, length=LengthConfig(kind="uniform", low=20, high=200)))
    jobs = make_jobs(config)
    recorder = simulator(pages=2**16).run(jobs)
    seen, found = set(), 0
    for one in jobs:  # they do not overlap: one is done before the next comes
        tokens = one.prompt[:]
        hit = 0
        while (hit + 1) * S < len(tokens) and tuple(tokens[:(hit + 1) * S]) in seen:
            hit += 1
        found += hit * S
        seen.update(tuple(tokens[:n * S]) for n in range(1, len(tokens) // S + 1))
    assert found > 0
    assert recorder.saved == found
    assert recorder.asked == sum(len(one.prompt) for one in jobs)


def test_who_opts_out_of_the_cache_finds_nothing():
    jobs = busy_workload(50, sharing=SharingConfig(length=LengthConfig(value=100)))
    assert simulator(cache=False).run(jobs).saved == 0
    assert simulator().run(jobs).saved > 0
    private = [job(0.1 * i, 100, 2, service=ServiceParams(cache=i % 2 == 0)) for i in range(6)]
    assert simulator().run(private).saved == 2 * 96  # the third and the fifth, behind the first


def test_choices_share_their_prompt():
    sim = simulator()
    recorder = sim.run([job(0.0, 100, 6, n=3)])
    assert list(recorder.jobs.tokens) == [18]
    assert recorder.prefill_tokens < 2 * 100
    check_idle(sim)


def test_an_output_of_nothing_only_reads_the_prompt():
    recorder = simulator().run([job(0.0, 70, 0)])
    assert (recorder.jobs.outcome[0], recorder.jobs.tokens[0]) == (Outcome.FINISHED, 0)
    assert recorder.jobs.e2e[0] == pytest.approx(70e-3)
    assert make_report(recorder, targets=Targets(ttft=1e-9)).all.goodput == 1.0


def test_prompts_are_never_written_out():
    text = Prompt((7,), (4000,), 4000)
    one = job(0.0, 4000, 3)
    one.prompt = text
    sim = simulator()
    sim.run([one])
    assert one.prompt is text


def test_a_request_is_handed_over_with_its_pages():
    sim = simulator(prefill=1, decode=1, page_bytes=1000, link_rate=1e6)
    recorder = sim.run([job(0.0, 100, 4)])
    assert recorder.jobs.ttft[0] == pytest.approx(100e-3)
    # 7 pages of 1000 bytes at a million bytes a second, then a chunk of the first token, then decode steps
    assert list(recorder.gaps.gap) == pytest.approx([7e-3 + 1e-3, 10e-3, 10e-3], rel=1e-5)
    assert recorder.received == 7000
    assert recorder.prefill_tokens == 101
    assert recorder.jobs.tokens[0] == 4
    check_idle(sim)


@pytest.mark.parametrize("lockstep", [False, True])
@pytest.mark.parametrize("options", [{}, {"windows": (None, 40)}, {"pages": 100, "rows": 32}, {"transfer": 8000}])
def test_disaggregated_requests_end_once_with_their_tokens(lockstep, options):
    jobs = busy_workload(200, declared_factor=2.0, classes=(ClassConfig(cancel=0.1, cancel_after=0.5, timeout=8.0),), n=2,
                         sharing=SharingConfig(groups=3, length=LengthConfig(value=40), share=0.5))
    sim = simulator(prefill=2, decode=2, lockstep=lockstep, context=1024, **options)
    recorder = sim.run(jobs)
    finished = [i for i, outcome in enumerate(recorder.jobs.outcome) if outcome == Outcome.FINISHED]
    by_arrival = {job.time: job for job in jobs}
    assert len(recorder.jobs.outcome) == len(jobs)
    assert 50 < len(finished) < len(jobs)
    for i in finished:
        assert recorder.jobs.tokens[i] == 2 * by_arrival[recorder.jobs.arrival[i]].output
    assert recorder.received > 0
    check_idle(sim)


def test_workers_of_their_own_are_not_stretched_by_each_other():
    jobs = [job(0.0, 10, 60, name=1), job(0.1, 640, 2, name=2)]

    def longest(**options):
        return max(simulator(page_bytes=1, **options).run(jobs).gaps.gap)

    assert longest() == pytest.approx(74e-3)  # a chunk of 64 beside each step
    assert longest(prefill=1, decode=1) < 35e-3
    assert longest(prefill=1, decode=1, lockstep=True) == pytest.approx(64e-3, abs=5e-3)  # waits for the other's steps


def test_requests_that_keep_to_themselves_share_nothing():
    """A request's id is all that separates it from others which opted out, too."""
    jobs = [job(0.05 * i, 256, 20) for i in range(4)]
    shared, alone = simulator(prefill_tokens=512).run(jobs), simulator(prefill_tokens=512, cache=False).run(jobs)
    assert shared.saved == 3 * 240
    assert (alone.saved, alone.prefill_tokens) == (0, 4 * 256)


def test_positions_of_held_pages_without_a_token_are_counted():
    sim = simulator()
    report = make_report(sim.run([job(0.0, S + 1, 3)]))
    # when the prompt's token is known the next decode step is planned: 18 of two pages' 32 positions have a token
    assert report.unfilled == pytest.approx((2 * S - (S + 2)) / (2 * S))
