"""A Report as rich tables."""

from collections.abc import Iterable

from rich.markup import escape
from rich.table import Table

from jinfer.simulate.machine import Machine
from jinfer.simulate.report import ClassReport, Report


def latency_table(report: Report) -> Table:
    """Latencies of each class of requests, and how many met their targets."""
    table = Table(title="latencies, seconds", title_justify="left", caption=_targets(report), caption_justify="left")
    table.add_column("")
    for name in ("p50", "p95", "p99", "mean", "most"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in report.classes:
        if len(report.classes) > 1:
            table.add_section()
            table.add_row(f"[bold]{escape(row.name)}[/]: {row.jobs:,} sent, {row.finished:,} finished")
        for name, values in (("time to first token", row.ttft), ("queue", row.queue), ("between tokens", row.itl),
                             ("between tokens, mean of a request", row.request_itl), ("end to end", row.e2e)):
            table.add_row(name, *(_seconds(getattr(values, mark)) for mark in ("p50", "p95", "p99", "mean", "most")))
        table.add_row("goodput", f"{row.goodput:.2%}", f"{row.goodput_rate:.2f}/s")
    return table


def summary_table(report: Report, machine: Machine, title: str) -> Table:
    """Everything that is not a latency, in two columns."""
    table = Table(title=title, show_header=False, title_justify="left")
    table.add_column(style="bold")
    table.add_column()
    for name, value in _rows(report, machine):
        table.add_row(name, value)
    return table


def _rows(r: Report, machine: Machine) -> Iterable[tuple[str, str]]:
    total = r.all
    yield "virtual time", f"{r.seconds:,.1f} s in {r.steps:,} steps"
    yield "throughput", (f"{r.request_rate:,.2f} requests/s, {r.output_rate:,.0f} output tok/s, "
                         f"{r.prefill_rate:,.0f} prefill tok/s")
    yield "device", f"computes {r.busy:.1%} of the time" + (f", waits for pages {r.moving:.1%}" if r.moving else "")
    why = f" (context and pool take {machine.max_context:,} tokens)" if total.rejected else ""
    yield "requests", _outcomes(total) + why
    yield "running / waiting", (f"{r.running:,.1f} / {r.waiting:,.1f} in the mean, "
                                f"{r.running_peak:,} / {r.waiting_peak:,} at most")
    pages = " + ".join(f"{count - 1:,}" for count in machine.pages)
    yield "KV pool", (f"{pages} pages of {machine.config.page_size} ({machine.pool_bytes / 2**30:,.2f} GiB a device), "
                      f"held {r.held:.1%} in the mean, {r.held_peak:.1%} at most, "
                      f"{r.unfilled:.1%} of it not filled yet, cached {r.cached:.1%}")
    yield "prefix cache", f"{r.hit_rate:.1%} of prompt tokens found ({r.saved:,}), {r.evictions:,} pages evicted"
    again = f"{r.recomputed:,} tokens computed again" if r.preemptions else ""
    if r.preemptions:
        again = (f"; {r.returned_swapped:,} came back from the host, {r.returned_cached:,} from the cache, {again}")
    yield "preemptions", f"{r.preemptions:,}{again}"
    if r.swapped_out or r.swapped_in:
        yield "host tier", f"{r.swapped_out / 2**30:,.2f} GiB out, {r.swapped_in / 2**30:,.2f} GiB in"
    if r.received:
        yield "handed over", f"{r.received / 2**30:,.2f} GiB"
    causes = ", ".join(f"{cause} {count:,}" for cause, count in r.stalls.items())
    yield "stalls", f"{r.stall_rate:.3%} of gaps over {r.stall * 1e3:g} ms" + (f": {causes}" if causes else "")


def _outcomes(row: ClassReport) -> str:
    kinds = ("finished", "rejected", "overloaded", "timeout", "cancelled")
    return ", ".join(f"{getattr(row, kind):,} {kind}" for kind in kinds if getattr(row, kind) or kind == "finished")


def _seconds(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.1f}" if value >= 10 else f"{value:.2f}" if value >= 1 else f"{value:.3f}"


def _targets(report: Report) -> str:
    parts = [f"{name} within {value:g} s" for name, value in (
        ("first token", report.targets.ttft), ("tokens in the mean", report.targets.itl)) if value is not None]
    return "goodput: finished" + (", " + ", ".join(parts) if parts else ", within the requests' own targets")
