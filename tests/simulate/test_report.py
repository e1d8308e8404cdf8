"""Reports, pages, commands."""

import json
import re
from xml.etree import ElementTree

import numpy as np
import pytest
from typer.testing import CliRunner

from jinfer.bench.synthetic import make_jobs
from jinfer.cli.main import app
from jinfer.config.workload import ArrivalConfig, LengthConfig, WorkloadConfig
from jinfer.errors import ConfigError
from jinfer.plan.capacity import CapacitySearch, Setting, settings, share
from jinfer.simulate.report import Targets, make_report, weighted_quantiles
from jinfer.simulate.svg import Plot, Series
from tests.simulate.build import Fixed, job, simulator


def test_quantiles_of_counted_gaps_are_those_of_the_gaps():
    rng = np.random.default_rng(0)
    values, counts = rng.random(50), rng.integers(1, 9, 50)
    flat = np.repeat(values, counts)
    assert weighted_quantiles(np.array([2.0, 1.0]), np.array([1, 1]), (0.5,)) == [1.0]
    for q in (0.1, 0.5, 0.95, 0.99):
        assert weighted_quantiles(values, counts, (q,)) == [np.quantile(flat, q, method="inverted_cdf")]


def test_goodput_counts_who_met_both_targets():
    jobs = [job(0.0, 10, 3, name=1), job(1.0, 300, 3, name=2), job(2.0, 10, 3, name=3, cancel_after=0.012)]
    recorder = simulator().run(jobs)
    report = make_report(recorder, targets=Targets(ttft=0.1, itl=0.02))
    assert (report.all.finished, report.all.cancelled) == (2, 1)
    assert report.all.goodput == 0.5  # the second took 0.3 s for its first token; who left is nobody's failure
    assert report.all.goodput_rate == pytest.approx(1 / report.seconds)
    assert make_report(recorder, targets=Targets(itl=0.005)).all.goodput == 0.0


def test_own_targets_go_first():
    from jinfer.config.service import ServiceParams
    jobs = [job(0.0, 10, 3, name=1), job(1.0, 10, 3, name=2, service=ServiceParams(ttft_target=0.001), group=1)]
    report = make_report(simulator().run(jobs), ("a", "b"), Targets(ttft=0.5))
    assert [row.name for row in report.classes] == ["all", "a", "b"]
    assert [row.goodput for row in report.classes] == [0.5, 1.0, 0.0]
    assert [row.jobs for row in report.classes] == [2, 1, 1]
    assert report.classes[1].itl.p50 == pytest.approx(10e-3)


def test_plots_are_sound_and_hold_their_points():
    plot = Plot("a <b>", "s", (Series("x", [0, 1, 2, 3], [1.0, float("nan"), 3.0, 2.0]),
                               Series("y", [0, 3], [1.0, 100.0], "dots", 1)), log=True, mark=5.0)
    tree = ElementTree.fromstring(plot.svg())
    paths = [node.get("d") for node in tree if node.tag == "path"]
    assert [path.count("M") for path in paths] == [1, 1, 2]  # the gap parts the line in two
    for path in paths:
        for x, y in re.findall(r"([\d.]+) ([\d.]+)", path):
            assert 0 <= float(x) <= 860
            assert 0 <= float(y) <= 260
    ElementTree.fromstring(Plot("none", "s", (Series("x", [], []),)).svg())


def run(*arguments):
    result = CliRunner().invoke(app, arguments)
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


SMALL = ("--model", "llama-3.2-1b", "--device", "v5e", "--set", "max_context=20000")


def test_simulate_prints_json_and_a_page(tmp_path):
    page = tmp_path / "out.html"
    result = run("simulate", "-w", "mixed", *SMALL, "--requests", "60", "--ttft", "1", "--json", "--html", str(page))
    report = json.loads(result.stdout)
    assert report["classes"][0]["jobs"] == 60
    assert report["pool"]["pages"][0] > 1000
    text = page.read_text()
    assert text.count("<svg") == 5
    assert not re.search(r"https?:|<script|<link|@import|url\(", text)
    for svg in re.findall(r"<svg.*?</svg>", text, re.DOTALL):
        ElementTree.fromstring(svg)


def test_simulate_prints_tables():
    result = run("simulate", "-w", "mixed", *SMALL, "--requests", "40")
    for words in ("virtual time", "prefix cache", "interactive: ", "time to first token", "goodput"):
        assert words in result.stdout


def test_disaggregated_workers_come_from_the_configuration():
    result = run("simulate", "-w", "mixed", *SMALL, "--requests", "40", "--set", "disaggregation.prefill_workers=2",
                 "--set", "disaggregation.decode=tp2", "--json")
    report = json.loads(result.stdout)
    assert "4 x TPU v5 lite, 2 prefill and 1 decode workers" in report["title"]
    assert report["received"] > 0
    assert report["classes"][0]["finished"] + report["classes"][0]["cancelled"] == 40


@pytest.mark.parametrize(("arguments", "message"), [
    (("--device", "h1000"), "h1000: no such configuration.*did you mean h100"),
    (("--device-set", "efficiency.compute=2"), r"efficiency.compute: must be in \(0, 1\]"),
    (("--set", "max_rowz=3"), "max_rowz: unknown key"),
    (("--policy", "fast"), "policy: "),
    (("--speed", "0"), "speed: must be positive"),
    (("--ttft", "-1"), "ttft: must be a positive number"),
    (("--stall", "0"), "stall: must be a positive number"),
])
def test_mistakes_are_named(arguments, message):
    with pytest.raises(ConfigError, match=message):
        run("simulate", "-w", "mixed", *SMALL, *arguments)


class FixedMachine:
    """An engine whose steps take what Fixed says; rows of a setting, pages for all."""

    def __init__(self, setting):
        self.setting = setting
        self.asked = []

    def simulate(self, jobs):
        pages = max(2, round(2000 * self.setting.pages))
        return simulator(rows=self.setting.rows, prefill_tokens=self.setting.chunk, pages=pages, cost=Fixed(1e-4)).run(jobs)


def make(load, count, rate=20):
    return make_jobs(WorkloadConfig(requests=count, arrivals=ArrivalConfig(rate=rate * load),
                                    prompt=LengthConfig(value=100), output=LengthConfig(value=50)))


def test_capacity_finds_the_fewest_engines():
    # A row serves a request in half a second and more, so 4 rows hold less than 8 requests a second of the 20.
    search = CapacitySearch(FixedMachine, make, Targets(ttft=0.5, itl=0.1), requests=100, span=1.0)
    plan = search.run(settings([1], [4], [64, 128]))
    assert plan.answer.setting.replicas in (3, 4)
    tried = {(p.setting.replicas, p.setting.chunk): p.meets for p in plan.points if p.load == 1 and p.setting.pages == 1}
    fewest = plan.answer.setting.replicas
    assert tried[fewest, plan.answer.setting.chunk]
    assert not any(meets for (replicas, _), meets in tried.items() if replicas < fewest)
    assert 1.0 <= plan.headroom < 2.0
    assert 0 < plan.least_pages < 0.2
    again = search.try_point(plan.answer.setting, 1.2 * plan.headroom)
    assert not again.meets


def test_what_holds_for_a_moment_is_tried_for_longer():
    """10 requests that arrive at 20 a second wait for nobody long; 600 do, with rows for 8 a second."""
    few = CapacitySearch(FixedMachine, make, Targets(ttft=0.5), requests=10, span=0.1).try_point(Setting(1, 8, 64))
    many = CapacitySearch(FixedMachine, make, Targets(ttft=0.5), requests=10, span=30.0).try_point(Setting(1, 8, 64))
    assert few.meets
    assert many.report.all.jobs > 500
    assert not many.meets


def test_bisection_ends_at_the_fewest():
    found = set()
    for rate in (8, 15, 20, 26, 30):
        search = CapacitySearch(FixedMachine, lambda load, count, rate=rate: make(load, count, rate), Targets(ttft=0.5),
                                requests=60, span=1.0)
        best = search._fewest(Setting(1, 4, 64), 64, None)
        assert best.meets
        fewest = best.setting.replicas
        assert not search.try_point(Setting(1, 4, 64, fewest - 1)).meets
        found.add(fewest)
    assert {3, 5} & found  # those are met on the way down


def test_capacity_prefers_what_costs_less_and_says_when_nothing_does():
    class Costly(FixedMachine):
        def __init__(self, setting):
            if setting.devices == 1:
                raise ConfigError("device: too small")
            super().__init__(setting)

    search = CapacitySearch(Costly, make, Targets(ttft=0.5), requests=100, most=8, span=1.0)
    plan = search.run(settings([1, 2, 4], [16], [128]))
    assert plan.answer.setting.devices == 2
    assert [p.problem for p in plan.points if p.setting.devices == 1] == ["device: too small"]
    nothing = CapacitySearch(FixedMachine, make, Targets(itl=1e-3), requests=50, most=2).run([Setting(1, 4, 64)])
    assert nothing.answer is None
    with pytest.raises(ConfigError, match="ttft: give a target"):
        CapacitySearch(FixedMachine, make, Targets())


def test_replicas_share_jobs_and_keep_conversations_together():
    first, second, third = (job(float(i), 10, 1, name=i) for i in range(3))
    after = job(1.0, 20, 1, name=4, after=third)
    assert share([first, second, third, after], 2) == [first, third, after]
    assert share([first, second, third, after], 1) == [first, second, third, after]


def test_plan_capacity_prints_a_table():
    result = run("plan", "capacity", "-w", "mixed", *SMALL, "--rate", "8", "--ttft", "2", "--rows", "32", "--chunk", "512",
                 "--requests", "50", "--max-replicas", "4", "--span", "1")
    assert result.exit_code == 0
    assert re.search(r"engines of 1 devices .* goodput", " ".join(result.stdout.split()))


def test_plan_capacity_says_why_nothing_meets():
    result = run("plan", "capacity", "-w", "mixed", *SMALL, "--rate", "8", "--ttft", "2", "--rows", "32", "--chunk", "512",
                 "--requests", "20", "--set", "disaggregation.decode_workers=1")
    assert result.exit_code == 1
    assert "nothing tried reaches a goodput of 99.0%: disaggregation: the search" in " ".join(result.stdout.split())
