#!/usr/bin/env python
"""Loading against storage: GB/s of placing a model's weights on devices, beside a plain read of the same files.

    .venv/bin/python scripts/bench_load.py MODEL [MODEL ...] --devices 1 4 --dtype bfloat16

Rates are bytes stored over seconds. Cold: the files were dropped from the page cache just before (as far as the
system lets a process do that); warm: they were just read. CPU seconds are of the whole
process. GGUF files are smaller than the arrays made of them.
"""

import argparse
import os
import time
from collections.abc import Callable
from pathlib import Path

import jax

from jinfer.config import EngineConfig
from jinfer.config.loading import load_config
from jinfer.engine.assembly import Assembly
from jinfer.engine.backend import prepare_backend
from jinfer.sharding import Layout
from jinfer.weights import open_checkpoint, resolve_model
from jinfer.weights.place import place

BLOCK = 8 << 20


def files_of(path: Path) -> list[Path]:
    """The files that hold tensors."""
    if path.is_file():
        return [path]
    orbax = [file for file in (path / "orbax").rglob("*") if file.is_file()]
    return sorted(orbax or path.glob("*.safetensors"))


def drop(files: list[Path]) -> None:
    """Asks the system to forget the files' pages; dirty ones must be written first."""
    for file in files:
        with file.open("rb") as handle:
            os.fsync(handle.fileno())
            os.posix_fadvise(handle.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def plain_read(files: list[Path]) -> None:
    buffer = bytearray(BLOCK)
    for file in files:
        with file.open("rb", buffering=0) as handle:
            while handle.readinto(buffer):
                pass


def timed(run: Callable[[], object]) -> tuple[float, float]:
    """Seconds of the clock and of the process's CPU time."""
    began, busy = time.perf_counter(), time.process_time()
    run()
    return time.perf_counter() - began, time.process_time() - busy


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", help="folders, .gguf files or names")
    parser.add_argument("--devices", type=int, nargs="+", default=[1], help="tensor-parallel degrees (CPU: virtual)")
    parser.add_argument("--dtype", default="auto", help="of the weights on the devices")
    parser.add_argument("--repeat", type=int, default=3, help="measurements; the fastest counts")
    options = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", max(options.devices))  # other platforms have what they have
    print(f"{'model':24} {'devices':>7} {'stored GB':>9} {'cache':>5} {'read GB/s':>9} {'load GB/s':>9} load/read "
          "load CPU s")
    for model in options.models:
        path = resolve_model(model)
        files = files_of(path)
        size = sum(file.stat().st_size for file in files)
        for degree in options.devices:
            overrides = [f"dtype={options.dtype}", f"layout.mesh.tensor={degree}"]
            overrides += [f"layout.rules.{axis}=tensor" for axis in ("kv_heads", "ffn", "vocab")]
            config = load_config(EngineConfig, None, overrides)
            layout = Layout.build(config.layout)
            prepare_backend(layout.mesh)

            def load(path: Path = path, config: EngineConfig = config, layout: Layout = layout) -> None:
                checkpoint = open_checkpoint(path)
                place(Assembly.build(checkpoint.config, config, layout).parameters, checkpoint.reader, layout)

            load()  # imports, and the allocator's first growth
            for cache in ("cold", "warm"):
                best = {}
                for name, run in (("read", lambda files=files: plain_read(files)), ("load", load)):
                    seconds = []
                    for _ in range(options.repeat):
                        (drop if cache == "cold" else plain_read)(files)
                        seconds.append(timed(run))
                    wall, busy = (min(column) for column in zip(*seconds, strict=True))
                    best[name] = size / wall / 1e9
                print(f"{path.name[:24]:24} {degree:7} {size / 1e9:9.2f} {cache:>5} {best['read']:9.2f} "
                      f"{best['load']:9.2f} {best['load'] / best['read']:9.2f} {busy:10.2f}", flush=True)


if __name__ == "__main__":
    main()
