"""Our TPU kernels beside JAX's own on the same shapes, by the same compiler: cycles, VMEM, bytes moved. No TPU needed.

    python scripts/compare_kernels.py                      v6e and tpu7x, everything (minutes)
    python scripts/compare_kernels.py --device v6e --match 'decode 64'

Cycles are counted, not estimated: the compiled kernel's scalar program (loops, branches, page tables) is run with the
shape's real lengths, and every bundle it issues is a cycle (pallas_kernels/aot/execute.py). Waiting for memory is not
in them: a kernel takes about the larger of its cycles and its bytes over the bandwidth. What XLA does around a kernel
(transposes, casts) is the compiler's estimate. For JAX's flash and splash there is none because they get their heads
first, and flash its keys repeated for every query head: a model would have to bring them into that form. JAX's kernels
get their own tuned or default block sizes and a few others; the best is shown.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from pallas_kernels.aot import rivals  # noqa: E402
from pallas_kernels.aot.cases import TARGET  # noqa: E402
from pallas_kernels.aot.compiler import Compiled, CompileError, Compiler, can_compile  # noqa: E402
from pallas_kernels.bench import LATENT, MODELS, Heads  # noqa: E402
from pallas_kernels.flash_attention import bench as flash_bench  # noqa: E402
from pallas_kernels.paged_attention import bench as paged_bench  # noqa: E402
from scripts.aot_kernels import DEVICES, markdown  # noqa: E402

RIVALS = "pallas_kernels.aot.rivals"
FLASH_BLOCKS = (128, 512, 1024)
HEADER = ("device", "shape", "kernel", "cycles", "ours / theirs", "HBM MB by its DMAs", "VMEM KiB", "spills",
          "cycles of XLA around it", "compile s")


@dataclass(frozen=True, slots=True)
class Shape:
    """One row of the comparison: our case of an operation, JAX's kernels as (name, target, arguments)."""

    operation: str
    case: str
    theirs: tuple[tuple[str, str, tuple[object, ...]], ...]


def shapes(table: str) -> Iterator[Shape]:
    """Decode and prefill of the two models; `table` names the device in JAX's table of tuned sizes. Latent attention,
    which JAX has no kernel for, stands alone."""
    for model in MODELS:
        for rows in (8, 64, 256):
            for context in (1024, 8192):
                yield _decode(model, rows, context, table)
    for model in LATENT:
        for rows, chunk, context in ((8, 1, 1024), (8, 1, 8192), (64, 1, 1024), (64, 1, 8192), (1, 512, 8192)):
            case = paged_bench.case(model, rows, chunk, context, "bfloat16", "bfloat16", None)
            yield Shape("paged_attention", case.name, ())
    for model in MODELS:
        for tokens in (2048, 8192):
            arguments = (tokens, model.heads, model.kv_heads, model.head_dim)
            yield Shape("flash_attention", flash_bench.case(model, 1, tokens, "bfloat16").name, tuple(
                (f"{kernel} {block}x{block}", f"{RIVALS}:{kernel}", (*arguments, block))
                for kernel in ("flash", "splash") for block in FLASH_BLOCKS))


def _decode(model: Heads, rows: int, context: int, table: str) -> Shape:
    arguments = (rows, context, model.heads, model.kv_heads, model.head_dim, paged_bench.PAGE_SIZE)
    own, source = rivals.paged_blocks(table, *arguments)
    choices = {(min(16, context // paged_bench.PAGE_SIZE), min(8, rows)): "tried", own: source}
    case = paged_bench.case(model, rows, 1, context, "bfloat16", "bfloat16", "bfloat16")
    return Shape("paged_attention", case.name, tuple(
        (f"ragged {source} {pages}x{queries}", f"{RIVALS}:paged", (*arguments, (pages, queries)))
        for (pages, queries), source in choices.items()))


def compare(device: str, match: str, timeout: float) -> list[tuple[str, ...]]:
    """Rows of HEADER: ours, then the best of each of theirs."""
    rows: list[tuple[str, ...]] = []
    table = {"v6e": "TPU v6", "tpu7x": "TPU v7", "v5e": "TPU v5", "v5p": "TPU v5"}[device]
    with Compiler(DEVICES[device], timeout=timeout) as compiler:
        for shape in shapes(table):
            if match not in shape.case:
                continue
            ours = _compiled(compiler, TARGET, shape.operation, "timing", shape.case, "tpu")
            best: dict[str, tuple[str, Compiled | str]] = {}
            for name, target, arguments in shape.theirs:
                found, kind = _compiled(compiler, target, *arguments), name.split()[0]
                if kind not in best or _cycles(found) < _cycles(best[kind][1]):
                    best[kind] = name, found
            rows.append(_row(device, shape.case, "ours", ours, ""))
            rows += [_row(device, shape.case, name, found, _ratio(ours, found)) for name, found in best.values()]
            print(f"{device} {shape.case}: done", file=sys.stderr, flush=True)
    return rows


def _compiled(compiler: Compiler, target: str, *arguments: object) -> Compiled | str:
    """What compiled, or why it did not."""
    try:
        compiled = compiler.compile(target, *arguments)
        kernel = compiled.kernel()
        return compiled if kernel.cycles is not None else kernel.uncounted or "no kernel in the program"
    except CompileError as error:
        return " ".join(str(error).split())[:200]


def _cycles(found: Compiled | str) -> float:
    cycles = None if isinstance(found, str) else found.kernel().cycles
    return float("inf") if cycles is None else cycles


def _ratio(ours: Compiled | str, theirs: Compiled | str) -> str:
    return "-" if isinstance(ours, str) or isinstance(theirs, str) else f"{_cycles(ours) / _cycles(theirs):.2f}"


def _row(device: str, case: str, name: str, found: Compiled | str, ratio: str) -> tuple[str, ...]:
    if isinstance(found, str):
        return (device, case, name, f"FAILED: {found}", *["-"] * (len(HEADER) - 4))
    kernel = found.kernel()
    around = sum(other.estimated_cycles or 0 for other in found.kernels if not other.pallas)
    spills = 0 if kernel.tree is None else kernel.tree.total("spill") + kernel.tree.total("fill")
    return (device, case, name, f"{kernel.cycles:,}", ratio, f"{(kernel.hbm_bytes or 0) / 1e6:.1f}",
            f"{kernel.memory.get('vmem', 0) / 1024:.0f}", str(spills), f"{around:,}", f"{found.compile_seconds:.1f}")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", action="append", choices=[name for name in DEVICES if name != "h100"])
    parser.add_argument("--match", default="", help="only shapes whose name contains this")
    parser.add_argument("--timeout", type=float, default=120, help="seconds to compile one kernel")
    parser.add_argument("--out", type=Path, help="write the table there, not to standard output")
    options = parser.parse_args(arguments)
    devices = options.device or ["v6e", "tpu7x"]
    if not can_compile(DEVICES[devices[0]]):
        print("libtpu is not installed (see docs/kernels.md)", file=sys.stderr)
        return 1
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda device: compare(device, options.match, options.timeout), devices))
    rows = [row for group in found for row in group]
    text = "\n".join(markdown(HEADER, rows)) + "\n"
    if options.out:
        options.out.write_text(text)
    else:
        print(text, end="")
    return 1 if any(row[2] == "ours" and row[3].startswith("FAILED") for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
