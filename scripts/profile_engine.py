#!/usr/bin/env python
"""Measures an engine's step times and writes them as a profile for `jinfer simulate --profile`.

    .venv/bin/python scripts/profile_engine.py smollm2-135m profile.yaml --set quantization=int8
"""

import argparse
from pathlib import Path

import numpy as np
import yaml
from rich.console import Console
from rich.table import Table

from jinfer.bench.profile import Profiler, relative_errors
from jinfer.config import EngineConfig
from jinfer.config.loading import load_config
from jinfer.engine.engine import Engine


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("output", type=Path, help="YAML file to write")
    parser.add_argument("--config", help="engine configuration, as of the jinfer command")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="any field of EngineConfig")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 16, 64], help="rows decoded together")
    parser.add_argument("--lengths", type=int, nargs="+", default=[16, 100, 300, 1000], help="tokens of prompts")
    parser.add_argument("--outputs", type=int, default=12, help="tokens generated")
    parser.add_argument("--repeat", type=int, default=2)
    options = parser.parse_args()
    console = Console(width=120)
    with console.status("loading"):
        config = load_config(EngineConfig, options.config, [*options.set, "prefix_cache=false"])
        engine = Engine(options.model, config)
    rows = [count for count in options.rows if count <= config.max_rows]
    profiler = Profiler(engine)
    with console.status("measuring"):
        profiler.measure(rows=rows, lengths=options.lengths, outputs=options.outputs, repeat=options.repeat,
                         vocab=engine.model_config.vocab_size)
    profile = profiler.profile()
    table = Table()
    for name in ("call", "calls", "constant ms", "a token or row us", "a position ns", "error p50", "p95"):
        table.add_column(name, justify="left" if name == "call" else "right")
    for name in ("prefill", "decode"):
        calls, values = np.asarray(getattr(profiler, name)), getattr(profile, name)
        errors = np.abs(relative_errors(calls, values))
        table.add_row(name, f"{len(calls):,}", f"{1e3 * values[0]:.2f}", f"{1e6 * values[1]:.1f}",
                      f"{1e9 * values[2]:.1f}", f"{np.median(errors):.1%}", f"{np.quantile(errors, 0.95):.1%}")
    console.print(table)
    options.output.write_text(yaml.safe_dump(
        {"prefill": list(profile.prefill), "decode": list(profile.decode), "engine": profile.engine}, sort_keys=False))
    console.print(f"written to {options.output}")
    engine.close()


if __name__ == "__main__":
    main()
