"""`jinfer plan capacity`: how many engines of which configuration hold a load within latency targets."""

import json
from typing import TYPE_CHECKING, Annotated

import typer

from jinfer.cli.options import Config, Set
from jinfer.cli.simulate import (
    AsJson,
    Device,
    DeviceSet,
    Limit,
    ModelName,
    Policy,
    Profile,
    Seed,
    Workload,
    build_machine,
)
from jinfer.errors import ConfigError

if TYPE_CHECKING:
    from rich.table import Table

    from jinfer.bench.jobs import Job
    from jinfer.plan.capacity import Plan, Point, Setting
    from jinfer.simulate.machine import Machine

plan = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Plan for devices that need not be here.")

Rate = Annotated[float, typer.Option(
    help="Mean arrivals a second, of all replicas together (of chats: conversations, not requests).")]
Ttft = Annotated[float | None, typer.Option(metavar="SECONDS", help="Target for the first token.")]
Itl = Annotated[float | None, typer.Option(
    metavar="SECONDS", help="Target for the mean time between a request's tokens.")]
Goodput = Annotated[float, typer.Option(help="Share of the requests that must meet the targets.")]
Devices = Annotated[list[int] | None, typer.Option(
    min=1, help="Devices of one engine, tensor parallel (default: 1). Repeatable: the cheapest is looked for.")]
Rows = Annotated[list[int] | None, typer.Option(min=1, help="max_rows to try (default: 32, 64, 128, 256). Repeatable.")]
Chunk = Annotated[list[int] | None, typer.Option(
    min=1, help="prefill_tokens to try (default: 256, 512, 1024, 2048). Repeatable.")]
Requests = Annotated[int, typer.Option(min=1, help="Requests that one replica gets in each simulation, at first.")]
Span = Annotated[float, typer.Option(
    min=1, metavar="SECONDS", help="What holds is tried again with all that arrives in so long a time.")]
Most = Annotated[int, typer.Option("--max-replicas", min=1, help="Most replicas to try.")]


@plan.callback()
def _root() -> None:
    pass


@plan.command()
def capacity(workload: Workload, rate: Rate, model: ModelName = "llama-3.1-8b", device: Device = "v6e",
             ttft: Ttft = None, itl: Itl = None, goodput: Goodput = 0.99, devices: Devices = None, rows: Rows = None,
             chunk: Chunk = None, requests: Requests = 1000, span: Span = 300.0, most: Most = 64,
             config: Config = None, set_: Set = None, device_set: DeviceSet = None, policy: Policy = None,
             profile: Profile = None, limit: Limit = None, seed: Seed = None, as_json: AsJson = False) -> None:
    """Search replicas, rows, chunk size and page budget that hold a load within latency targets on the fewest devices.

    Example: jinfer plan capacity -w chat -m llama-3.1-8b -d v6e --rate 20 --ttft 1.0 --itl 0.05
    """
    from jinfer.bench.synthetic import load_workload
    from jinfer.cli.session import stderr_console
    from jinfer.plan.capacity import CapacitySearch, settings
    from jinfer.simulate.report import Targets

    def machine(setting: "Setting") -> "Machine":
        values = [*(set_ or []), f"max_rows={setting.rows}", f"prefill_tokens={setting.chunk}"]
        whole = build_machine(model, config, values, device, setting.devices, device_set, policy, profile)
        if whole.split is not None:
            raise ConfigError("disaggregation: the search is for engines of one device group; use jinfer simulate")
        if setting.pages == 1.0:
            return whole
        pages = max(2, round(max(whole.pages) * setting.pages))
        return build_machine(model, config, [*values, f"kv_pages={pages}"], device, setting.devices, device_set, policy,
                             profile)

    made: dict[tuple[float, int], list[Job]] = {}

    def jobs(load: float, count: int) -> "list[Job]":
        if (load, count) not in made:
            made.clear()  # settings are tried load by load
            made[load, count] = load_workload(workload, rate=rate * load, requests=count, limit=limit, seed=seed)[1]
        return made[load, count]

    console = stderr_console()
    with console.status("simulating") as status:
        def show(point: "Point") -> None:
            status.update(f"simulating: {len(search.points)} points, {_describe(point)}")

        search = CapacitySearch(machine, jobs, Targets(ttft, itl), goodput=goodput, requests=requests, span=span,
                                most=most, progress=show)
        found = search.run(settings(devices or [1], rows or [32, 64, 128, 256], chunk or [256, 512, 1024, 2048]))
    if as_json:
        print(json.dumps(found.as_json()))
    else:
        _print(found, f"{rate:g} arrivals/s of {workload} on {model}, {device}", goodput)
    if found.answer is None:
        raise typer.Exit(1)


def _describe(point: "Point") -> str:
    s = point.setting
    verdict = "meets" if point.meets else "fails"
    return f"{s.replicas} x {s.devices} devices, {s.rows} rows, chunks of {s.chunk}: {verdict}"


def _print(found: "Plan", title: str, goodput: float) -> None:
    from rich.console import Console
    console = Console(highlight=False)
    console.print(_table(found, title))
    answer = found.answer
    if answer is None or answer.report is None:
        problems = [point.problem for point in found.points if point.problem]
        problems += [f"{point.report.all.rejected:,} of {point.report.all.jobs:,} requests can never fit"
                     for point in found.points if point.report and point.report.all.rejected]
        console.print(f"nothing tried reaches a goodput of {goodput:.1%}" + (f": {problems[0]}" if problems else ""),
                      soft_wrap=True)
        return
    s, row = answer.setting, answer.report.all
    console.print(
        f"{s.replicas} engines of {s.devices} devices ({s.cost} in all), max_rows={s.rows}, "
        f"prefill_tokens={s.chunk}: goodput {row.goodput:.2%}. They hold {found.headroom:.2f} times the load, and need "
        f"{found.least_pages:.0%} of their KV pages.", soft_wrap=True)


def _table(found: "Plan", title: str) -> "Table":
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in ("engines", "rows", "chunk", "pages", "load", "goodput", "TTFT p99", "ITL p99", "held", ""):
        table.add_column(name, justify="right", no_wrap=True)
    for point in found.points:
        s, report = point.setting, point.report
        cells = [f"{s.replicas} x {s.devices}", f"{s.rows}", f"{s.chunk}", f"{s.pages:.0%}", f"{point.load:.2f}"]
        if report is None:
            table.add_row(*cells, "does not fit")
            continue
        row = report.all
        marks = ["-" if value is None else f"{value:.3g}" for value in (row.ttft.p99, row.request_itl.p99)]
        style = "bold" if point is found.answer else None if point.meets else "dim"
        table.add_row(*cells, f"{row.goodput:.2%}", *marks, f"{report.held_peak:.0%}", "meets" if point.meets else "",
                      style=style)
    return table
