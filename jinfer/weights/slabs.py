"""Slabs: a checkpoint read tensor by tensor, and large tensors a few rows at a time, some ahead of the writer."""

import collections
import dataclasses
import math
from collections.abc import Generator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from jinfer.errors import CheckpointError
from jinfer.weights.checkpoint import TensorReader

SLAB_BYTES = 16 << 20
AHEAD = 4  # slabs being read while one is written; decoding quantised blocks needs the cores
READERS = "read-slabs"  # name of its threads


@dataclasses.dataclass(frozen=True, slots=True)
class Target:
    """How a tensor will be stored.

    Attributes:
      shape, dtype: of the whole tensor.
      rows: slabs hold a multiple of these rows (of axis 0), but for the last.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    rows: int = 1

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclasses.dataclass(frozen=True, slots=True)
class Slab:
    """Rows [start, start + len(values)) of tensor `name`, in its target's dtype, contiguous."""

    name: str
    start: int
    values: np.ndarray


def stored_dtype(reader: TensorReader, name: str) -> np.dtype:
    """The dtype `read` gives for this tensor, found by reading one element."""
    return reader.read(name, tuple(slice(0, 1) for _ in reader.shape(name))).dtype


def read_slabs(reader: TensorReader, targets: Mapping[str, Target]) -> Generator[Slab]:
    """All tensors of `targets` in that order, in slabs of about SLAB_BYTES.

    At most AHEAD + 1 slabs are in memory. A slab is larger than SLAB_BYTES only where one group of rows is.
    CheckpointError naming the tensor for a number that is beyond float16.
    """

    def read(name: str, start: int, stop: int) -> Slab:
        target = targets[name]
        part = reader.read(name, (slice(start, stop),))
        return Slab(name, start, _converted(name, part, target.dtype))

    with ThreadPoolExecutor(AHEAD, READERS) as pool:
        pending: collections.deque[Future[Slab]] = collections.deque()
        try:
            for name, target in targets.items():
                step = _rows(target)
                for start in range(0, target.shape[0], step):
                    pending.append(pool.submit(read, name, start, min(start + step, target.shape[0])))
                    if len(pending) > AHEAD:
                        yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        finally:
            for future in pending:
                future.cancel()


def _converted(name: str, part: np.ndarray, dtype: np.dtype) -> np.ndarray:
    with np.errstate(over="ignore"):
        values = np.ascontiguousarray(part, dtype=dtype)
    if dtype == np.float16 != part.dtype and not np.isfinite(values).all():
        lost = ~np.isfinite(values) & np.isfinite(part)
        if lost.any():
            raise CheckpointError(f"tensor {name}: {np.asarray(part[lost], np.float32)[0]:g} is beyond float16; "
                                  "bfloat16 and float32 can hold it")
    return values


def _rows(target: Target) -> int:
    row = target.nbytes // target.shape[0]
    return max(1, SLAB_BYTES // (row * target.rows)) * target.rows
