#!/usr/bin/env python
"""The simulator against an engine: the same requests at the same times, predicted and measured side by side.

    .venv/bin/python scripts/check_simulator.py --set quantization=int8

One engine serves a small workload in real time in several settings, taken in turns; medians of the rounds are printed.
Its step times are measured before each round and fitted once (as scripts/profile_engine.py does), and the simulator
predicts the rounds from that profile. A second prediction takes the calls of the rounds themselves, and what they took
in the mean, disturbances by other processes included: what is still off there is not the machine having been faster or
slower meanwhile, but what the simulator does not know. What a step costs the host is taken from the rounds.
"""

import argparse
import dataclasses
import statistics
import time
from collections.abc import Callable

import numpy as np
from rich.console import Console
from rich.table import Table

from jinfer.bench.jobs import Job
from jinfer.bench.profile import Profiler
from jinfer.bench.synthetic import make_jobs
from jinfer.config import EngineConfig, SamplingParams
from jinfer.config.device import DeviceConfig, ProfileConfig
from jinfer.config.loading import load_config
from jinfer.config.workload import ArrivalConfig, LengthConfig, SharingConfig, WorkloadConfig
from jinfer.engine.engine import Engine
from jinfer.scheduler import Scheduler
from jinfer.simulate.machine import Machine
from jinfer.simulate.report import make_report

NAMES = ("TTFT p50", "TTFT p99", "ITL p50", "ITL p99", "tok/s", "hit rate")


@dataclasses.dataclass(frozen=True)
class Setting:
    """chunk: most prompt tokens of a step. cache: requests use the prefix cache."""

    name: str
    chunk: int
    cache: bool


def workload(requests: int, rate: float) -> list[Job]:
    """Questions, most of them behind one of two instructions."""
    return make_jobs(WorkloadConfig(
        requests=requests, arrivals=ArrivalConfig(rate=rate), seed=1,
        prompt=LengthConfig(kind="lognormal", mean=120, sigma=0.7, most=500),
        output=LengthConfig(kind="uniform", low=12, high=40),
        sharing=SharingConfig(groups=2, length=LengthConfig(value=256), share=0.8)))


def tokens_of(job: Job, vocab: int) -> list[int]:
    """Token ids that are equal where the names of texts are."""
    names = np.asarray(job.prompt[:])
    ids = np.empty(len(names), int)
    for name in np.unique(names):
        ids[names == name] = np.random.default_rng(name).integers(0, vocab, len(names))[names == name]
    return ids.tolist()


def apply(setting: Setting, scheduler: Scheduler, jobs: list[Job], salt: str) -> None:
    scheduler.pace.prefill_tokens = setting.chunk
    for job in jobs:
        job.service = dataclasses.replace(job.service, cache=setting.cache, cache_salt=salt)


def measure(engine: Engine, jobs: list[Job], prompts: list[list[int]]) -> tuple[float, ...]:
    """One round in real time."""
    start = time.perf_counter()
    due, ttft, gaps, tokens, cached = {}, [], [], 0, 0
    left = list(zip(jobs, prompts, strict=True))[::-1]
    while left or engine.has_work:
        while left and start + left[-1][0].time <= time.perf_counter():
            job, prompt = left.pop()
            params = SamplingParams(temperature=0.0, max_tokens=job.output, ignore_eos=True)
            due[engine.submit(prompt, params, service=job.service)] = start + job.time
        if not engine.has_work:
            time.sleep(max(0.0, start + left[-1][0].time - time.perf_counter()))
            continue
        for delta in engine.step():
            if delta.request_finished:
                timing = delta.output.timing
                ttft.append(timing.token_times[0] - due[delta.output.request_id])
                gaps += timing.itls
                tokens += len(timing.token_times)
                cached += timing.cached_tokens
    wall = time.perf_counter() - start
    return (*np.quantile(ttft, (0.5, 0.99)), *np.quantile(gaps, (0.5, 0.99)), tokens / wall,
            cached / sum(map(len, prompts)))


def predict(machine: Machine, jobs: list[Job], change: Callable[[Scheduler], None]) -> tuple[float, ...]:
    workers = machine.workers()
    change(workers[0].scheduler)
    report = make_report(machine.simulate(jobs, workers=workers))
    values = (report.all.ttft.p50, report.all.ttft.p99, report.all.itl.p50, report.all.itl.p99)
    return (*(value or 0.0 for value in values), report.output_rate, report.hit_rate)


def with_disturbances(profiler: Profiler) -> ProfileConfig:
    """Its fit leaves out calls that something else disturbed; scaled to what all calls took together."""
    def scaled(calls: np.ndarray, values: tuple[float, ...]) -> tuple[float, ...]:
        return tuple((np.asarray(values) * calls[:, 3].sum() / (calls[:, :3] @ values).sum()).tolist())

    profile = profiler.profile()
    return ProfileConfig(prefill=scaled(np.asarray(profiler.prefill), profile.prefill),
                         decode=scaled(np.asarray(profiler.decode), profile.decode))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="any field of EngineConfig")
    parser.add_argument("--device", default="cpu2", help="of the simulation")
    parser.add_argument("--requests", type=int, default=40)
    parser.add_argument("--rate", type=float, default=1.5, help="requests a second, in the mean")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--markdown", action="store_true")
    options = parser.parse_args()
    console = Console(width=140, highlight=False)
    config = load_config(EngineConfig, None, ["max_rows=16", "prefill_tokens=256", "max_context=1024", "page_size=32",
                                              "kv_memory_gb=0.5", *options.set])
    engine = Engine(options.model, config)
    scheduler, most = engine.workers[0].scheduler, config.prefill_tokens
    settings = (Setting(f"chunks of {most}", most, True), Setting(f"chunks of {most // 4}", most // 4, True),
                Setting(f"chunks of {most}, no prefix cache", most, False))
    vocab = engine.model_config.vocab_size
    jobs = workload(options.requests, options.rate)
    prompts = [tokens_of(job, vocab) for job in jobs]
    profiler = Profiler(engine)
    own = {setting: Profiler(engine) for setting in settings}
    rounds: dict[Setting, list[tuple[float, ...]]] = {setting: [] for setting in settings}
    before = engine.metrics.snapshot()
    for number in range(options.rounds):
        scheduler.pace.prefill_tokens = most
        profiler.measure(rows=[1, 4, 8, 16], lengths=[30, 120, 500], outputs=8, repeat=1, vocab=vocab, seed=number)
        for setting in settings:
            apply(setting, scheduler, jobs, f"{number} {setting.name}")  # finds nothing of a round before
            own[setting].watch(lambda setting=setting: rounds[setting].append(  # type: ignore[misc]
                measure(engine, jobs, prompts)))
        console.print(f"round {number + 1}: " + ", ".join(f"{s.name} {rounds[s][-1][4]:.0f} tok/s" for s in settings))
    spent = engine.metrics.since(before)
    device = dataclasses.replace(load_config(DeviceConfig, options.device),
                                 host_seconds=spent.host_seconds / spent.steps)
    console.print(f"host: {1e3 * device.host_seconds:.2f} ms a step; {spent.compilations} compilations")

    def machine(profile: ProfileConfig) -> Machine:
        pages = engine.workers[0].scheduler.pages.pools[0].num_pages
        return Machine.build(engine.model_config, dataclasses.replace(engine.config, kv_pages=pages), device, profile)

    for name, calls in (("prefill", profiler.profile().prefill), ("decode", profiler.profile().decode)):
        constant, item, position = calls
        console.print(f"profile, {name}: {1e3 * constant:.2f} ms a call, {1e6 * item:.0f} us a token or row, "
                      f"{1e9 * position:.0f} ns a position")
    columns = ("setting", "", "measured", "of the rounds", "predicted", "ratio", "own step times", "ratio")
    table = Table(title=f"{options.requests} requests at {options.rate:g}/s, medians of {options.rounds} rounds")
    for i, column in enumerate(columns):
        table.add_column(column, justify="left" if i < 2 else "right", no_wrap=True)
    if options.markdown:
        print(f"| {' | '.join(columns)} |\n|---|---|{'---:|' * 6}")
    for setting in settings:
        apply(setting, scheduler, jobs, "")

        def change(scheduler: Scheduler, setting: Setting = setting) -> None:
            scheduler.pace.prefill_tokens = setting.chunk

        predicted = predict(machine(profiler.profile()), jobs, change)
        again = predict(machine(with_disturbances(own[setting])), jobs, change)
        for i, name in enumerate(NAMES):
            each = [values[i] for values in rounds[setting]]
            seen = statistics.median(each)
            show = (lambda x: f"{x:.0f}") if name == "tok/s" else (lambda x: f"{x:.1%}") if name == "hit rate" else (
                lambda x: f"{1e3 * x:.0f} ms")
            ratios = [f"{value / seen:.2f}" if seen else "-" for value in (predicted[i], again[i])]
            cells = (setting.name if not i or options.markdown else "", name, show(seen),
                     f"{show(min(each))} .. {show(max(each))}", show(predicted[i]), ratios[0],
                     show(again[i]), ratios[1])
            table.add_row(*cells, end_section=i == len(NAMES) - 1)
            if options.markdown:
                print(f"| {' | '.join(cells)} |")
    if not options.markdown:
        console.print(table)
    engine.close()


if __name__ == "__main__":
    main()
