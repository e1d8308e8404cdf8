"""Compiles whole steps for devices that are not here: python scripts/aot_steps.py [--model ... --topology ...].

Without options: Llama 3.1 8B on one v6e chip and on v5e-8, 70B on v5e-16, all in bfloat16, the largest prefill and
the largest decode program of each, from the configurations alone. Prints one table; exits non-zero if a program does
not compile, copies weights or KV, takes more memory than there is, or makes other exchanges between devices than
tensor parallelism needs. TPUs need the libtpu package, GPUs jax-cuda13-plugin and jax-cuda13-pjrt.
"""

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax

from jinfer.config import EngineConfig, LayoutConfig, ModelConfig
from jinfer.config.loading import load_config, replace_config
from jinfer.engine.catalog import Key
from jinfer.errors import JinferError
from jinfer.plan.steps import Plan, StepReport, compile_steps, expected_collectives
from pallas_kernels.aot.topology import gpu_devices, tpu_devices

GiB = 2**30


class Case(NamedTuple):
    model: str
    layout: str
    topology: str
    engine: str = "accelerator"


CASES = [
    Case("llama-3.1-8b", "single", "v6e:1x1"),
    Case("llama-3.1-8b", "tp8", "v5e:2x4"),
    Case("llama-3.1-70b", "tp16", "v5e:4x4"),
]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a name under configs/models or a YAML file")
    parser.add_argument("--layout", default="single", help="a name under configs/layouts or a YAML file")
    parser.add_argument("--engine", default="accelerator", help="a name under configs/engine or a YAML file")
    parser.add_argument("--topology", default="v6e:1x1",
                        help="a TPU slice such as v5e:2x4, or FILE.txtpb:N for N GPUs of the kind in that file")
    parser.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE", help="a field of the engine")
    parser.add_argument("--program", action="append", metavar="KIND:SIZE",
                        help="decode:64, prefill:512; default: the largest of each")
    args = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")  # nothing runs, and an absent GPU wants CUDA's plugin left alone
    keys = [program(text) for text in args.program] if args.program else None
    cases = CASES if args.model is None else [Case(args.model, args.layout, args.topology, args.engine)]
    print("| model | layout | devices | program | seconds | weights | pool (pages) | temporaries | "
          "peak of memory, GiB | all-reduce | all-gather | all-to-all | others |")
    print("|---|---|---|---|---|---|---|---|---|---|---|---|---|")
    failures = []
    for case in cases:
        try:
            failures += list(run(case, args.set, keys))
        except (JinferError, RuntimeError) as error:  # RuntimeError: what XLA raises
            failures.append(f"{case.model} {case.topology}: {str(error).splitlines()[0]}")
    for failure in failures:
        print(f"FAILED {failure}", file=sys.stderr)
    return 1 if failures else 0


def run(case: Case, overrides: list[str], keys: list[Key] | None) -> Iterator[str]:
    """Prints a row for each program; yields what is wrong with it."""
    model = load_config(ModelConfig, case.model)
    config = replace_config(load_config(EngineConfig, case.engine, overrides),
                            {"layout": load_config(LayoutConfig, case.layout)})

    def progress(what: str) -> None:
        print(f"{case.model} {case.topology}: {what}", file=sys.stderr, flush=True)

    plan = compile_steps(model, config, devices(case.topology), keys=keys, progress=progress)
    for key, step in plan.steps.items():
        print(row(case, plan, key, step), flush=True)
        where = f"{case.model} {case.topology} {key.kind}[{key.size}]"
        yield from (f"{where}: {copy}" for copy in step.copies)
        if step.peak > plan.memory:
            yield f"{where}: takes {step.peak / GiB:.2f} GiB of {plan.memory / GiB:.2f}"
        wanted = expected_collectives(model, config)
        if step.collectives != wanted:
            yield f"{where}: exchanges {dict(step.collectives)} instead of {dict(wanted)}"


def devices(topology: str) -> list[Any]:
    path, _, count = topology.partition(".txtpb:")
    return gpu_devices(Path(f"{path}.txtpb").read_text(), int(count)) if count else tpu_devices(topology)


def program(text: str) -> Key:
    kind, _, size = text.partition(":")
    if kind not in ("prefill", "decode", "prepare") or not size.isdecimal():
        raise SystemExit(f"--program {text}: want prefill:TOKENS or decode:ROWS")
    return Key(kind, int(size))  # type: ignore[arg-type]


def row(case: Case, plan: Plan, key: Key, step: StepReport) -> str:
    kinds = step.collectives
    named = [kinds[kind] for kind in ("all-reduce", "all-gather", "all-to-all")]
    pages = " + ".join(map(str, plan.pages))
    cells = [case.model, case.layout, case.topology, f"{key.kind}[{key.size}]", f"{step.seconds:.1f}",
             f"{plan.weights / GiB:.2f}", f"{plan.pool / GiB:.2f} ({pages})", f"{step.temporaries / GiB:.3f}",
             f"{step.peak / GiB:.2f} of {plan.memory / GiB:.2f}", *named, kinds.total() - sum(named)]
    return "| " + " | ".join(map(str, cells)) + " |"


if __name__ == "__main__":
    raise SystemExit(main())
