"""Lazy reader of safetensors checkpoints: one file, or shards named by model.safetensors.index.json."""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from jinfer.errors import CheckpointError

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_DTYPES: dict[str, type] = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}
_PACKED: dict[str, type] = {"U8": np.uint8, "F8_E4M3": ml_dtypes.float8_e4m3fn}
_LFS = b"version https://git-lfs"
_BUFFER = re.compile(r"(^|\.)rotary_emb\.inv_freq$")


@dataclass(frozen=True, slots=True)
class _Entry:
    array: np.ndarray  # over the mapped file
    type: str


class SafetensorsReader:
    """Tensors of a Hugging Face folder by their stored names; only what is asked for is read. Thread safe.

    packed: bytes and 8-bit floats (E4M3) are welcome too. ignored: prefixes of tensors that are not shown.
    renamed: prefixes that are shown as others.

    Raises CheckpointError naming the file or tensor for a missing or truncated file, an index that names a
    tensor its shard lacks, or a stored type other than float32, float16 and bfloat16.
    """

    def __init__(self, folder: Path, *, packed: bool = False, ignored: tuple[str, ...] = (),
                 renamed: tuple[tuple[str, str], ...] = ()):
        self._types = _DTYPES | (_PACKED if packed else {})
        self._ignored, self._renamed = ignored, renamed
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
        return self._entry(name).array.shape

    def stored_type(self, name: str) -> str:
        """Its type in words of the format: `F32`, `F8_E4M3`, ..."""
        return self._entry(name).type

    def read(self, name: str, index: tuple[slice, ...] = ()) -> np.ndarray:
        """The part `index` (missing axes are whole) in the stored dtype: a view of the mapped file."""
        return self._entry(name).array[index]

    def nbytes(self) -> int:
        return sum(self.bytes_by_dtype().values())

    def bytes_by_dtype(self) -> dict[str, int]:
        """Bytes stored in each dtype (`float32`, `float16`, `bfloat16`, `quantized`)."""
        total: dict[str, int] = {}
        for entry in self._entries.values():
            dtype = entry.array.dtype.name if entry.type in _DTYPES else "quantized"
            total[dtype] = total.get(dtype, 0) + entry.array.nbytes
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
            path.open("rb").close()  # the library calls a file that may not be read missing
            with safe_open(str(path), framework="numpy"):  # checks header, offsets and length of the file
                header, data = _map(path)
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from None
        except SafetensorError as error:
            with path.open("rb") as file:
                if file.read(len(_LFS)) == _LFS:
                    raise CheckpointError(f"{path}: is a pointer of Git LFS, not the weights; fetch them with "
                                          "`git lfs pull`") from None
            raise CheckpointError(f"{path}: broken or truncated safetensors file: {error}") from None
        for name in sorted(header):
            kind, shape, (start, stop) = (header[name][key] for key in ("dtype", "shape", "data_offsets"))
            if name.startswith(self._ignored):
                continue
            if kind not in self._types:
                raise CheckpointError(f"{path}: tensor {name} has the unsupported type {kind}")
            shown = next((new + name.removeprefix(old) for old, new in self._renamed if name.startswith(old)), name)
            if shown in self._entries or shown in self._buffers:
                raise CheckpointError(f"{path}: tensor {name} is stored twice")
            entry = _Entry(data[start:stop].view(self._types[kind]).reshape(shape), kind)
            (self._buffers if _BUFFER.search(shown) else self._entries)[shown] = entry
        return set(header)


def _map(path: Path) -> tuple[dict[str, dict[str, Any]], np.ndarray]:
    """Tensor table and data of a sound file, mapped: the library's own slices are copies.

    Format: the header's length in 8 bytes, the header as JSON, the data.
    """
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    header.pop("__metadata__", None)
    if path.stat().st_size == 8 + length:
        return header, np.empty(0, np.uint8)  # an empty range cannot be mapped
    return header, np.asarray(np.memmap(path, np.uint8, "r", 8 + length))
