"""One self-contained page about a simulation: its numbers, and plots over time."""

import html
import io
import itertools
from pathlib import Path

import numpy as np
from rich.console import Console

from jinfer.errors import ConfigError
from jinfer.simulate.machine import Machine
from jinfer.simulate.recorder import Recorder
from jinfer.simulate.report import Report, weighted_quantiles
from jinfer.simulate.svg import Plot, Series
from jinfer.simulate.table import latency_table, summary_table

BINS = 240  # points of a line
DOTS = 4000  # points of a scatter plot, at most

_STYLE = """
:root { --ink: #222; --paper: #fff; --grid: #ddd; --t0: #1f6fb4; --t1: #d9730d; --t2: #2c8c4a; --t3: #b5304a; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #ddd; --paper: #16181b; --grid: #383b40; --t0: #69aee8; --t1: #f0a35a; --t2: #6cc588; --t3: #ea7d93; }
}
body { font: 15px/1.45 system-ui, sans-serif; color: var(--ink); background: var(--paper); margin: 2em auto;
  max-width: 900px; padding: 0 1em; }
h1 { font-size: 1.3em; } h2 { font-size: 1.05em; margin: 1.6em 0 0.2em; }
pre { font: 12.5px/1.35 ui-monospace, monospace; overflow-x: auto; }
svg { width: 100%; height: auto; } svg text { fill: var(--ink); font-size: 11px; }
text.y { text-anchor: end; } text.x, text.label { text-anchor: middle; }
.grid { stroke: var(--grid); } .mark { stroke: var(--t3); stroke-dasharray: 5 4; }
path.line { fill: none; stroke: var(--c); stroke-width: 1.4; } path.area { fill: var(--c); opacity: 0.18; }
path.dots { stroke: var(--c); stroke-width: 3; stroke-linecap: round; opacity: 0.45; }
.tone0 { --c: var(--t0); } .tone1 { --c: var(--t1); } .tone2 { --c: var(--t2); } .tone3 { --c: var(--t3); }
.key { margin-right: 1.2em; } .key::before { content: "\\25A0 "; color: var(--c); }
"""


def write_page(path: Path, recorder: Recorder, report: Report, machine: Machine, title: str) -> None:
    """Writes the page; nothing in it is fetched from elsewhere. Raises ConfigError if it cannot be written."""
    parts = [f"<h1>{html.escape(title)}</h1>", f"<pre>{html.escape(_tables(report, machine))}</pre>"]
    for plot in plots(recorder, report):
        parts.append(f"<h2>{html.escape(plot.title)}</h2>\n<div>{plot.legend()}</div>\n{plot.svg()}")
    text = (f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{html.escape(title)}</title>\n'
            f"<style>{_STYLE}</style>\n</head>\n<body>\n" + "\n".join(parts) + "\n</body>\n</html>\n")
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"html: {path}: cannot be written: {error.strerror}") from None


def plots(recorder: Recorder, report: Report) -> list[Plot]:
    """Memory, queues, throughput, latencies over the time of the simulation."""
    steps, jobs = recorder.steps, recorder.jobs
    time = np.asarray(steps.time)
    end = float(time[-1]) if len(time) else 1.0
    edges = np.linspace(0.0, end, BINS + 1)
    middle = ((edges[1:] + edges[:-1]) / 2).tolist()
    place = np.clip(np.searchsorted(edges, time, side="left") - 1, 0, BINS - 1)
    spans = np.diff(time, prepend=0.0)

    def mean(values: object) -> list[float]:
        """By bin, weighted by the time a step took; NaN where nothing ran."""
        weight = np.bincount(place, spans, BINS)
        with np.errstate(invalid="ignore"):
            return (np.bincount(place, np.asarray(values) * spans, BINS) / np.where(weight, weight, np.nan)).tolist()

    def rate(values: object) -> list[float]:
        return (np.bincount(place, np.asarray(values), BINS) / (end / BINS)).tolist()

    held, cached = np.asarray(steps.held), np.asarray(steps.cached)
    arrival, ttft = np.asarray(jobs.arrival), np.asarray(jobs.ttft)
    known = np.flatnonzero(~np.isnan(ttft))
    known = known[:: max(1, len(known) // DOTS)]
    quantiles = _gap_quantiles(recorder, edges)
    return [
        Plot("KV pool", "share of the pages, %", (
            Series("held and cached", middle, mean(100 * (held + cached)), "area", 1),
            Series("held", middle, mean(100 * held), "area", 0)), least=100.0),
        Plot("Requests", "requests", (
            Series("waiting", middle, mean(steps.waiting), "line", 1),
            Series("running", middle, mean(steps.running), "line", 0))),
        Plot("Throughput", "tokens a second", (
            Series("prefill", middle, rate(steps.prefill), "line", 1),
            Series("output", middle, rate(steps.tokens), "line", 0))),
        Plot("Time to first token, by arrival", "seconds", (
            Series("requests", arrival[known].tolist(), ttft[known].tolist(), "dots", 0),), log=True,
            mark=report.targets.ttft),
        Plot("Time between tokens", "milliseconds", tuple(
            Series(name, middle, values, "line", tone)
            for name, values, tone in zip(("p99", "p95", "p50"), quantiles, (3, 1, 0), strict=True)), log=True,
            mark=None if report.targets.itl is None else 1e3 * report.targets.itl),
    ]


def _gap_quantiles(recorder: Recorder, edges: np.ndarray) -> list[list[float]]:
    """p99, p95 and p50 of the gaps in each bin, milliseconds."""
    time, gap = np.asarray(recorder.gaps.time), np.asarray(recorder.gaps.gap)
    count = np.asarray(recorder.gaps.count)
    bounds = np.searchsorted(time, edges)
    bounds[-1] = len(time)
    columns: list[list[float]] = [[], [], []]
    for start, stop in itertools.pairwise(bounds):
        marks = [float("nan")] * 3
        if stop > start:
            marks = weighted_quantiles(1e3 * gap[start:stop], count[start:stop], (0.99, 0.95, 0.5))
        for column, mark in zip(columns, marks, strict=True):
            column.append(mark)
    return columns


def _tables(report: Report, machine: Machine) -> str:
    text = io.StringIO()
    console = Console(width=150, highlight=False, file=text)
    console.print(summary_table(report, machine, ""))
    console.print(latency_table(report))
    return text.getvalue()

