"""Tensors of a GGUF file as stored: types, blocks, and just the asked rows and columns dequantised."""

import dataclasses
import math
from pathlib import Path

import ml_dtypes
import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from jinfer.errors import CheckpointError
from jinfer.weights.gguf_meta import GgufHead, GgufTensor

# Elements: the library takes 16 rows at a time, which of narrow matrices are few and mostly overhead.
DECODED_AT_ONCE = 1 << 17
_FLOATS: dict[str, type] = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}
_BLOCKS = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K", "MXFP4")


@dataclasses.dataclass(frozen=True, slots=True)
class Stored:
    """A vector or a matrix of the file.

    Attributes:
      shape: row-major. offset: first byte, from the start of the file.
      type: ggml type. block, block_bytes: elements and bytes of one of its blocks.
      heads: > 0: rows of q or k, stored for the interleaved rotation of this many heads.
      added: what the file adds to the values that Hugging Face stores; read takes it off.
    """

    shape: tuple[int, ...]
    offset: int
    type: GGMLQuantizationType
    block: int
    block_bytes: int
    heads: int = 0
    added: float = 0.0

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) // self.block * self.block_bytes

    @property
    def dtype(self) -> str:
        """`float32`, `float16`, `bfloat16` or `quantized`."""
        kind = _FLOATS.get(self.type.name)
        return "quantized" if kind is None else np.dtype(kind).name

    def unstacked(self) -> list["Stored"]:
        """The tensors stacked along the first axis, one by one."""
        parts, shape = self.shape[0], self.shape[1:]
        return [dataclasses.replace(self, shape=shape, offset=self.offset + i * (self.nbytes // parts))
                for i in range(parts)]

    def read(self, data: np.ndarray, index: tuple[slice, ...]) -> np.ndarray:
        """The part `index` (missing axes are whole) of a tensor in the file's bytes `data`.

        Float types as stored (a view of the file where it can be), float32 for block types.
        """
        raw = np.asarray(data[self.offset:self.offset + self.nbytes])
        if len(self.shape) != 2:  # norms and biases: small, read whole
            values = self._values(raw).reshape(self.shape)
            values = values[self._rows(np.arange(self.shape[0]))] if self.heads else values
            return (values.astype(np.float32) - np.float32(self.added) if self.added else values)[index]
        rows, columns = (*index, slice(None), slice(None))[:2]
        table = raw.reshape(self.shape[0], -1)
        table = table[self._rows(np.arange(self.shape[0])[rows]) if self.heads else rows]
        start, stop, step = columns.indices(self.shape[1])
        first, last = start // self.block, -(-stop // self.block)  # whole blocks that hold the columns
        values = self._values(table[:, first * self.block_bytes:last * self.block_bytes])
        return values[:, start - first * self.block:stop - first * self.block:step]

    def _rows(self, rows: np.ndarray) -> np.ndarray:
        """Where the file keeps the given rows of q or k.

        llama.cpp's converter interleaves the halves of each head, [2, H/2] -> [H/2, 2], so that the lanes of a
        rotation lie side by side; Hugging Face keeps them H/2 apart.
        """
        head_dim = self.shape[0] // self.heads
        head, lane = np.divmod(rows, head_dim)
        half, pair = np.divmod(lane, head_dim // 2)
        return head * head_dim + 2 * pair + half

    def _values(self, raw: np.ndarray) -> np.ndarray:
        """Bytes [..., blocks * block_bytes] -> values [..., blocks * block]; floats are viewed, not copied."""
        kind = _FLOATS.get(self.type.name)
        if kind is not None:
            return raw.view(kind)
        blocks = raw.reshape(-1, self.block_bytes)
        values = np.empty((len(blocks), self.block), np.float32)
        step = DECODED_AT_ONCE // self.block
        for i in range(0, len(blocks), step):
            part = blocks[i:i + step]
            values[i:i + step] = dequantize(part.reshape(1, -1), self.type).reshape(-1, self.block)
        return values.reshape(*raw.shape[:-1], -1)


def stored(path: Path, head: GgufHead, tensor: GgufTensor, *, heads: int = 0, added: float = 0.0) -> Stored:
    """The entry of a tensor; CheckpointError naming it for an unsupported type or data past the end."""
    known = {kind.value for kind in GGMLQuantizationType}
    kind = GGMLQuantizationType(tensor.type_id) if tensor.type_id in known else None
    if kind is None or kind.name not in (*_FLOATS, *_BLOCKS):
        name = f"number {tensor.type_id}" if kind is None else kind.name
        raise CheckpointError(f"{path}: tensor {tensor.name} has the unsupported type {name}; "
                              f"supported: {', '.join((*_FLOATS, *_BLOCKS))}")
    block, block_bytes = GGML_QUANT_SIZES[kind]
    if not tensor.shape or min(tensor.shape) < 1 or tensor.shape[-1] % block:
        raise CheckpointError(f"{path}: tensor {tensor.name} of shape {list(tensor.shape)} does not divide "
                              f"into {kind.name} blocks of {block}")
    if heads and tensor.shape[0] % (2 * heads):
        raise CheckpointError(f"{path}: tensor {tensor.name} has {tensor.shape[0]} rows, which are not "
                              f"{heads} heads of an even size")
    entry = Stored(tensor.shape, tensor.offset, kind, block, block_bytes, heads, added)
    if tensor.offset + entry.nbytes > head.file_size:
        raise CheckpointError(f"{path}: is truncated: tensor {tensor.name} ends at byte "
                              f"{tensor.offset + entry.nbytes} of a file of {head.file_size}")
    return entry
