"""Compiles for a device that is not here, in a process of its own, and says what the compiler says about it."""

import dataclasses
import importlib.util
import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from typing import Any, Self

from pallas_kernels.aot.bundles import Node

PROFILE_SECONDS = 20.0


class CompileError(Exception):
    """A kernel did not compile; the message is the compiler's."""


@dataclasses.dataclass(frozen=True, slots=True)
class Kernel:
    """One op of the compiled program that has code of its own.

    Attributes:
      name: as in the compiled HLO. pallas: a Pallas kernel; else XLA made it.
      estimated_cycles: the compiler's own; for a kernel it guesses dynamic trip counts (`Compiler.profile`).
      memory: bytes by memory space: vmem and smem, windows and spills included; shared (GPU).
      tree: its loops (TPU). cycles: bundles it issues, hbm_bytes: what its DMAs move, trips: runs of the tree's parts,
        all for the arguments the target gave; None and {} if it gave none, or if the kernel could not be run:
        uncounted says why.
    """

    name: str
    pallas: bool
    estimated_cycles: int | None
    memory: Mapping[str, int]
    tree: Node | None
    cycles: int | None
    hbm_bytes: int | None
    trips: Mapping[str, float]
    uncounted: str

    @property
    def bundles(self) -> int:
        """Bundles of code, each counted once; 0 for a GPU."""
        return 0 if self.tree is None else self.tree.last + 1


@dataclasses.dataclass(frozen=True, slots=True)
class Compiled:
    """lower_seconds, compile_seconds; temporary_bytes of device memory; kernels, XLA's own included."""

    lower_seconds: float
    compile_seconds: float
    temporary_bytes: int
    kernels: tuple[Kernel, ...]

    def kernel(self, name: str = "") -> Kernel:
        """The one with the most code among those whose name contains `name`, a Pallas kernel if there is one.

        Raises:
          LookupError: there is none.
        """
        found = [kernel for kernel in self.kernels if name in kernel.name]
        if not found:
            raise LookupError(f"no kernel {name!r} among {[kernel.name for kernel in self.kernels]}")
        return max(found, key=lambda kernel: (kernel.pallas, kernel.bundles))


class Compiler:
    """Compiles for one kind of device; close it (or use `with`) to end its process.

    Args:
      topology: v5e:1x1, v5p:1x1x1, v6e:1x1, tpu7x:1x1x1, ..; or the path of a GPU's target config (.txtpb).
      timeout: seconds for one kernel.
      profile: also ask for the compiler's own cycle estimates. It unrolls loops for that, which may take minutes: it
        gets PROFILE_SECONDS. libtpu aborts on some kernels then, such as those that compute DMA addresses on v5e.
        What fails so is compiled again without.
    """

    def __init__(self, topology: str, timeout: float = 300, profile: bool = False) -> None:
        self.topology, self.timeout, self.profile = topology, timeout, profile
        self._process: subprocess.Popen[str] | None = None
        self._dumps = tempfile.TemporaryDirectory(prefix="aot-")
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed by close

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._end()
        self._errors.close()
        self._dumps.cleanup()

    def compile(self, target: str, *arguments: Any) -> Compiled:
        """Compiles what `module:function`, called with the arguments (JSON), returns: (function, shapes[, make]).

        The function is called inside `jax.shard_map` over one device; shapes are its arguments as
        `jax.ShapeDtypeStruct`s or trees of them. make() makes real ones, in JAX: given that, a TPU kernel's scalar
        program is run to count its cycles (execute.py); only the kernel's scalar arguments are computed.

        Raises:
          CompileError: it did not compile, took too long, or the compiler died of it.
        """
        answer = self._ask(target, arguments, True, min(PROFILE_SECONDS, self.timeout)) if self.profile else None
        answer = answer or self._ask(target, arguments, False, self.timeout)
        if answer is None:
            raise CompileError(f"the compiler died or took more than {self.timeout:.0f} s: {self._tail()}")
        if "error" in answer:
            raise CompileError(answer["error"])
        kernels = tuple(Kernel(**{**fields, "tree": fields["tree"] and Node.from_json(fields["tree"])})
                        for fields in answer["kernels"])
        return Compiled(answer["lower_seconds"], answer["compile_seconds"], answer["temporary_bytes"], kernels)

    def _ask(self, target: str, arguments: tuple[Any, ...], profile: bool, timeout: float) -> dict[str, Any] | None:
        """The child's answer, None if it died or took too long."""
        if self._process is None or profile != self._profiling:
            self._start(profile)
        assert self._process is not None
        requests = self._process.stdin
        assert requests is not None
        try:
            requests.write(json.dumps({"target": target, "arguments": arguments}) + "\n")
            requests.flush()
            line = self._answers.get(timeout=timeout)
        except (queue.Empty, BrokenPipeError):
            line = ""
        if not line:
            self._end()
            return None
        return json.loads(line)

    def _start(self, profile: bool) -> None:
        self._end()
        self._errors.seek(0)
        self._errors.truncate()
        dumps = self._dumps.name
        labels = "packed-bundles-post-ra|post-ra|pre-delay_hlo-static-per-bundle-utilization"
        flags = [f"--xla_jf_dump_to={dumps}", "--xla_jf_dump_llo_text=true",
                 f"--xla_jf_dump_llo_pass_label_regex={labels}"]
        if profile:
            flags.append(f"--xla_jf_dump_static_llo_profile_to={dumps}")
        # The child compiles only: no accelerator of this machine is touched.
        xla_flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_dump_to={dumps}" if _is_gpu(self.topology) else ""
        environment = dict(os.environ, JAX_PLATFORMS="cpu", LIBTPU_INIT_ARGS=" ".join(flags), XLA_FLAGS=xla_flags,
                           PYTHONPATH=os.pathsep.join(path or os.getcwd() for path in sys.path),
                           JAX_ENABLE_COMPILATION_CACHE="false")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "pallas_kernels.aot.child", self.topology, dumps],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, text=True, env=environment)
        self._profiling = profile
        self._answers: queue.Queue[str] = queue.Queue()
        threading.Thread(target=_forward, args=(self._process.stdout, self._answers), daemon=True).start()

    def _end(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None

    def _tail(self) -> str:
        self._errors.seek(0)
        return "\n".join(self._errors.read().strip().splitlines()[-12:])


def _forward(lines: Any, answers: "queue.Queue[str]") -> None:
    """Lines of a child's output into a queue, which can be waited for with a time limit; '' when it ends."""
    for line in lines:
        answers.put(line)
    answers.put("")


def can_compile(topology: str) -> bool:
    """Whether the packages that compile for it are installed."""
    packages = ("jax_cuda13_plugin", "jax_plugins.xla_cuda13") if _is_gpu(topology) else ("libtpu",)
    try:
        return all(importlib.util.find_spec(package) is not None for package in packages)
    except ModuleNotFoundError:
        return False


def _is_gpu(topology: str) -> bool:
    return topology.endswith(".txtpb")
