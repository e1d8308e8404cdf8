"""Times the kernels on the device that is here (TPU, GPU, or the reference on a CPU); prints one table.

    python scripts/bench_kernels.py                     everything, under 5 minutes on one H100 or H200
    python scripts/bench_kernels.py --quick             two small shapes an operation: proves that it works
    python scripts/bench_kernels.py --op paged_attention --match 'decode 64' --out table.md

Every kernel is first compared with the reference in float32 on the same inputs: `error` is the norm of the difference
over the norm. A call starts where the last one's result is in (its output is the next one's query, its pools the next
one's pools), and calls rotate over several sets of inputs that together exceed the caches. A time is the median over
repetitions of one program that makes many calls: neither compilation nor dispatch is in it. Rows `by XLA` and `cuDNN`
are what one would use without the kernel.
"""

import argparse
import functools
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from pallas_kernels.bench import OPERATIONS, VALUE_LANES, Case, Heads, cases  # noqa: E402
from pallas_kernels.chips import CHIPS, Chip  # noqa: E402
from pallas_kernels.flash_attention import bench as flash_bench  # noqa: E402
from pallas_kernels.grouped_matmul import bench as moe_bench  # noqa: E402
from pallas_kernels.kv_update import bench as update_bench  # noqa: E402
from pallas_kernels.options import MASKED  # noqa: E402
from pallas_kernels.paged_attention import bench as paged_bench  # noqa: E402
from pallas_kernels.platform import choose  # noqa: E402
from scripts.aot_kernels import markdown  # noqa: E402

HEADER = ("operation", "case", "kernel", "error", "us", "GB/s", "of peak", "TFLOP/s", "of peak ", "calls")
CACHES = 256 * 2**20  # more than any device's caches
MOST_SETS = 4
REPEATS = 5
LEAST_SECONDS = 0.1  # of one timed program
MOST_TURNS = 4096  # of its loop
CALLS_A_TURN = 16  # at least, unless a call is long
LONG = 64 * 2**20  # bytes to move


def quick(operation: str) -> list[Case]:
    """Two small cases of an operation."""
    heads = Heads("small", 8, 2, 64)
    if operation == "flash_attention":
        return [flash_bench.case(heads, rows, 128, "float32") for rows in (1, 2)]
    if operation == "paged_attention":
        return [paged_bench.case(heads, 4, chunk, 256, "float32", "float32", "float32") for chunk in (1, 32)] + [
            paged_bench.case(Heads("small latent", 8, 1, 576), 4, 1, 256, "float32", "float32", None)]
    if operation == "grouped_matmul":
        mixture = moe_bench.Mixture("small", 8, 2, 256, 128)
        return [moe_bench.case(mixture, tokens, "gate_up", "float32") for tokens in (4, 64)]
    return [update_bench.case(heads, 4, chunk, 256, "float32", "float32", "float32") for chunk in (1, 32)]


def rivals(operation: str, case: Case) -> Iterator[tuple[str, Callable[..., Any]]]:
    """(name, function) of what else computes a case on a GPU."""
    if operation == "flash_attention" and "prefill 1x" in case.name and "bfloat16" in case.name:
        yield "cuDNN", _cudnn
    if operation == "paged_attention" and case.name.startswith("decode") and " kv " not in case.name:
        yield "gather, by XLA", _gathered


def _cudnn(q, k, v, starts):
    """jax.nn.dot_product_attention of one sequence, q [T, N, H] and k, v [T, K, H]."""
    return jax.nn.dot_product_attention(q[None], k[None], v[None], is_causal=True, implementation="cudnn")[0]


def _gathered(q, k_pages, v_pages, page_table, query_starts, kv_lengths):
    """Decode over pages gathered into [B, K, C, H] first, plain einsums and softmax."""
    rows, heads, width = q.shape
    kv_heads, page_size = k_pages.data.shape[1:3]
    k, *values = (pages.data[page_table].transpose(0, 2, 1, 3, 4).reshape(rows, kv_heads, -1, width)
                  for pages in (k_pages, v_pages) if pages is not None)
    v = values[0] if values else k[..., :VALUE_LANES]
    grouped = q.reshape(rows, kv_heads, heads // kv_heads, width)
    scores = jnp.einsum("bkgh,bkch->bkgc", grouped, k, preferred_element_type=jnp.float32) * width**-0.5
    seen = jnp.arange(page_table.shape[1] * page_size) < kv_lengths[:, None]
    probs = jax.nn.softmax(jnp.where(seen[:, None, None], scores, MASKED), axis=-1)
    return jnp.einsum("bkgc,bkch->bkgh", probs.astype(v.dtype), v).reshape(rows, heads, -1)


def relative_error(case: Case, function: Callable[..., Any], arguments: tuple[Any, ...]) -> float:
    """Norm of the difference from the reference in float32 over the reference's norm; the largest of the outputs."""
    exact = tuple(x.astype(jnp.float32) if isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jnp.floating) else x
                  for x in arguments)
    wanted = jax.jit(functools.partial(case.function, implementation="reference"))(*exact)
    return float(_distance(jax.jit(function)(*arguments), wanted))


@jax.jit
def _distance(got: Any, wanted: Any) -> jax.Array:
    def one(a: jax.Array, b: jax.Array) -> jax.Array:
        a, b = a.astype(jnp.float32), b.astype(jnp.float32)
        return jnp.linalg.norm((a - b).ravel()) / jnp.maximum(jnp.linalg.norm(b.ravel()), 1e-30)

    return jnp.stack(jax.tree.leaves(jax.tree.map(one, got, wanted))).max()


def seconds(case: Case, function: Callable[..., Any], sets: list[tuple[Any, ...]]) -> tuple[float, int]:
    """(median seconds of one call, calls a timed program makes). `sets` are donated: they are used up.

    Raises:
      RuntimeError: the calls cannot be told from the loop around them.
    """
    # A device loop may ask the host whether to go on; enough short calls a turn make that cheap.
    again = 1 if case.bytes > LONG else -(-CALLS_A_TURN // len(sets))

    def many(count: jax.Array, sets: list[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
        def turn(_: jax.Array, sets: list[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
            for _ in range(again):
                sets = [case.chain(arguments, function(*arguments)) for arguments in sets]
            return sets

        return jax.lax.fori_loop(0, count, turn, sets)

    program = jax.jit(many, donate_argnums=1).lower(jnp.int32(0), sets).compile()

    def timed(count: int) -> float:
        nonlocal sets
        start = time.perf_counter()
        sets = jax.block_until_ready(program(jnp.int32(count), sets))
        return time.perf_counter() - start

    turns = 1
    timed(turns)
    while timed(turns) < LEAST_SECONDS and turns < MOST_TURNS:
        turns *= 2
    empty = statistics.median(timed(0) for _ in range(REPEATS))
    spent = statistics.median(timed(turns) for _ in range(REPEATS))
    if spent < 2 * empty:
        raise RuntimeError(f"{turns} turns take {spent:.2e} s, none take {empty:.2e} s")
    calls = turns * again * len(sets)
    return (spent - empty) / calls, calls


def bench(operation: str, case: Case, chip: Chip | None, on_gpu: bool) -> Iterator[tuple[str, ...]]:
    """Rows of HEADER: ours, then its rivals."""
    implementation = choose(None)
    make = jax.jit(case.make)
    size = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(jax.eval_shape(case.make, jax.random.key(0))))
    functions = [(implementation, functools.partial(case.function, implementation=implementation))]
    functions += rivals(operation, case) if on_gpu else []
    for name, function in functions:
        label = (operation, case.name, name)
        try:
            if 2.5 * size > _free_memory():
                yield (*label, f"too big: {size / 1e9:.1f} GB of inputs", *["-"] * 6)
                continue
            arguments = make(jax.random.key(0))
            error = relative_error(case, function, arguments)
            count = min(MOST_SETS, -(-CACHES // size))
            sets = [arguments, *(make(jax.random.key(index)) for index in range(1, count))]
            each, calls = seconds(case, function, sets)
        except Exception as problem:  # a kernel that fails must not hide the others
            yield (*label, f"FAILED: {' '.join(str(problem).split())[:120]}", *["-"] * 6)
            continue
        bandwidth, rate = case.bytes / each, case.flops / each
        yield (*label, f"{error:.1e}", f"{each * 1e6:.1f}", f"{bandwidth / 1e9:.1f}",
               f"{bandwidth / chip.bandwidth:.0%}" if chip else "-", f"{rate / 1e12:.3g}",
               f"{rate / chip.flops:.0%}" if chip else "-", str(calls))


def _free_memory() -> float:
    stats = jax.devices()[0].memory_stats() or {}
    return stats.get("bytes_limit", 8e9) - stats.get("bytes_in_use", 0)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--op", action="append", choices=OPERATIONS, help="may be repeated; default: all")
    parser.add_argument("--match", default="", help="only cases whose name contains this")
    parser.add_argument("--quick", action="store_true", help="two small cases an operation")
    parser.add_argument("--budget", type=float, default=280, help="seconds after which no further case is started")
    parser.add_argument("--bound", type=float, default=2e-2, help="largest error a kernel may have")
    parser.add_argument("--out", type=Path, help="also write the table there")
    options = parser.parse_args(arguments)
    device, start = jax.devices()[0], time.perf_counter()
    rows: list[tuple[str, ...]] = []
    skipped = 0
    for operation in options.op or OPERATIONS:
        for case in quick(operation) if options.quick else cases(operation, "timing", jax.default_backend()):
            if options.match not in case.name:
                continue
            if time.perf_counter() - start > options.budget:
                skipped += 1
                continue
            for row in bench(operation, case, CHIPS.get(device.device_kind), device.platform == "gpu"):
                rows.append(row)
                print(" | ".join(row), file=sys.stderr, flush=True)
    wrong = [row for row in rows if row[2] == choose(None) and not _sound(row[3], options.bound)]
    lines = [f"{device.device_kind}, jax {jax.__version__}, {time.perf_counter() - start:.0f} s", "",
             *markdown(HEADER, rows)]
    lines += [f"{skipped} cases not run: {options.budget:.0f} s were over."] if skipped else []
    lines += [f"{len(wrong)} of our kernels failed or are off by more than {options.bound:g}."] if wrong else []
    text = "\n".join(lines) + "\n"
    print(text, end="")
    if options.out:
        options.out.write_text(text)
    return 1 if wrong or not rows else 0


def _sound(cell: str, bound: float) -> bool:
    """Whether the error in a cell is within the bound; too big for the device is no failure."""
    if cell.startswith("too big"):
        return True
    return not cell.startswith("FAILED") and float(cell) <= bound  # NaN is not


if __name__ == "__main__":
    sys.exit(main())
