"""What an engine asks of the process and the device before it runs: allocator, compilation cache, free memory."""

import contextlib
import ctypes
import os
import sys
from pathlib import Path

import jax
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import Mesh

from jinfer.errors import CacheError
from jinfer.weights.source import user_cache_dir

CPU_SHARE = 1 / 16  # of the host's memory, for the pool: a laptop has other things to do
UNKNOWN_MEMORY = 16 * 2**30  # bytes, for a device that does not report its memory


def prepare_backend(mesh: Mesh) -> None:
    """On CPU with glibc, keeps freed blocks in the process.

    XLA:CPU allocates each call's temporaries anew; with glibc's defaults large ones are mapped and unmapped every
    time and the page faults cost more than the arithmetic (docs/performance.md).
    """
    if mesh.devices.flat[0].platform != "cpu" or not sys.platform.startswith("linux"):
        return
    with contextlib.suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        m_trim_threshold, m_top_pad, m_mmap_max, m_arena_max = -1, -2, -4, -8
        for option, value in ((m_arena_max, 1), (m_mmap_max, 0), (m_trim_threshold, 2**31 - 1), (m_top_pad, 256 << 20)):
            mallopt(option, value)


def use_compilation_cache(directory: str | Path | None, mesh: Mesh) -> None:
    """Turns the persistent cache on, for programs of any size; the empty string turns it off.

    JAX has one cache a process: the last engine built decides. Raises CacheError if the directory cannot be used.
    """
    if directory == "":
        jax.config.update("jax_compilation_cache_dir", None)
        compilation_cache.reset_cache()
        return
    if directory is None:
        directory = user_cache_dir() / "xla"
    path = Path(directory).expanduser()
    try:
        path.mkdir(parents=True, exist_ok=True)
        probe = path / f".probe-{os.getpid()}"
        probe.write_bytes(b"x")
        probe.unlink()
    except OSError as error:
        raise CacheError(
            f"compilation_cache: {path} cannot be written ({error.strerror}); name another directory or set it "
            "to '' to switch the cache off") from None
    jax.config.update("jax_compilation_cache_dir", str(path))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def device_memory(device: jax.Device, utilization: float) -> int:
    """Bytes jinfer may use on an accelerator; on a CPU those of the KV pool, for all its virtual devices."""
    if device.platform == "cpu":
        return int(host_memory() * CPU_SHARE)
    stats = device.memory_stats() or {}
    return int(stats.get("bytes_limit", UNKNOWN_MEMORY) * utilization)


def host_memory() -> int:
    """Bytes of memory of this host, or of its container if that has less.

    Not what is free just now: the pool's size is part of every program's shape, and a pool that differed from
    start to start would never find its programs in the compilation cache.
    """
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with contextlib.suppress(OSError, ValueError):  # no control group, or no limit ("max")
        total = min(total, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return total
