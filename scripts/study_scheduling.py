#!/usr/bin/env python
"""The study of docs/scheduling.md: settings of the scheduler side by side, in the simulator.

    .venv/bin/python scripts/study_scheduling.py --traces ../shared/traces [--only swap] [--markdown]

One table a comparison, the same numbers in every run. Each takes from seconds to two minutes of one core.
The traces are public data files and no part of jinfer: docs/scheduling.md names them.
"""

import argparse
import dataclasses
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from jinfer.bench.jobs import Job
from jinfer.bench.synthetic import load_workload
from jinfer.cli.simulate import build_machine
from jinfer.kv.cost import SwapCost
from jinfer.kv.sizing import pages_for
from jinfer.simulate.machine import Machine
from jinfer.simulate.report import ClassReport, Report, Targets, make_report
from jinfer.simulate.worker import Worker

CONV, CODE = "AzureLLMInferenceTrace_conv.csv", "AzureLLMInferenceTrace_code.csv"
MOONCAKE, SYNTHETIC = "mooncake_conversation_trace.jsonl", "mooncake_synthetic_trace.jsonl"
Extra = Callable[[Report, Machine], str]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One row of a table.

    Attributes:
      name: of the row. workload: a trace's file or a workload's name; load: how it is read (load_workload).
      model, device, devices, set, device_set: as the options of `jinfer simulate`.
      prepare: changes the jobs. workers: makes engines out of a machine; None: one as it is configured.
      lockstep: one loop for all workers (Simulator).
    """

    name: str
    workload: str
    load: dict[str, Any] = dataclasses.field(default_factory=dict)
    model: str = "llama-3.1-8b"
    device: str = "h100"
    devices: int | None = None
    set: tuple[str, ...] = ()
    device_set: tuple[str, ...] = ()
    prepare: Callable[[list[Job]], None] | None = None
    workers: Callable[[Machine], list[Worker]] | None = None
    lockstep: bool = True


@dataclasses.dataclass(frozen=True, kw_only=True)
class Study:
    """One table. extra: more columns. classes: a row for each class of requests as well."""

    title: str
    cases: tuple[Case, ...]
    targets: Targets
    stall: float = 0.1
    extra: dict[str, Extra] = dataclasses.field(default_factory=dict)
    classes: bool = False


class Prefers(SwapCost):
    """A link whose use is settled, whatever was measured."""

    def __init__(self, load: bool):
        super().__init__()
        self.load = load

    def prefers_load(self, size: int, recompute_seconds: float) -> bool:
        return self.load


def always_swap(machine: Machine) -> list[Worker]:
    workers = machine.workers()
    for worker in workers:
        worker.scheduler.swap_cost = Prefers(True)
    return workers


def salted(jobs: list[Job]) -> None:
    """Nobody shares with anybody."""
    for i, job in enumerate(jobs):
        job.service = dataclasses.replace(job.service, cache_salt=str(i))


def engines(count: int) -> Callable[[Machine], list[Worker]]:
    """So many that do all; each request goes to the one with the fewest."""
    return lambda machine: [worker for _ in range(count) for worker in machine.workers()]


def chunked() -> Iterator[Study]:
    sizes = {f"chunks of {size:,}": (f"prefill_tokens={size}",) for size in (256, 512, 1024, 2048)}
    settings: dict[str, tuple[str, ...]] = {**sizes, "whole prompts": ("prefill_tokens=16384",)}
    for target in (0.03, 0.05):
        settings[f"itl_target {target * 1e3:g} ms, up to 2,048"] = ("prefill_tokens=2048", f"itl_target={target}")
    for trace, rate, what in ((CONV, 13.0, "conversations"), (CODE, 4.0, "code, in bursts")):
        base = Case(name="", workload=trace, load={"limit": 2000, "rate": rate})
        yield Study(title=f"prefill chunks: {what} at {rate:g}/s, llama-3.1-8b on one H100",
                    cases=tuple(dataclasses.replace(base, name=name, set=("max_rows=256", "max_context=16384", *values))
                                for name, values in settings.items()),
                    targets=Targets(1.0, 0.05), extra={"every gap": lambda r, m: f"{r.all.strict:.1%}"})


def policies() -> Iterator[Study]:
    base = Case(name="", workload="targets", load={"rate": 12.0, "requests": 2000},
                set=("max_rows=64", "prefill_tokens=1024"))
    yield Study(title="policies: 60 % of requests want a first token in 0.5 s, 12/s in bursts, llama-3.1-8b on one "
                      "H100",
                cases=tuple(dataclasses.replace(base, name=policy, set=(*base.set, f"policy={policy}"))
                            for policy in ("static", "fcfs", "priority", "deadline", "longest-prefix")),
                targets=Targets(itl=0.05), classes=True)


def admission() -> Iterator[Study]:
    extra: dict[str, Extra] = {"held": lambda r, m: f"{r.held:.0%}", "again": lambda r, m: f"{r.recomputed:,}"}
    for factor in (1.0, 4.0):
        base = Case(name="", workload=CONV, load={"limit": 2000, "rate": 9.0, "declared_factor": factor},
                    set=("max_rows=256", "prefill_tokens=1024", "max_context=16384", "kv_pages=700"))
        yield Study(title=f"admission: conversations at 9/s, max_tokens {factor:g} times the output, 700 pages (11 % "
                          "of what fits), llama-3.1-8b on one H100",
                    cases=tuple(dataclasses.replace(base, name=name, set=(*base.set, f"admission={name}"))
                                for name in ("optimistic", "reserving")), targets=Targets(5.0, 0.05), extra=extra)
    base = Case(name="", workload="reasoning", load={"requests": 1000, "rate": 4.0}, model="llama-3.1-70b", devices=8,
                set=("max_rows=256", "prefill_tokens=1024", "max_context=16384", "kv_pages=1200"))
    yield Study(title="admission: long answers of very different lengths, max_tokens 8,192, at 4/s, 1,200 pages, "
                      "llama-3.1-70b on 8 H100",
                cases=tuple(dataclasses.replace(base, name=name, set=(*base.set, f"admission={name}"))
                            for name in ("optimistic", "reserving")), targets=Targets(5.0, 0.05), extra=extra)


def swap() -> Iterator[Study]:
    for model, devices, rate, pages in (("llama-3.2-1b", None, 36.0, 1200), ("llama-3.1-70b", 8, 4.0, 1200)):
        base = Case(name="", workload="reasoning", model=model, devices=devices, load={"requests": 1000, "rate": rate},
                    set=("max_rows=256", "prefill_tokens=1024", "max_context=16384", f"kv_pages={pages}"))
        cases = [dataclasses.replace(base, name="recompute")]
        for link in (50e9, 1e9):
            slow, tier = (f"host_link={link}",), (*base.set, "host_kv_gb=64")
            cases += [dataclasses.replace(base, name=f"always swap, {link / 1e9:g} GB/s", device_set=slow, set=tier,
                                          workers=always_swap),
                      dataclasses.replace(base, name=f"as it costs, {link / 1e9:g} GB/s", device_set=slow, set=tier)]
        yield Study(title=f"swap: long answers at {rate:g}/s, {pages:,} pages, {model} on {devices or 1} H100",
                    cases=tuple(cases), targets=Targets(5.0, 0.05),
                    extra={"again": lambda r, m: f"{r.recomputed:,}",
                           "GiB in": lambda r, m: f"{r.swapped_in / 2**30:.1f}",
                           "waits": lambda r, m: f"{r.moving:.1%}"})


def prefix() -> Iterator[Study]:
    for trace, limit, rate in ((MOONCAKE, 1500, 1.0), (SYNTHETIC, 1200, 1.2)):
        base = Case(name="", workload=trace, load={"limit": limit, "rate": rate},
                    set=("max_rows=128", "prefill_tokens=2048", "max_context=131072"))
        rows: list[tuple[str, tuple[str, ...], Callable[[list[Job]], None] | None]] = [
            ("off", ("prefix_cache=false",), None), ("a salt each", (), salted)]
        rows += [(f"{pages:,} pages", (f"kv_pages={pages}",), None) for pages in (2500, 4500)]
        rows += [("all that fits", (), None)]
        rows += [(f"and {size} GB of host", (f"host_kv_gb={size}",), None) for size in (64, 256, 1024)]
        yield Study(title=f"prefix cache: {Path(trace).stem}, the first {limit:,} at {rate:g}/s, llama-3.1-8b on one "
                          "H100",
                    cases=tuple(dataclasses.replace(base, name=name, set=(*base.set, *values), prepare=prepare)
                                for name, values, prepare in rows),
                    targets=Targets(5.0, 0.05), stall=0.2,
                    extra={"GiB in": lambda r, m: f"{r.swapped_in / 2**30:.0f}", "busy": lambda r, m: f"{r.busy:.0%}"})


def disaggregated() -> Iterator[Study]:
    apart = ("prefill_tokens=2048", "disaggregation.prefill_workers=1")
    rows: list[tuple[str, tuple[str, ...], tuple[str, ...], bool]] = [
        ("2 engines, chunks of 512", ("prefill_tokens=512",), (), False),
        ("2 engines, chunks of 1,024", ("prefill_tokens=1024",), (), False),
        ("1 prefill, 1 decode, loops of their own", apart, (), False),
        ("the same, 5 GB/s between them", apart, ("network=5e9",), False),
        ("1 prefill, 1 decode, one loop", apart, (), True),
        ("one loop, chunks of 512", ("prefill_tokens=512", *apart[1:]), (), True)]
    for trace, rate, what in ((CONV, 22.0, "conversations"), (CODE, 6.0, "code, in bursts")):
        base = Case(name="", workload=trace, load={"limit": 2000, "rate": rate})
        yield Study(title=f"two H100: {what} at {rate:g}/s, llama-3.1-8b",
                    cases=tuple(dataclasses.replace(base, name=name, workers=None if apart[1] in values else engines(2),
                                                    device_set=device, lockstep=lockstep,
                                                    set=("max_rows=256", "max_context=16384", *values))
                                for name, values, device, lockstep in rows),
                    targets=Targets(1.0, 0.025),
                    extra={"handed over": lambda r, m: f"{r.received / 2**30:,.0f} GiB"})


def page_size() -> Iterator[Study]:
    def table(report: Report, machine: Machine) -> str:
        row = pages_for(machine.max_context, machine.config.page_size)
        return f"{4 * row * machine.config.max_rows / 2**10:,.0f} KiB"

    for trace, load, context in ((MOONCAKE, {"limit": 500, "rate": 1.0}, 131072),
                                 (CONV, {"limit": 2000, "rate": 10.0}, 16384)):
        base = Case(name="", workload=trace, load=load)
        yield Study(title=f"page size: {Path(trace).stem}, {load['limit']:,} at {load['rate']:g}/s, "
                          "llama-3.1-8b on one H100",
                    cases=tuple(dataclasses.replace(
                        base, name=f"{size} tokens", set=("max_rows=128", "prefill_tokens=2048", f"page_size={size}",
                                                          f"max_context={context}"))
                        for size in (16, 32, 64, 128, 256)),
                    targets=Targets(5.0, 0.05), stall=0.2,
                    extra={"unfilled": lambda r, m: f"{r.unfilled:.1%}", "table": table})


STUDIES: dict[str, Callable[[], Iterator[Study]]] = {
    "chunked": chunked, "policies": policies, "admission": admission, "swap": swap, "prefix": prefix,
    "disaggregated": disaggregated, "page-size": page_size}

COLUMNS = ("TTFT p50", "p99", "ITL p50", "p99", "queue p99", "goodput", "stalls", "hits", "preempted", "tok/s")


def simulate(case: Case, study: Study, traces: Path) -> tuple[Report, Machine]:
    machine = build_machine(case.model, None, list(case.set), case.device, case.devices, list(case.device_set), None,
                            None)
    recorded = Path(case.workload).suffix != ""
    source, jobs = load_workload(traces / case.workload if recorded else case.workload, **case.load)
    if case.prepare is not None:
        case.prepare(jobs)
    workers = None if case.workers is None else case.workers(machine)
    recorder = machine.simulate(jobs, stall=study.stall, workers=workers, lockstep=case.lockstep)
    return make_report(recorder, tuple(c.name for c in source.classes), study.targets), machine


def row(report: Report, of: ClassReport) -> list[str]:
    def whole(value: str) -> str:  # what belongs to the engine, not to a class
        return value if of is report.all else ""

    return [_seconds(of.ttft.p50), _seconds(of.ttft.p99), _milliseconds(of.itl.p50), _milliseconds(of.itl.p99),
            _seconds(of.queue.p99), f"{of.goodput:.1%}", whole(f"{report.stall_rate:.2%}"),
            whole(f"{report.hit_rate:.1%}"), whole(f"{report.preemptions:,}"), whole(f"{report.output_rate:,.0f}")]


def show(title: str, caption: str, columns: Iterable[str], rows: Iterable[list[str]], markdown: bool) -> None:
    columns = ("", *columns)
    if markdown:
        print(f"**{title}**; {caption}\n\n|{'|'.join(f' {name} ' for name in columns)}|")
        print(f"|{'|'.join(['---', *['---:'] * (len(columns) - 1)])}|")
        for cells in rows:
            print(f"| {' | '.join(cells)} |")
        print()
        return
    table = Table(title=title, caption=caption, title_justify="left", caption_justify="left")
    for i, name in enumerate(columns):
        table.add_column(name, justify="right" if i else "left", no_wrap=True)
    for cells in rows:
        table.add_row(*cells)
    Console(width=190, highlight=False).print(table)


def run(study: Study, traces: Path, markdown: bool) -> None:
    rows = []
    for case in study.cases:
        report, machine = simulate(case, study, traces)
        rows.append([case.name, *row(report, report.all), *(extra(report, machine) for extra in study.extra.values())])
        if study.classes:
            rows += [[f"  {of.name}", *row(report, of), *("" for _ in study.extra)] for of in report.classes[1:]]
    wanted = [f"first token within {study.targets.ttft:g} s"] if study.targets.ttft else []
    wanted += [f"{study.targets.itl * 1e3:g} ms a token in the mean"] if study.targets.itl else []
    caption = (f"TTFT and queue in s, ITL in ms; goodput: {', '.join(wanted)}; "
               f"stalls: gaps over {study.stall * 1e3:g} ms")
    show(study.title, caption, (*COLUMNS, *study.extra), rows, markdown)


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}" if value < 100 else f"{value:,.0f}"


def _milliseconds(value: float | None) -> str:
    return "-" if value is None else f"{1e3 * value:.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", type=Path, required=True, help="folder of the Azure and Mooncake traces")
    parser.add_argument("--only", choices=STUDIES, action="append", help="this comparison; repeatable")
    parser.add_argument("--markdown", action="store_true", help="tables as in docs/scheduling.md")
    options = parser.parse_args()
    for name in options.only or STUDIES:
        began = time.process_time()
        for study in STUDIES[name]():
            run(study, options.traces, options.markdown)
        Console(stderr=True).print(f"{name}: {time.process_time() - began:.0f} s of processor time")


if __name__ == "__main__":
    main()
