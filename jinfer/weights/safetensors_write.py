"""Writer of safetensors checkpoints: header first, then the tensors as they come; shards of bounded size."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jinfer.weights.files import synced
from jinfer.weights.safetensors import INDEX, SINGLE
from jinfer.weights.slabs import Slab, Target

SHARD_BYTES = 5_000_000_000  # as large as the Hub's tools make them
ALIGNMENT = 64  # where the data begins: arrays over the mapped file can be used as they are
_TYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}


def safetensors_targets(shapes: Mapping[str, tuple[int, ...]], dtypes: Mapping[str, np.dtype]) -> dict[str, Target]:
    """In the order they must be written: wider types first, so that every tensor starts aligned."""
    order = sorted(shapes, key=lambda name: -dtypes[name].itemsize)
    return {name: Target(shapes[name], dtypes[name]) for name in order}


def write_safetensors(folder: Path, targets: Mapping[str, Target], slabs: Iterable[Slab],
                      written: Callable[[int], None], *, shard_bytes: int = SHARD_BYTES) -> None:
    """Writes model.safetensors, or shards of at most `shard_bytes` (or one tensor) and their index.

    Args:
      targets: every tensor in the order of the slabs.
      written: told the bytes of each slab.
    Raises OSError.
    """
    shards = list(_shards(targets, shard_bytes))
    names = [SINGLE] if len(shards) == 1 else [
        f"model-{i + 1:05}-of-{len(shards):05}.safetensors" for i in range(len(shards))]
    source = iter(slabs)
    for file_name, shard in zip(names, shards, strict=True):
        left = sum(targets[name].nbytes for name in shard)
        with synced(folder / file_name) as file:
            file.write(_header(targets, shard))
            while left:
                slab = next(source)
                file.write(slab.values.view(np.uint8).data)
                left -= slab.values.nbytes
                written(slab.values.nbytes)
    if len(shards) > 1:
        weight_map = {name: file for file, shard in zip(names, shards, strict=True) for name in shard}
        index = {"metadata": {"total_size": sum(t.nbytes for t in targets.values())}, "weight_map": weight_map}
        with synced(folder / INDEX) as file:
            file.write(json.dumps(index, indent=2).encode() + b"\n")


def _shards(targets: Mapping[str, Target], most: int) -> Iterator[list[str]]:
    shard: list[str] = []
    size = 0
    for name, target in targets.items():
        if shard and size + target.nbytes > most:
            yield shard
            shard, size = [], 0
        shard.append(name)
        size += target.nbytes
    yield shard


def _header(targets: Mapping[str, Target], names: list[str]) -> bytes:
    table: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # what transformers asks of a file
    offset = 0
    for name in names:
        target = targets[name]
        table[name] = {"dtype": _TYPES[target.dtype.name], "shape": list(target.shape),
                       "data_offsets": [offset, offset + target.nbytes]}
        offset += target.nbytes
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    return len(text).to_bytes(8, "little") + text
