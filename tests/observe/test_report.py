"""Figures of the summary against ones worked out by hand and by numpy."""

import io

import numpy as np
import pytest
from rich.console import Console

from jinfer.engine.outputs import Completion, RequestOutput, Timing
from jinfer.observe.metrics import GroupPages, Metrics
from jinfer.observe.report import Percentiles, Report, percentile, summary_table
from jinfer.observe.stalls import StallMeter


@pytest.mark.parametrize("count", [1, 2, 3, 10, 101])
@pytest.mark.parametrize("q", [0.0, 0.5, 0.95, 0.99, 1.0])
def test_percentile_is_numpys(count, q):
    values = np.random.default_rng(count).random(count)
    assert percentile(sorted(values.tolist()), q) == pytest.approx(np.quantile(values, q))


def test_percentiles_of_nothing():
    assert Percentiles.of([]) == Percentiles(None, None, None)


def output(prompt, tokens, start=0.0, gap=0.1, n=1, cached=0):
    times = [start + 1.0 + gap * i for i in range(tokens)]
    choices = [Completion(i, token_ids=[1] * tokens, finish_reason="length") for i in range(n)]
    timing = Timing(arrived=start, scheduled=start + 0.5, token_times=times, cached_tokens=cached)
    return RequestOutput("r", None, [1] * prompt, choices, timing=timing)


def make_summary():
    report = Report()
    report.add(output(10, 5))
    report.add(output(20, 3, start=2.0, gap=0.3, n=2))
    report.add(output(30, 0))
    report.add(output(0, 0, cached=16))
    report.add(RequestOutput("bad", None, [], [], error=ValueError()))
    metrics = Metrics(prefill_tokens=60, prefill_seconds=2.0, decode_seconds=4.0, pages_total=100,
                      pages_peak=25, kv_bytes=2**20 * 50, compilations=1, warmup_compilations=7,
                      warmup_seconds=3.0, preemptions=2, load_bytes=3 * 10**9, load_seconds=2.0,
                      prefix_queries=80, prefix_hits=20, saved_tokens=25, evictions=4, recomputed_tokens=9,
                      restored_tokens=6, requests_timed_out=1, stalls_preemption=2, stalls_other=3, weight_bytes=2**22,
                      page_groups=(GroupPages(None, 99, 50, 25, 40, 2**19),), page_bytes=(2**19,))
    return report.summary(metrics, wall_seconds=5.0, failed=1)


def test_summary():
    s = make_summary()
    assert (s.requests, s.failed, s.prompt_tokens, s.output_tokens) == (4, 1, 60, 11)
    assert s.prefill_rate == 30.0
    # 11 tokens, of which 3 choices' first ones and 2 of resumed requests were sampled by prefill
    assert s.decode_rate == pytest.approx((11 - 3 - 2) / 4.0)
    assert s.output_rate == pytest.approx(11 / 5)
    assert s.ttft.p50 == pytest.approx(1.0)
    assert s.itl.p50 == pytest.approx(0.1)
    assert s.itl.p99 == pytest.approx(0.3)
    assert (s.pages_peak, s.pages_total) == (25, 100)
    assert (s.cached_tokens, s.saved_tokens, s.hit_rate, s.evictions) == (16, 25, 0.25, 4)
    assert (s.timed_out, s.recomputed_tokens, s.restored_tokens) == (1, 9, 6)
    assert s.stalls == {"recomputed": 2, "beside a prefill": 0, "other": 3}
    assert s.memory["kv_cached"] == 40 * 2**19


def test_table():
    text = io.StringIO()
    Console(file=text, width=100).print(summary_table(make_summary(), "a job"))
    for words in ("a job", "requests", "4 (1 failed, 1 timed out)", "prefill", "30.0 tok/s", "decode", "1.5 tok/s",
                  "100.0 / 300.0 / 300.0", "25 of 100 pages (25% of 50 MiB)",
                  "7 in warm-up (3.0 s), 1 after", "3.00 GB in 2.0 s (1.5 GB/s)",
                  "16 prompt tokens, hit rate 25%, 4 evictions", "prefill saved", "25 tokens",
                  "2 (9 tokens recomputed, 6 restored)", "5 (2 recomputed, 3 other)", "kv cached", "20.0 MiB"):
        assert words in text.getvalue()


def test_table_of_page_groups():
    groups = (GroupPages(None, 100, 40, 70), GroupPages(512, 20, 5, 20))
    metrics = Metrics(pages_total=120, pages_peak=90, page_groups=groups)
    text = io.StringIO()
    Console(file=text, width=100).print(summary_table(Report().summary(metrics, 1.0), "a job"))
    for words in ("90 of 120 pages", "full attention", "70 of 100 pages", "window of 512", "20 of 20 pages"):
        assert words in text.getvalue()


def test_table_of_nothing():
    text = io.StringIO()
    Console(file=text, width=100).print(summary_table(Report().summary(Metrics(), 0.0), "nothing"))
    assert "- / - / - ms" in text.getvalue()
    assert "0 prompt tokens, hit rate -, 0 evictions" in text.getvalue()


def test_memory_by_class_adds_up():
    metrics = Metrics(weight_bytes=1000, kv_bytes=101 * 64 + 21 * 32, state_bytes=7, workspace_bytes=5,
                      page_groups=(GroupPages(None, 100, 65, 70, 25, 64), GroupPages(512, 20, 6, 20, 1, 32)),
                      page_bytes=(64, 32), kv_unfilled=100, host_kv_bytes=640, host_kv_used=64)
    memory = metrics.memory()
    assert memory == {"weights": 1000, "kv_held": 35 * 64 + 14 * 32 - 100, "kv_fragmentation": 100,
                      "kv_cached": 25 * 64 + 32, "kv_free": 40 * 64 + 5 * 32, "kv_null": 96, "state": 7, "workspace": 5,
                      "host_kv": 64, "host_kv_free": 576}
    assert sum(size for name, size in memory.items() if name.startswith("kv")) == metrics.kv_bytes


def test_rates_of_a_part_of_a_run():
    before = Metrics(prefix_queries=100, prefix_hits=0, stalls_other=2, admission_ratio=1.0, pages_cached=3)
    after = Metrics(prefix_queries=150, prefix_hits=40, stalls_other=3, admission_ratio=0.5, pages_cached=9)
    part = after.since(before)
    assert (part.hit_rate, part.stalls, part.admission_ratio, part.pages_cached) == (0.8, 1, 0.5, 9)
    assert Metrics().hit_rate is None


def test_stalls():
    meter = StallMeter()
    assert not any(meter.stalled(gap) for gap in [0.01] * 32 + [5.0] + [0.01] * 30)  # nothing is usual yet
    assert not meter.stalled(0.01)
    assert meter.threshold == pytest.approx(0.04)
    assert not meter.stalled(0.04)
    assert meter.stalled(0.041)
    assert meter.stalled(0.011, target=0.01)
    assert not meter.stalled(5.0, target=6.0)
    for _ in range(400):  # the usual changes
        meter.stalled(0.1)
    assert not meter.stalled(0.3)
    for _ in range(400):
        meter.stalled(0.001)
    assert not meter.stalled(0.019)
    assert meter.stalled(0.021)
    metrics = Metrics()
    for cause in ("preemption", "prefill", "prefill", "other"):
        metrics.count_stall(cause)
    assert (metrics.stalls_preemption, metrics.stalls_prefill, metrics.stalls_other, metrics.stalls) == (1, 2, 1, 4)
