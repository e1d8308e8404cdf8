"""The head of a GGUF file: metadata and tensor table, read without touching tensor data.

The `gguf` package's reader builds several NumPy views for every vocabulary entry, which takes seconds for a
49k-token vocabulary; this reader takes milliseconds. Layout: docs/gguf.md of the ggml project, versions 2
and 3.
"""

import mmap
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from jinfer.errors import CheckpointError

MAGIC = b"GGUF"
_STRING, _ARRAY = 8, 9
_SCALARS = {0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "|b1", 10: "<u8",
            11: "<i8", 12: "<f8"}
_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One row of the tensor table.

    Attributes:
      name: as stored (`blk.0.attn_q.weight`).
      shape: row-major, outermost axis first ([out, in] for a matrix).
      type_id: ggml type number.
      offset: first byte of the data, from the start of the file.
    """

    name: str
    shape: tuple[int, ...]
    type_id: int
    offset: int


@dataclass(frozen=True, slots=True)
class GgufHead:
    """Attributes:
    metadata: key -> int, float, bool, str or a list of them.
    tensors: name -> GgufTensor, in file order.
    file_size: bytes of the whole file.
    """

    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]
    file_size: int


def read_metadata(path: str | Path) -> dict[str, Any]:
    """Metadata of the GGUF file at `path` as plain Python values. CheckpointError if the file is broken."""
    return read_head(path).metadata


def read_head(path: str | Path) -> GgufHead:
    """Metadata and tensor table of the GGUF file at `path`. CheckpointError if the file is broken."""
    path = Path(path)
    try:
        with path.open("rb") as file:
            if file.read(4) != MAGIC:
                raise CheckpointError(f"{path}: not a GGUF file (bad magic)")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _Parser(data, path).head()
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from None


class _Parser:
    """A cursor over the mapped file; every read is checked against the end of the file."""

    def __init__(self, data: mmap.mmap, path: Path):
        self.data, self.path, self.size, self.at = data, path, len(data), 4

    def head(self) -> GgufHead:
        version = self.u32("version")
        if version & 0xFFFF == 0:
            self.fail("is a big-endian GGUF file; only little-endian files are supported")
        if version not in (2, 3):
            self.fail(f"has GGUF version {version}; versions 2 and 3 are supported")
        tensor_count, key_count = self.u64("tensor count"), self.u64("metadata count")
        metadata: dict[str, Any] = {}
        for _ in range(key_count):
            key = self.string("a metadata key")
            if key in metadata:
                self.fail(f"holds the metadata key {key!r} twice")
            metadata[key] = self.value(self.u32(key), key)
        table = [self.tensor() for _ in range(tensor_count)]
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            self.fail(f"general.alignment must be a power of two, got {alignment!r}")
        start = -(-self.at // alignment) * alignment
        tensors: dict[str, GgufTensor] = {}
        for name, shape, type_id, offset in table:
            if name in tensors:
                self.fail(f"holds the tensor {name!r} twice")
            tensors[name] = GgufTensor(name, shape, type_id, start + offset)
        return GgufHead(metadata, tensors, self.size)

    def tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self.string("a tensor name")
        rank = self.u32(name)
        if rank > 8:
            self.fail(f"tensor {name!r} has {rank} dimensions; the file is broken")
        shape = tuple(self.u64(name) for _ in range(rank))[::-1]  # stored innermost first
        return name, shape, self.u32(name), self.u64(name)

    def value(self, kind: int, key: str) -> Any:
        if kind == _STRING:
            return self.string(key)
        if kind == _ARRAY:
            return self.array(key)
        return self.scalars(kind, 1, key)[0]

    def array(self, key: str) -> list[Any]:
        kind, count = self.u32(key), self.u64(key)
        if kind in (_STRING, _ARRAY):
            self.need(count * 8, key)  # refuses an absurd count before looping
            read: Callable[[str], Any] = self.string if kind == _STRING else self.array
            return [read(key) for _ in range(count)]
        return self.scalars(kind, count, key)

    def scalars(self, kind: int, count: int, key: str) -> list[Any]:
        if kind not in _SCALARS:
            self.fail(f"metadata {key!r} has the unknown value type {kind}")
        dtype = np.dtype(_SCALARS[kind])
        self.need(count * dtype.itemsize, key)
        start, self.at = self.at, self.at + count * dtype.itemsize
        return np.frombuffer(self.data[start:self.at], dtype).tolist()

    def string(self, what: str) -> str:
        length = self.u64(what)
        self.need(length, what)
        start, self.at = self.at, self.at + length
        return self.data[start:self.at].decode("utf-8", "replace")

    def u32(self, what: str) -> int:
        self.need(4, what)
        self.at += 4
        return _U32.unpack_from(self.data, self.at - 4)[0]

    def u64(self, what: str) -> int:
        self.need(8, what)
        self.at += 8
        return _U64.unpack_from(self.data, self.at - 8)[0]

    def need(self, count: int, what: str) -> None:
        if self.at + count > self.size:
            self.fail(f"is truncated: it ends inside {what!r}")

    def fail(self, message: str) -> NoReturn:
        raise CheckpointError(f"{self.path}: {message}")
