"""Lazy reader of safetensors checkpoints: one file, or shards named by model.safetensors.index.json."""

import json
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from jinfer.errors import CheckpointError

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_DTYPES = {"F32": ("float32", 4), "F16": ("float16", 2), "BF16": ("bfloat16", 2)}
_BUFFER = re.compile(r"(^|\.)rotary_emb\.inv_freq$")


@dataclass(frozen=True, slots=True)
class _Entry:
    file: Any  # safetensors handle over a mapped file
    shape: tuple[int, ...]
    dtype: str


class SafetensorsReader:
    """Tensors of a Hugging Face folder by their stored names; only what is asked for is read. Thread safe.

    Raises CheckpointError naming the file or tensor for a missing or truncated file, an index that names a
    tensor its shard lacks, or a stored type other than float32, float16 and bfloat16.
    """

    def __init__(self, folder: Path):
        self._entries: dict[str, _Entry] = {}
        self._buffers: dict[str, _Entry] = {}
        if (folder / SINGLE).exists():
            self._add(folder / SINGLE)
        elif (folder / INDEX).exists():
            self._add_shards(folder)
        else:
            hint = " (PyTorch .bin files are not read)" if list(folder.glob("*.bin")) else ""
            raise CheckpointError(f"{folder}: holds neither {SINGLE} nor {INDEX}{hint}")

    def names(self) -> list[str]:
        """Stored names, without the rotary tables of old checkpoints."""
        return list(self._entries)

    def buffers(self) -> list[str]:
        """Names of stored rotary tables: to be compared with the configuration, never loaded."""
        return list(self._buffers)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._entry(name).shape

    def read(self, name: str, index: tuple[slice, ...] = ()) -> np.ndarray:
        """The part `index` (missing axes are whole) in the stored dtype."""
        entry = self._entry(name)
        try:
            part = entry.file.get_slice(name)[index] if index else entry.file.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"tensor {name}: cannot be read: {error}") from None
        return part

    def nbytes(self) -> int:
        return sum(self.bytes_by_dtype().values())

    def bytes_by_dtype(self) -> dict[str, int]:
        """Bytes stored in each dtype (`float32`, `float16`, `bfloat16`)."""
        total: dict[str, int] = {}
        for entry in self._entries.values():
            dtype, size = _DTYPES[entry.dtype]
            total[dtype] = total.get(dtype, 0) + math.prod(entry.shape) * size
        return total

    def _entry(self, name: str) -> _Entry:
        entry = self._entries.get(name) or self._buffers.get(name)
        if entry is None:
            raise CheckpointError(f"tensor {name} is missing from the checkpoint")
        return entry

    def _add_shards(self, folder: Path) -> None:
        try:
            weight_map = json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"]
            shards = sorted(set(weight_map.values()))
            plain = all(Path(shard).name == shard for shard in shards)  # no way out of the folder
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            plain = False
        if not plain:
            raise CheckpointError(f"{folder / INDEX}: is not a safetensors index")
        for shard in shards:
            if not (folder / shard).exists():
                raise CheckpointError(f"{folder / shard}: shard named by {INDEX} is missing")
            found = self._add(folder / shard)
            for name, home in weight_map.items():
                if home == shard and name not in found:
                    raise CheckpointError(f"{folder / shard}: lacks tensor {name}, which {INDEX} lists")

    def _add(self, path: Path) -> set[str]:
        try:
            file = safe_open(str(path), framework="numpy")
            found = set(file.keys())
            for name in sorted(found):
                part = file.get_slice(name)
                entry = _Entry(file, tuple(part.get_shape()), part.get_dtype())
                if entry.dtype not in _DTYPES:
                    raise CheckpointError(f"{path}: tensor {name} has the unsupported type {entry.dtype}")
                if name in self._entries or name in self._buffers:
                    raise CheckpointError(f"{path}: tensor {name} is stored in two shards")
                (self._buffers if _BUFFER.search(name) else self._entries)[name] = entry
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{path}: broken or truncated safetensors file: {error}") from None
        return found
