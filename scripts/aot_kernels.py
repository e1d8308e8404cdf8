"""Compiles every kernel for devices that are not here, with their compilers; prints what the compilers say.

    python scripts/aot_kernels.py                                   everything, two devices at a time
    python scripts/aot_kernels.py --device v6e --op paged_attention --match int8
    python scripts/aot_kernels.py --out aot.md

Needs the packages of the `aot` extra (scripts/test installs them). Exits with 1 if anything did not compile, or if a
TPU program has no kernel in it.
"""

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from pallas_kernels.aot.cases import TARGET  # noqa: E402
from pallas_kernels.aot.compiler import Compiled, CompileError, Compiler, can_compile  # noqa: E402
from pallas_kernels.bench import OPERATIONS, cases  # noqa: E402

DEVICES = {"v5e": "v5e:1x1", "v5p": "v5p:1x1x1", "v6e": "v6e:1x1", "tpu7x": "tpu7x:1x1x1",
           "h100": str(ROOT / "tests/data/h100.txtpb")}
HEADER = ("device", "operation", "case", "compile s", "VMEM or shared KiB", "SMEM KiB", "bundles",
          "cycles", "cycles (compiler's estimate)", "spills", "result")


@dataclass(frozen=True, slots=True)
class Row:
    """One compiled case; error is empty if it compiled."""

    device: str
    operation: str
    case: str
    compiled: Compiled | None
    error: str

    def cells(self) -> tuple[str, ...]:
        """As HEADER has them. Of the kernels in the program only Pallas's count, one after another.

        Bundles are the code's; cycles those it issues for the case's lengths.
        """
        names = (self.device, self.operation, self.case)
        kernels = [] if self.compiled is None else [kernel for kernel in self.compiled.kernels if kernel.pallas]
        if self.compiled is None or not kernels:
            return (*names, *["-"] * 7, f"FAILED: {self.error}" if self.error else "no kernel, plain XLA")
        memory = max(kernel.memory.get("vmem", 0) + kernel.memory.get("shared", 0) for kernel in kernels)
        smem = max(kernel.memory.get("smem", 0) for kernel in kernels)
        trees = [kernel.tree for kernel in kernels if kernel.tree is not None]
        estimates = [kernel.estimated_cycles for kernel in kernels if kernel.estimated_cycles is not None]
        on_tpu, uncounted = bool(trees), any(kernel.uncounted for kernel in kernels)
        return (*names, f"{self.compiled.compile_seconds:.1f}", f"{memory / 1024:.0f}",
                f"{smem / 1024:.0f}" if on_tpu else "-",
                f"{sum(kernel.bundles for kernel in kernels)}" if on_tpu else "-",
                f"{sum(kernel.cycles or 0 for kernel in kernels)}" if all(kernel.cycles for kernel in kernels) else "-",
                f"{sum(estimates)}" if len(estimates) == len(kernels) else "-",
                f"{sum(tree.total('spill') + tree.total('fill') for tree in trees)}" if on_tpu else "-",
                f"FAILED: {self.error}" if self.error else "ok, cycles not counted" if uncounted else "ok")


def compile_all(device: str, operations: Sequence[str], match: str, timeout: float, estimate: bool) -> list[Row]:
    """Every sweep case whose name contains `match`, on one device."""
    rows: list[Row] = []
    implementation = "gpu" if device == "h100" else "tpu"
    with Compiler(DEVICES[device], timeout=timeout, profile=estimate and implementation == "tpu") as compiler:
        for operation in operations:
            for case in cases(operation, "sweep", implementation):
                if match not in case.name:
                    continue
                compiled, error = None, ""
                try:
                    compiled = compiler.compile(TARGET, operation, "sweep", case.name, implementation)
                    if implementation == "tpu" and not any(kernel.pallas for kernel in compiled.kernels):
                        error = "no kernel in the program, XLA compiled the reference"
                except CompileError as caught:
                    error = " ".join(str(caught).split())[:400]
                rows.append(Row(device, operation, case.name, compiled, error))
                if error:
                    print(f"{device} {operation} {case.name}: FAILED: {error}", file=sys.stderr, flush=True)
            print(f"{device} {operation}: done", file=sys.stderr, flush=True)
    return rows


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Lines of a table; | would end a cell."""
    yield "| " + " | ".join(header) + " |"
    yield "|" + "---|" * len(header)
    for row in rows:
        yield "| " + " | ".join(cell.replace("|", "/") for cell in row) + " |"


def summary(rows: Sequence[Row]) -> Iterator[str]:
    """One line a device and operation."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.device, row.operation), []).append(row)
    lines = []
    for (device, operation), group in groups.items():
        cells = [row.cells() for row in group]

        def most(column: str, cells: Sequence[Sequence[str]] = cells) -> str:
            numbers = [float(line[HEADER.index(column)]) for line in cells if line[HEADER.index(column)] != "-"]
            return f"{max(numbers):g}" if numbers else "-"

        lines.append((device, operation, str(len(group)), str(sum(bool(row.error) for row in group)),
                      most("compile s"), most("VMEM or shared KiB"), most("spills")))
    return markdown(("device", "operation", "cases", "failed", "slowest compile s", "most VMEM or shared KiB",
                     "most spills"), lines)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", action="append", choices=DEVICES, help="may be repeated; default: all")
    parser.add_argument("--op", action="append", help=f"{', '.join(OPERATIONS)} or a module with sweep(); default: all")
    parser.add_argument("--match", default="", help="only cases whose name contains this")
    parser.add_argument("--out", type=Path, help="write the table there, not to standard output")
    parser.add_argument("--jobs", type=int, default=2, help="devices compiled for at a time")
    parser.add_argument("--timeout", type=float, default=300, help="seconds for one case")
    parser.add_argument("--estimate", action="store_true",
                        help="also ask for the compiler's estimates, which takes up to 20 s more a case")
    options = parser.parse_args(arguments)
    devices = options.device or list(DEVICES)
    operations = options.op or list(OPERATIONS)
    missing = [device for device in devices if not can_compile(DEVICES[device])]
    if missing:
        print(f"the compilers for {', '.join(missing)} are not installed (see docs/kernels.md)", file=sys.stderr)
        return 1
    start = time.perf_counter()
    with ThreadPoolExecutor(options.jobs) as pool:
        found = list(pool.map(lambda device: compile_all(device, operations, options.match, options.timeout,
                                                         options.estimate), devices))
    rows = [row for group in found for row in group]
    failed = sum(bool(row.error) for row in rows)
    lines = [*summary(rows), "", *markdown(HEADER, [row.cells() for row in rows]), ""]
    lines.append(f"{len(rows)} cases, {failed} failed, in {time.perf_counter() - start:.0f} s.")
    text = "\n".join(lines) + "\n"
    if options.out:
        options.out.write_text(text)
        print(lines[-1])
    else:
        print(text, end="")
    return 1 if failed or not rows else 0


if __name__ == "__main__":
    sys.exit(main())
