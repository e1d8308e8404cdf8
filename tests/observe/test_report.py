"""Figures of the summary against ones worked out by hand and by numpy."""

import io

import numpy as np
import pytest
from rich.console import Console

from jinfer.engine.outputs import Completion, RequestOutput, Timing
from jinfer.observe.metrics import GroupPages, Metrics
from jinfer.observe.report import Percentiles, Report, percentile, summary_table


@pytest.mark.parametrize("count", [1, 2, 3, 10, 101])
@pytest.mark.parametrize("q", [0.0, 0.5, 0.95, 0.99, 1.0])
def test_percentile_is_numpys(count, q):
    values = np.random.default_rng(count).random(count)
    assert percentile(sorted(values.tolist()), q) == pytest.approx(np.quantile(values, q))


def test_percentiles_of_nothing():
    assert Percentiles.of([]) == Percentiles(None, None, None)


def output(prompt, tokens, start=0.0, gap=0.1, n=1):
    times = [start + 1.0 + gap * i for i in range(tokens)]
    choices = [Completion(i, token_ids=[1] * tokens, finish_reason="length") for i in range(n)]
    timing = Timing(arrived=start, scheduled=start + 0.5, token_times=times)
    return RequestOutput("r", None, [1] * prompt, choices, timing=timing)


def make_summary():
    report = Report()
    report.add(output(10, 5))
    report.add(output(20, 3, start=2.0, gap=0.3, n=2))
    report.add(output(30, 0))
    report.add(RequestOutput("bad", None, [], [], error=ValueError()))
    metrics = Metrics(prefill_tokens=60, prefill_seconds=2.0, decode_seconds=4.0, pages_total=100,
                      pages_peak=25, kv_bytes=2**20 * 50, compilations=1, warmup_compilations=7,
                      warmup_seconds=3.0, preemptions=2, load_bytes=3 * 10**9, load_seconds=2.0)
    return report.summary(metrics, wall_seconds=5.0, failed=1)


def test_summary():
    s = make_summary()
    assert (s.requests, s.failed, s.prompt_tokens, s.output_tokens) == (3, 1, 60, 11)
    assert s.prefill_rate == 30.0
    # 11 tokens, of which 3 choices' first ones and 2 of resumed requests were sampled by prefill
    assert s.decode_rate == pytest.approx((11 - 3 - 2) / 4.0)
    assert s.output_rate == pytest.approx(11 / 5)
    assert s.ttft.p50 == pytest.approx(1.0)
    assert s.itl.p50 == pytest.approx(0.1)
    assert s.itl.p99 == pytest.approx(0.3)
    assert (s.pages_peak, s.pages_total) == (25, 100)


def test_table():
    text = io.StringIO()
    Console(file=text, width=100).print(summary_table(make_summary(), "a job"))
    for words in ("a job", "requests", "3 (1 failed)", "prefill", "30.0 tok/s", "decode", "1.5 tok/s",
                  "100.0 / 300.0 / 300.0", "25 of 100 pages (25% of 50 MiB)",
                  "7 in warm-up (3.0 s), 1 after", "3.00 GB in 2.0 s (1.5 GB/s)"):
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
