"""Times ways to multiply rows by their experts' matrices on this device: python scripts/bench_moe.py [--quick].

A column a way, alternating; medians of milliseconds, of the wall and (in brackets) of CPU time over the number of
CPUs, which other processes disturb less. `ours` is pallas_kernels.grouped_matmul; `block` copies a matrix for each
block of rows instead of for each group; `row` multiplies and adds up in one fused loop a row; `gather` gathers a
matrix a row for one batched product; `ragged_dot` is JAX's. `plain` is no rival but a floor, where every group is hit:
one product of as many rows as a group has with all matrices, in place.
"""

import argparse
import functools
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from pallas_kernels import grouped_matmul  # noqa: E402
from pallas_kernels.grouped_matmul.bench import Mixture, case  # noqa: E402
from pallas_kernels.grouped_matmul.reference import block_rows  # noqa: E402
from scripts.aot_kernels import markdown  # noqa: E402

MIXTURES = (Mixture("E 8, top 2, D 1024, F 1792", 8, 2, 1024, 1792),  # Mixtral, a quarter and an eighth as wide
            Mixture("E 128, top 8, D 1024, F 256", 128, 8, 1024, 256))  # Qwen3-30B-A3B, a half and a third as wide
TOKENS = (1, 8, 64, 512)
FORMATS = (("float32", True), ("bfloat16", False), ("int8", False))  # inputs first, as jinfer keeps them on a CPU
SETS = 2  # of arguments, so that small matrices do not stay in a cache
REPEATS = 5
LONGEST = 1e10  # operations of a way that is no good for more
HEADER = ("mixture", "tokens", "format", "MB hit", "ours", "block", "row", "gather", "ragged_dot", "plain")
Way = Callable[..., jax.Array]


def product(x: jax.Array, matrix: jax.Array, inputs_first: bool) -> jax.Array:
    kind = jnp.int32 if matrix.dtype == jnp.int8 else jnp.float32
    y = jax.lax.dot_general(x.astype(matrix.dtype), matrix, (((1,), (0 if inputs_first else 1,)), ((), ())),
                            preferred_element_type=kind)
    return y.astype(jnp.float32)


def groups_of(x: jax.Array, sizes: jax.Array) -> jax.Array:
    return jnp.repeat(jnp.arange(sizes.shape[0]), sizes, total_repeat_length=x.shape[0])


def by_block(x: jax.Array, weights: jax.Array, sizes: jax.Array, scales: jax.Array | None = None, *,
             inputs_first: bool) -> jax.Array:
    rows, groups = x.shape[0], weights.shape[0]
    size = block_rows(rows, groups, quantised=scales is not None)
    counts, starts = -(-sizes // size), jnp.cumsum(sizes) - sizes
    through = jnp.cumsum(counts)
    x = jnp.pad(x, ((0, size), (0, 0)))

    def turn(index: jax.Array, out: jax.Array) -> jax.Array:
        group = jnp.sum(through <= index)
        first = starts[group] + (index - through[group] + counts[group]) * size
        y = product(jax.lax.dynamic_slice_in_dim(x, first, size), weights[group], inputs_first)
        return jax.lax.dynamic_update_slice_in_dim(out, y, first, 0)

    out = jnp.zeros((rows + size, weights.shape[2 if inputs_first else 1]), jnp.float32)
    return jax.lax.fori_loop(0, through[-1], turn, out)


def by_row(x: jax.Array, weights: jax.Array, sizes: jax.Array, scales: jax.Array | None = None, *,
           inputs_first: bool) -> jax.Array:
    group = groups_of(x, sizes)

    def turn(row: jax.Array, out: jax.Array) -> jax.Array:
        matrix, values = weights[group[row]].astype(jnp.float32), x[row].astype(jnp.float32)
        y = jnp.sum(matrix * values[:, None], 0) if inputs_first else jnp.sum(matrix * values, 1)
        return out.at[row].set(y)

    out = jnp.zeros((x.shape[0], weights.shape[2 if inputs_first else 1]), jnp.float32)
    return jax.lax.fori_loop(0, x.shape[0], turn, out)


def gathered(x: jax.Array, weights: jax.Array, sizes: jax.Array, scales: jax.Array | None = None, *,
             inputs_first: bool) -> jax.Array:
    form = "ti,tio->to" if inputs_first else "ti,toi->to"
    return jnp.einsum(form, x.astype(weights.dtype), weights[groups_of(x, sizes)],
                      preferred_element_type=jnp.int32 if weights.dtype == jnp.int8 else jnp.float32)


def ragged(x: jax.Array, weights: jax.Array, sizes: jax.Array, scales: jax.Array | None = None, *,
           inputs_first: bool) -> jax.Array:
    dims = jax.lax.RaggedDotDimensionNumbers((((1,), (1 if inputs_first else 2,)), ((), ())), [0], [0])
    return jax.lax.ragged_dot_general(x.astype(weights.dtype), weights, sizes, dims, preferred_element_type=jnp.int32
                                      if weights.dtype == jnp.int8 else jnp.float32)


def plain(x: jax.Array, weights: jax.Array, sizes: jax.Array, scales: jax.Array | None = None, *,
          inputs_first: bool) -> jax.Array:
    groups = weights.shape[0]
    x = x[: x.shape[0] // groups]
    return product(jnp.tile(x, (1, groups)) if inputs_first else x, weights.reshape(-1, weights.shape[2]), inputs_first)


def ours(x: jax.Array, weights: jax.Array, sizes: jax.Array, scales: jax.Array | None = None, *,
         inputs_first: bool) -> jax.Array:
    return grouped_matmul(x, weights, sizes, scales=scales, inputs_first=inputs_first)


def time_all(ways: dict[str, Way], sets: list[tuple[Any, ...]]) -> dict[str, tuple[float, float]]:
    """Medians of (wall, CPU) seconds of a call, the ways taking turns."""
    jitted = {name: jax.jit(way) for name, way in ways.items()}
    spent: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for repeat in range(REPEATS + 1):
        turn = repeat % len(jitted)  # each starts once: who follows the slowest finds the caches cold
        for name, way in [*jitted.items()][turn:] + [*jitted.items()][:turn]:
            wall, cpu = time.perf_counter(), time.process_time()
            for arguments in sets:
                jax.block_until_ready(way(*arguments))
            if repeat:  # the first one compiles
                spent[name].append(((time.perf_counter() - wall) / len(sets), (time.process_time() - cpu) / len(sets)))
    return {name: tuple(statistics.median(column) for column in zip(*times, strict=True))  # type: ignore[misc]
            for name, times in spent.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="decode of 8 tokens only")
    options = parser.parse_args()
    cores, rows = len(os.sched_getaffinity(0)), []
    for mixture in MIXTURES:
        for tokens in (8,) if options.quick else TOKENS:
            for dtype, inputs_first in FORMATS:
                bench = case(mixture, tokens, "gate_up", dtype, inputs_first=inputs_first)
                sets = [jax.jit(bench.make)(jax.random.key(seed)) for seed in range(SETS)]
                hit = round(float(np.mean([np.count_nonzero(arguments[2]) for arguments in sets])))
                ways: dict[str, Way] = {"ours": ours, "block": by_block, "row": by_row, "gather": gathered,
                                        "ragged_dot": ragged}
                if hit == mixture.experts:
                    ways["plain"] = plain
                work = {"ragged_dot": mixture.experts * bench.flops, "gather": 50 * bench.flops,
                        "row": 10 * bench.flops}
                ways = {name: functools.partial(way, inputs_first=inputs_first) for name, way in ways.items()
                        if work.get(name, 0) < LONGEST}
                times = time_all(ways, sets)
                weights = sets[0][1]
                cells = [f"{times[name][0] * 1e3:.2f} ({times[name][1] / cores * 1e3:.2f})" if name in times else "-"
                         for name in HEADER[4:]]
                megabytes = hit * weights[0].size * weights.dtype.itemsize / 1e6
                rows.append((mixture.name, str(tokens), dtype, f"{megabytes:.0f}", *cells))
                print(" | ".join(rows[-1]), file=sys.stderr, flush=True)
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}, {cores} CPUs\n")
    print("\n".join(markdown(HEADER, rows)))


if __name__ == "__main__":
    main()
