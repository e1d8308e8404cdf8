"""Weights onto the mesh: each device gets its part of each tensor straight from the reader."""

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed

import jax
import numpy as np

from jinfer.errors import CheckpointError
from jinfer.models.parameter import Index, Parameter
from jinfer.sharding import Layout
from jinfer.weights.checkpoint import TensorReader

Progress = Callable[[int, int], None]
READERS = 4  # tensors in progress at once; bounds host memory to a few shards


def check_names(parameters: list[Parameter], reader: TensorReader, *, tied_head: bool) -> None:
    """Raises CheckpointError naming tensors that are missing, of another shape, or that nothing uses."""
    present = set(reader.names())
    wanted: dict[str, tuple[int, ...]] = {}
    for parameter in parameters:
        wanted.update(parameter.sources)
    missing = sorted(set(wanted) - present)
    if missing:
        raise CheckpointError(f"the checkpoint lacks {_listed(missing)}")
    # Some exporters write a tied head twice.
    unused = sorted(present - set(wanted) - ({"lm_head.weight"} if tied_head else set()))
    if unused:
        raise CheckpointError(f"the checkpoint holds tensors this model does not use: {_listed(unused)}")
    for name, shape in wanted.items():
        if tuple(reader.shape(name)) != shape:
            raise CheckpointError(f"{name} has shape {tuple(reader.shape(name))}, the configuration asks for {shape}")


def place(parameters: list[Parameter], reader: TensorReader, layout: Layout,
          progress: Progress | None = None) -> list[jax.Array]:
    """Arrays of the parameters, sharded by the layout; no host copy of a whole tensor is made.

    progress: told stored bytes that are on the devices and those of all, in the calling thread. A parameter counts by
    its share of the elements: what a checkpoint stores in mixed types is so far an estimate, the end is exact.
    """

    def one(parameter: Parameter) -> jax.Array:
        def part(index: Index | None) -> np.ndarray:
            assert index is not None
            bounded = tuple(slice(*s.indices(n)[:2]) for s, n in zip(index, parameter.shape, strict=True))
            values = parameter.read(reader, bounded)
            if layout.platform != "cpu":
                return np.ascontiguousarray(values, dtype=parameter.dtype)
            # A CPU device keeps an aligned array as it is: the one copy also turns and converts. Never what was read
            # itself, which may be a view of the file.
            copy = _aligned(values.shape, parameter.dtype)
            np.copyto(copy, values, casting="unsafe")
            return copy

        array = jax.make_array_from_callback(parameter.shape, layout.sharding(*parameter.axes), part)
        return array.block_until_ready()

    total = reader.nbytes() if progress is not None else 0
    elements, done = sum(math.prod(p.shape) for p in parameters), 0
    with ThreadPoolExecutor(READERS) as pool:
        futures = {pool.submit(one, parameter): parameter for parameter in parameters}
        try:
            for future in as_completed(futures):
                future.result()
                done += math.prod(futures[future].shape)
                if progress is not None:
                    progress(total * done // elements, total)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
        return [future.result() for future in futures]


def _aligned(shape: tuple[int, ...], dtype: np.dtype, to: int = 64) -> np.ndarray:
    size = math.prod(shape) * dtype.itemsize
    memory = np.empty(size + to, np.uint8)
    start = -memory.ctypes.data % to
    return memory[start:start + size].view(dtype).reshape(shape)


def _listed(names: list[str], most: int = 5) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
