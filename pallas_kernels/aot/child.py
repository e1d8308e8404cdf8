"""The process that compiles: reads requests as JSON lines, answers each with one line (see compiler.py).

A process of its own because libtpu takes the flags of its dumps when it is loaded, aborts on some kernels, and
because a caller may want another platform.
"""

import importlib
import json
import os
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from pallas_kernels.aot import bundles, execute
from pallas_kernels.aot.scalars import Call, calls
from pallas_kernels.aot.topology import gpu_devices, tpu_devices


def main(topology: str, dumps: str) -> None:
    """Serves until standard input ends; whatever compilers print goes to standard error."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    devices = gpu_devices(Path(topology).read_text()) if topology.endswith(".txtpb") else tpu_devices(topology)
    mesh = Mesh(np.array(devices[:1]), ("x",))
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = compiled(mesh, Path(dumps), request["target"], request["arguments"])
        except Exception as error:  # whatever it is, it belongs to this request
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def compiled(mesh: Mesh, dumps: Path, target: str, arguments: list[Any]) -> dict[str, Any]:
    """Calls `module:function` with arguments for (function, shapes[, make]), compiles that for a device of the mesh."""
    module, _, name = target.partition(":")
    function, shapes, *make = getattr(importlib.import_module(module), name)(*arguments)
    sharded = jax.shard_map(function, mesh=mesh, in_specs=PartitionSpec(), out_specs=PartitionSpec(), check_vma=False)
    for path in [path for path in dumps.rglob("*") if path.is_file()]:
        path.unlink()
    start = time.perf_counter()
    lowered = jax.jit(sharded).lower(*shapes)
    middle = time.perf_counter()
    executable = lowered.compile()
    seconds = time.perf_counter() - middle
    hlo = executable.as_text() or ""
    device = mesh.devices.flat[0]
    scalars = calls(lambda: sharded(*make[0]())) if make and device.platform == "tpu" else []
    stats = executable.memory_analysis()
    return {"lower_seconds": middle - start, "compile_seconds": seconds,
            "temporary_bytes": stats.temp_size_in_bytes if stats else 0,
            "kernels": [*tpu_kernels(dumps, hlo, scalars, bundles.delay_slots(device.device_kind)),
                        *gpu_kernels(dumps, hlo)]}


def tpu_kernels(dumps: Path, hlo: str, scalars: list[Call],
                slots: int) -> Iterator[dict[str, Any]]:
    """What the compiler's dumps say about each op that has code of its own: kernels, and what XLA made (fusions).

    scalars: what comes with the kernels; those found there are run. slots: `bundles.delay_slots`.
    """
    ours = set(re.findall(r'%(\S+) = [^\n]*custom_call_target="tpu_custom_call"', hlo))
    cycles = dict(re.findall(r'%(\S+) = [^\n]*"estimated_cycles":"(\d+)"', hlo))
    for path in dumps.rglob("*_static_llo_profile.textproto"):
        cycles |= dict(re.findall(r'hlo_op_name: "([^"]*)"\s+estimated_cycles: (\d+)', path.read_text()))
    waiting = list(scalars)
    for path in sorted(dumps.rglob("*-packed-bundles-post-ra.txt"), key=_number):
        match = re.fullmatch(r"\d+-(.*)-\d+-packed-bundles-post-ra\.txt", path.name)
        if match is None or match[1] == "TLP" or match[1].startswith("<"):  # the program around the ops
            continue
        code, allocations = path.read_text(), _beside(path, match[1], "post-ra")
        tree = bundles.nest(code, _beside(path, match[1], "pre-delay_hlo-static-per-bundle-utilization"), slots)
        found = {"name": match[1], "pallas": match[1] in ours, "memory": bundles.memory(allocations),
                 "estimated_cycles": int(cycles[match[1]]) if match[1] in cycles else None, "tree": tree.to_json(),
                 "cycles": None, "hbm_bytes": None, "trips": {}, "uncounted": ""}
        call = next((call for call in waiting if re.fullmatch(rf"{re.escape(call.name) or '.*'}(\.\d+)*", match[1])
                     and len(call.scalars) == len(set(re.findall(r"SMEM operand \d+", allocations)))), None)
        if call is not None and found["pallas"]:
            waiting.remove(call)
            try:
                counts, found["hbm_bytes"] = execute.runs(code, allocations, slots, call)
                found |= {"cycles": sum(counts), "trips": execute.trips(tree, counts)}
            except ValueError as error:  # it compiled all the same
                found["uncounted"] = str(error)
        yield found


def gpu_kernels(dumps: Path, hlo: str) -> Iterator[dict[str, Any]]:
    """Kernels and the shared memory each asks for; the dump says nothing about time or registers."""
    ours = re.findall(r'custom_call_target="(?:__gpu\$xla\.gpu\.triton|mosaic_gpu\w*)"', hlo)
    lines = [line for path in dumps.rglob("*thunk_sequence.txt") for line in path.read_text().splitlines()]
    for line in lines:
        if match := re.search(r"(\w+) grid: .*shared_memory: (\d+) bytes", line):
            yield {"name": match[1], "pallas": bool(ours) and "kCustomKernel" in line, "estimated_cycles": None,
                   "memory": {"shared": int(match[2])}, "tree": None, "cycles": None, "hbm_bytes": None, "trips": {},
                   "uncounted": ""}


def _number(path: Path) -> tuple[int, str]:
    """Kernels of one name in the order of their numbers."""
    match = re.search(r"\.(\d+)-\d+-packed-bundles-post-ra", path.name)
    return (int(match[1]) if match else 0, path.name)


def _beside(path: Path, name: str, label: str) -> str:
    """The text of another dump of the same kernel."""
    for other in path.parent.glob(f"{path.name.split('-')[0]}-*-{label}.txt"):
        if re.fullmatch(rf"\d+-{re.escape(name)}-\d+-{re.escape(label)}\.txt", other.name):
            return other.read_text()
    return ""


if __name__ == "__main__":
    main(*sys.argv[1:])
