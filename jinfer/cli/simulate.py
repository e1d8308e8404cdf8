"""`jinfer simulate`: a workload on an engine that is not there, with the production scheduler in virtual time."""

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from jinfer.cli.options import Config, Set
from jinfer.errors import ConfigError

if TYPE_CHECKING:
    from jinfer.simulate.machine import Machine

Workload = Annotated[str, typer.Option(
    "--workload", "-w", metavar="NAME|FILE",
    help="A workload file (YAML, or the name of one that comes with jinfer), or a trace: Azure's csv, Mooncake's or "
         "ShareGPT's jsonl.")]
ModelName = Annotated[str, typer.Option(
    "--model", "-m", metavar="NAME|FILE",
    help="A model's configuration: the name of one in configs/models, or a YAML file.")]
Device = Annotated[str, typer.Option("--device", "-d", metavar="NAME|FILE",
                                     help="A device: the name of one in configs/devices, or a YAML file.")]
Devices = Annotated[int | None, typer.Option(
    min=1, help="Devices of one engine, tensor parallel (default: the layout's).")]
DeviceSet = Annotated[list[str] | None, typer.Option(
    "--device-set", metavar="KEY=VALUE",
    help="Override one value of the device, e.g. efficiency.compute=0.4. Repeatable.")]
Profile = Annotated[str | None, typer.Option(
    "--profile", metavar="FILE", help="Step times measured by scripts/profile_engine.py, in place of the roofline.")]
Policy = Annotated[str | None, typer.Option(help="In which order requests are served; as --set policy=...")]
Rate = Annotated[float | None, typer.Option(
    help="Mean arrivals a second (of chats: conversations, not requests); a trace is stretched or pressed to it.")]
Speed = Annotated[float | None, typer.Option(help="So many times as fast as the workload, or --rate, says.")]
Requests = Annotated[int | None, typer.Option(
    min=1, help="How many requests; a trace is repeated with fresh contents as often as it takes.")]
Limit = Annotated[int | None, typer.Option(min=1, help="Read only so many requests of a trace.")]
Seed = Annotated[int | None, typer.Option(min=0, help="Of everything that is drawn.")]
Ttft = Annotated[float | None, typer.Option(metavar="SECONDS", help="Target for the first token, for goodput.")]
Itl = Annotated[float | None, typer.Option(metavar="SECONDS",
                                           help="Target for the mean time between a request's tokens, for goodput.")]
Stall = Annotated[float, typer.Option(metavar="SECONDS", help="A gap between tokens that counts as a stall.")]
Overlap = Annotated[bool, typer.Option("--no-overlap", help="The device waits for every copy from and to the host.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
Html = Annotated[Path | None, typer.Option(metavar="OUT.html", help="Write plots over time, one self-contained page.")]


def simulate(workload: Workload, model: ModelName = "llama-3.1-8b", device: Device = "v6e", devices: Devices = None,
             config: Config = None, set_: Set = None, device_set: DeviceSet = None, policy: Policy = None,
             profile: Profile = None, rate: Rate = None, speed: Speed = None, requests: Requests = None,
             limit: Limit = None, seed: Seed = None, ttft: Ttft = None, itl: Itl = None, stall: Stall = 0.2,
             no_overlap: Overlap = False, html: Html = None,
             as_json: AsJson = False) -> None:
    """Simulate a workload on a model and a device: latencies, goodput, memory, preemptions.

    Example: jinfer simulate --workload chat --model llama-3.1-8b --device v6e --set max_rows=128 --ttft 1 --itl 0.05
    """
    from jinfer.bench.synthetic import load_workload
    from jinfer.cli.session import stderr_console
    from jinfer.simulate.report import Targets, make_report
    targets = Targets(ttft, itl)
    if not stall > 0.0:
        raise ConfigError(f"stall: must be a positive number of seconds, got {stall!r}")
    if html is not None and not html.parent.is_dir():
        raise ConfigError(f"html: there is no folder {html.parent}")
    machine = build_machine(model, config, set_, device, devices, device_set, policy, profile)
    source, jobs = load_workload(workload, requests=requests, limit=limit, rate=rate, seed=seed, speed=speed)
    console = stderr_console()
    began = time.process_time()
    with console.status(f"simulating {len(jobs):,} requests"):
        recorder = machine.simulate(jobs, stall=stall, overlap=not no_overlap)
    seconds = max(time.process_time() - began, 1e-9)
    report = make_report(recorder, tuple(c.name for c in source.classes), targets)
    title = f"{Path(workload).name} on {model}, {machine.devices} x {machine.device.kind}"
    if machine.split is not None:
        title += f", {machine.split.prefill_workers} prefill and {machine.split.decode_workers} decode workers"
    if as_json:
        print(json.dumps(_plain(report.as_json(), machine, title)))
    else:
        _print(report, machine, title)
    rows = sum(recorder.steps.rows)
    console.print(f"simulated in {seconds:,.1f} s of processor time: {len(jobs) / seconds:,.0f} requests/s, "
                  f"{rows / seconds:,.0f} row steps/s", soft_wrap=True)
    if html is not None:
        from jinfer.simulate.html import write_page
        write_page(html, recorder, report, machine, title)


def build_machine(model: str, config: str | None, set_: list[str] | None, device: str, devices: int | None,
                  device_set: list[str] | None, policy: str | None, profile: str | None) -> "Machine":
    """What the options of simulations describe. Raises ConfigError or LayoutError naming the field."""
    from jinfer.config import EngineConfig, ModelConfig
    from jinfer.config.device import DeviceConfig, ProfileConfig
    from jinfer.config.loading import load_config
    from jinfer.simulate.machine import Machine
    overrides = list(set_ or [])
    if policy is not None:
        overrides.append(f"policy={policy}")
    if devices is not None:
        overrides.append(f"layout.mesh.tensor={devices}")
    engine = load_config(EngineConfig, config or "accelerator", overrides)
    measured = None if profile is None else load_config(ProfileConfig, profile)
    return Machine.build(load_config(ModelConfig, model), engine, load_config(DeviceConfig, device, device_set or []),
                         measured)


def _plain(report: dict[str, Any], machine: "Machine", title: str) -> dict[str, Any]:
    pool = {"pages": list(machine.pages), "page_size": machine.config.page_size, "bytes": machine.pool_bytes,
            "weights": machine.shard.weights, "max_context": machine.max_context}
    return {"title": title, "pool": pool, **report}


def _print(report: Any, machine: "Machine", title: str) -> None:
    from rich.console import Console

    from jinfer.simulate.table import latency_table, summary_table
    console = Console(highlight=False)
    console.print(summary_table(report, machine, title))
    console.print(latency_table(report))
