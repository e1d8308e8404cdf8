"""What a kernel costs on a TPU that is not here: `python -m pallas_kernels.aot.profile module:function [argument ..]`.

`module:function` returns (function, abstract arguments[, make]); see `compiler.Compiler.compile`. Prints the loop tree
of the largest kernel: bundles (cycles issued) and uses of each unit, a run of each part. With `make`, which makes real
arguments, runs are counted by running the kernel's scalar program; without it dynamic loops count as --trips says.
"""

import argparse
import json
from collections.abc import Iterator, Mapping

from pallas_kernels.aot.bundles import UNITS, Node
from pallas_kernels.aot.compiler import Compiler


def table(tree: Node, trips: Mapping[str, float]) -> Iterator[str]:
    """Lines: a part of the kernel each, with the trips assumed (? where nothing is known: counted once)."""
    yield (f"{'part':16}{'bundles':>18}{'trips':>9}{'own':>7}" + "".join(f"{unit:>8}" for unit in UNITS)
           + f"{'cycles':>12}")
    for depth, node in tree.walk():
        known = trips.get(node.name, node.trips)
        count = "?" if known is None else f"{known:g}"
        yield (f"{'  ' * depth + node.name:16}{f'{node.first:#x}-{node.last:#x}':>18}{count:>9}{node.bundles:7}"
               + "".join(f"{used:8}" for used in node.units) + f"{node.cycles(trips):12.0f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", help="module:function that returns (function, abstract arguments)")
    parser.add_argument("arguments", nargs="*", help="its arguments, JSON each; what is no JSON is a string")
    parser.add_argument("--topology", default="v6e:1x1")
    parser.add_argument("--kernel", default="", help="part of the kernel's name; default: the largest")
    parser.add_argument("--trips", default="", metavar="L1=64,I2=0.5", help="runs of a part for each of its parent's")
    parser.add_argument("--estimate", action="store_true", help="also print the compiler's own estimate (slow)")
    options = parser.parse_args()
    trips = {name: float(count) for name, _, count in
             (entry.partition("=") for entry in options.trips.split(",") if entry)}
    with Compiler(options.topology, profile=options.estimate) as compiler:
        compiled = compiler.compile(options.target, *map(_parsed, options.arguments))
    kernel = compiled.kernel(options.kernel)
    if kernel.tree is None:
        raise SystemExit(f"{options.topology}: the compiler shows no code, only {dict(kernel.memory)}")
    trips = {**kernel.trips, **trips}
    print(*table(kernel.tree, trips), sep="\n")
    memory = ", ".join(f"{space} {size / 1024:.0f} KiB" for space, size in kernel.memory.items() if size >= 1024)
    print(f"{kernel.name} on {options.topology}: {kernel.tree.cycles(trips):.0f} cycles with these trips; "
          + (f"the compiler's own estimate {kernel.estimated_cycles}; " if options.estimate else "")
          + (f"{kernel.cycles} with the target's arguments, {kernel.hbm_bytes} bytes of HBM; " if kernel.cycles else "")
          + (f"runs not counted: {kernel.uncounted}; " if kernel.uncounted else "")
          + f"{memory}; spilled registers: "
          f"{kernel.tree.total('spill')} stores, {kernel.tree.total('fill')} loads; "
          f"compiled in {compiled.compile_seconds:.1f} s; all kernels: {[k.name for k in compiled.kernels]}")


def _parsed(argument: str) -> object:
    try:
        return json.loads(argument)
    except ValueError:
        return argument


if __name__ == "__main__":
    main()
