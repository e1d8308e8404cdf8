#!/usr/bin/env python
"""Offline throughput beside the roof of this machine. Prints one table; see docs/performance.md.

    .venv/bin/python scripts/bench_offline.py --set quantization=int8
"""

import argparse
import statistics
import time

from rich.console import Console
from rich.table import Table

from jinfer.bench.machine import measure
from jinfer.bench.workloads import Workload, build
from jinfer.config import EngineConfig, ServiceParams
from jinfer.config.loading import load_config
from jinfer.engine.engine import Engine


def run(engine: Engine, workload: Workload, service: ServiceParams) -> dict[str, float]:
    """One pass of a workload, from first submission to last token."""
    before = engine.metrics.snapshot()
    start = time.perf_counter()
    for prompt, params in zip(workload.prompts, workload.params(), strict=True):
        engine.submit(prompt, params, service=service)
    times, itls = [], []
    context = 0  # KV positions read by decode
    while engine.has_work:
        for delta in engine.step():
            if delta.request_finished:
                timing = delta.output.timing
                times.append(timing.ttft)
                itls += timing.itls
                count, prompt = len(delta.output.completions[0].token_ids), len(delta.output.prompt_token_ids)
                context += sum(range(prompt + 1, prompt + count))
    spent = engine.metrics.since(before)
    return {
        "wall": time.perf_counter() - start,
        "prefill_tokens": spent.prefill_tokens, "output_tokens": spent.output_tokens,
        "prefill_seconds": spent.prefill_seconds, "decode_seconds": spent.decode_seconds,
        "decode_calls": spent.decode_calls, "steps": spent.steps, "host": spent.host_seconds / max(1, spent.steps),
        "saved": spent.saved_tokens,
        "itl": statistics.median(itls) if itls else 0.0, "context": context, "compilations": spent.compilations,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="any field of EngineConfig")
    parser.add_argument("--repeat", type=int, default=3, help="passes of each workload; the median is printed")
    parser.add_argument("--only", default="W1,W2,W3,W4")
    options = parser.parse_args()
    console = Console(width=150)
    machine = measure()
    peaks = ", ".join(f"{dtype} {rate / 1e9:.0f} GFLOP/s" for dtype, rate in machine.flops_per_second.items())
    console.print(f"roof: {machine.bytes_per_second / 1e9:.1f} GB/s read; {peaks}")

    start = time.perf_counter()
    config = load_config(EngineConfig, None, ["kv_memory_gb=3", "max_context=2048", *options.set])
    engine = Engine(options.model, config)
    ready = time.perf_counter() - start
    config, metrics = engine.config, engine.metrics
    weights = config.quantization or config.dtype
    console.print(f"{options.model}: weights {weights} ({metrics.weight_bytes / 1e6:.0f} MB), KV {config.kv_dtype}, "
                  f"ready in {ready:.1f} s ({metrics.warmup_compilations} programs in {metrics.warmup_seconds:.1f} s)")
    model = engine.model_config
    per_layer = model.hidden_size * (2 * model.num_heads + 2 * model.num_kv_heads) * model.head_dim \
        + 3 * model.hidden_size * model.intermediate_size
    # Products of one token; the head runs for sampled positions only.
    body, head = per_layer * model.num_layers, model.vocab_size * model.hidden_size
    kv_token = metrics.kv_bytes / ((metrics.pages_total + len(metrics.page_groups)) * config.page_size)

    table = Table(title=f"medians of {options.repeat} passes")
    for column in ("workload", "wall s", "output tok/s", "prefill tok/s", "GFLOP/s", "of peak", "decode tok/s",
                   "ITL p50 ms", "GB/s", "of peak", "host us/step", "of step"):
        table.add_column(column, justify="left" if column == "workload" else "right")
    peak = machine.flops_per_second[weights]
    sharing = {}  # W4 with the prefix cache and without, taken in turns
    for workload in build(model.vocab_size):
        if workload.name not in options.only.split(","):
            continue
        shares = workload.name == "W4"
        # A salt for each pass: what a pass before computed is not to be found.
        kinds = [True, False] if shares else [False]
        passes = {kind: [] for kind in kinds}
        for i in range(options.repeat + 1):
            for kind in kinds:
                passes[kind].append(run(engine, workload, ServiceParams(cache=kind, cache_salt=str(i))))
        each = {kind: {key: statistics.median(p[key] for p in some[1:]) for key in some[0]}  # the first warms caches
                for kind, some in passes.items()}
        r = each[shares]
        if shares:
            sharing = each
        flops = 2 * body * r["prefill_tokens"] / max(r["prefill_seconds"], 1e-9)
        # What a decode call must move: all weights once, and the context of its rows.
        moved = metrics.weight_bytes * r["decode_calls"] + kv_token * r["context"]
        rate = moved / max(r["decode_seconds"], 1e-9)
        decoded = r["output_tokens"] - len(workload.prompts)
        decoding = r["decode_calls"] > 0
        table.add_row(
            f"{workload.name} {workload.title}", f"{r['wall']:.2f}", f"{r['output_tokens'] / r['wall']:.0f}",
            f"{r['prefill_tokens'] / r['prefill_seconds']:.0f}", f"{flops / 1e9:.0f}", f"{flops / peak:.0%}",
            f"{decoded / r['decode_seconds']:.0f}" if decoding else "-", f"{r['itl'] * 1e3:.1f}" if decoding else "-",
            f"{rate / 1e9:.1f}" if decoding else "-", f"{rate / machine.bytes_per_second:.0%}" if decoding else "-",
            f"{r['host'] * 1e6:.0f}", f"{r['host'] * r['steps'] / r['wall']:.1%}")
        assert r["compilations"] == 0
    console.print(table)
    if sharing:
        on, off = sharing[True], sharing[False]
        second = off["prefill_seconds"] / off["prefill_tokens"]
        rate = off["output_tokens"] / off["wall"]
        console.print(f"W4 without the prefix cache: {off['wall']:.2f} s, {rate:.0f} output tok/s. "
                      f"It saves {on['saved']:.0f} of {off['prefill_tokens']:.0f} prefill tokens, which take "
                      f"{on['saved'] * second:.2f} s: predicted {off['wall'] - on['saved'] * second:.2f} s, "
                      f"measured {on['wall']:.2f} s")
    console.print(f"one token is {2 * (body + head) / 1e6:.0f} MFLOP and {kv_token / 1e3:.1f} kB of KV; "
                  f"peak pool use {metrics.pages_peak}/{metrics.pages_total} pages, preemptions {metrics.preemptions}")


if __name__ == "__main__":
    main()
