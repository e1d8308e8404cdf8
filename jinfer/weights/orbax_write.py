"""Writer of Orbax checkpoints: a flat tree of tensors under Hugging Face names, streamed.

Orbax hands every leaf of a tree to the TypeHandler of its type. Here leaves are descriptions, and the handler
writes the tensors as they are read: nothing else of a checkpoint is Orbax's own way, so its plain restore
calls read the result.
"""

import dataclasses
import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import orbax.checkpoint as ocp
import tensorstore as ts

from jinfer.weights.slabs import Slab, Target

CUTS = 8  # parts an axis is cut into, if they are not too small: what a mesh's axis usually divides
CHUNK_BYTES = (64 << 10, 4 << 20)
BAND_BYTES = 16 << 20  # all chunks of the same rows: they are written together
COMMIT_BYTES = 32 << 20  # a transaction: one data file, and what is kept in memory


def orbax_targets(shapes: Mapping[str, tuple[int, ...]], dtypes: Mapping[str, np.dtype]) -> dict[str, Target]:
    """In Orbax's order of leaves; slabs hold whole chunks."""
    return {name: Target(shapes[name], dtypes[name], chunk_shape(shapes[name], dtypes[name].itemsize)[0])
            for name in sorted(shapes)}


def chunk_shape(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    """Shape of the pieces a tensor is stored in: CUTS along every axis, within CHUNK_BYTES and BAND_BYTES.

    A part of the tensor for one of 2, 4 or 8 devices, cut along any axis, is then read without the rest of it. Small
    tensors get fewer cuts (of the axis with most, the last of them first).
    """
    least, most = CHUNK_BYTES
    chunk = [-(-n // CUTS) for n in shape]

    def size() -> int:
        return math.prod(chunk) * itemsize

    while size() < least and tuple(chunk) != shape:
        axis = max(range(len(shape)), key=lambda i: (-(-shape[i] // chunk[i]), i))
        chunk[axis] = min(2 * chunk[axis], shape[axis])
    while chunk[0] > 1 and (size() > most or chunk[0] * math.prod(shape[1:]) * itemsize > BAND_BYTES):
        chunk[0] = -(-chunk[0] // 2)
    while size() > most:  # of tensors with more than two axes
        axis = max(range(len(shape)), key=lambda i: chunk[i])
        chunk[axis] = -(-chunk[axis] // 2)
    return tuple(chunk)


def write_orbax(path: Path, targets: Mapping[str, Target], slabs: Iterable[Slab],
                written: Callable[[int], None]) -> None:
    """Writes an Orbax checkpoint at `path`, which must not exist.

    Args:
      targets: every tensor in the order of the slabs.
      written: told the bytes of each slab.
    """
    registry = ocp.type_handlers.create_type_handler_registry((Target, _SlabHandler(iter(slabs), written)))
    log = logging.getLogger("absl")
    log.addFilter(_errors)  # it warns that the registry has no jax.Array
    try:
        handler = ocp.PyTreeCheckpointHandler(use_compression=False, type_handler_registry=registry)
        with ocp.Checkpointer(handler) as checkpointer:
            checkpointer.save(path.absolute(), args=ocp.args.PyTreeSave(dict(targets)))
    finally:
        log.removeFilter(_errors)


def _errors(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.ERROR


class _SlabHandler(ocp.type_handlers.TypeHandler):
    """Writes described tensors from a stream of slabs, a transaction for every COMMIT_BYTES."""

    def __init__(self, slabs: Any, written: Callable[[int], None]):
        self._slabs = slabs
        self._written = written

    def typestr(self) -> str:
        return "np.ndarray"  # what a restore without a target makes of them

    async def metadata(self, infos: Sequence[Any]) -> Sequence[Any]:
        raise NotImplementedError("this handler only writes")

    async def deserialize(self, infos: Sequence[Any], args: Sequence[Any] | None = None) -> Sequence[Any]:
        raise NotImplementedError("this handler only writes")

    async def serialize(self, values: Sequence[Target], infos: Sequence[Any],
                        args: Sequence[Any] | None = None) -> Sequence[Any]:
        group = _Group()
        for target, info in zip(values, infos, strict=True):
            await info.await_path_creation()
            spec = ocp.type_handlers.get_json_tspec_write(
                info, use_ocdbt=info.is_ocdbt_checkpoint, global_shape=target.shape,
                local_shape=chunk_shape(target.shape, target.dtype.itemsize), dtype=target.dtype, process_index=0)
            row = 0
            while row < target.shape[0]:
                slab = next(self._slabs)
                assert (slab.name, slab.start) == (info.name, row)
                store = await ts.open(ts.Spec(spec), create=True, open=True, context=info.ts_context,
                                      transaction=group.transaction)
                row += len(slab.values)
                await store[slab.start:row].write(slab.values)
                self._written(slab.values.nbytes)
                await group.add(slab.values.nbytes)
        await group.commit()
        return []


@dataclasses.dataclass(slots=True)
class _Group:
    transaction: ts.Transaction = dataclasses.field(default_factory=ts.Transaction)
    nbytes: int = 0

    async def add(self, nbytes: int) -> None:
        self.nbytes += nbytes
        if self.nbytes >= COMMIT_BYTES:
            await self.commit()

    async def commit(self) -> None:
        await self.transaction.commit_async()
        self.transaction, self.nbytes = ts.Transaction(), 0
