"""Packed weights of safetensors checkpoints, decoded as they are read and shown under their plain names."""

from collections.abc import Mapping

import numpy as np

from jinfer.errors import CheckpointError
from jinfer.weights.hf_storage import Packing
from jinfer.weights.safetensors import SafetensorsReader

MX_BLOCK = 32  # values that share an exponent
_BLOCKS, _SCALES, _FP8_SCALE = "_blocks", "_scales", "_scale_inv"
_E2M1 = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], np.float32)
_FP4 = np.concatenate([_E2M1, -_E2M1])
_PLAIN = ("F32", "F16", "BF16")
Index = tuple[slice, ...]


class Mxfp4Reader:
    """Shows `X_blocks` [E, out, in / 32, 16] and `X_scales` [E, out, in / 32], uint8 both, as X [E, in, out] float32.

    A byte holds two four-bit floats (E2M1), the even one in its low half; a block's scale is 2 ** (byte - 127)
    (OCP Microscaling Formats 1.0). Only the blocks that a part touches are read. Thread safe.

    Raises CheckpointError naming the tensor for blocks without scales, scales without blocks, or shapes that do
    not belong together.
    """

    def __init__(self, inner: SafetensorsReader):
        self._inner = inner
        stored = set(inner.names())
        self._packed = {name.removesuffix(_BLOCKS) for name in stored if name.endswith(_BLOCKS)}
        for name in stored:
            for kind, partner in ((_BLOCKS, _SCALES), (_SCALES, _BLOCKS)):
                if name.endswith(kind) and name.removesuffix(kind) + partner not in stored:
                    raise CheckpointError(f"tensor {name}: has no {name.removesuffix(kind)}{partner}")
        for name in self._packed:
            blocks, scales = inner.shape(name + _BLOCKS), inner.shape(name + _SCALES)
            if len(blocks) != 4 or blocks[3] != MX_BLOCK // 2 or blocks[:3] != scales:
                raise CheckpointError(f"tensor {name}{_BLOCKS}: shapes {blocks} and {scales} are not MXFP4")
        pairs = {name + kind for name in self._packed for kind in (_BLOCKS, _SCALES)}
        _check_types(inner, {name: ("U8",) if name in pairs else _PLAIN for name in stored})

    def names(self) -> list[str]:
        stored = self._inner.names()
        return [n for n in stored if not n.endswith((_BLOCKS, _SCALES))] + sorted(self._packed)

    def shape(self, name: str) -> tuple[int, ...]:
        if name not in self._packed:
            return self._inner.shape(name)
        experts, rows, blocks, _ = self._inner.shape(name + _BLOCKS)
        return experts, blocks * MX_BLOCK, rows

    def read(self, name: str, index: Index = ()) -> np.ndarray:
        if name not in self._packed:
            return self._inner.read(name, index)
        experts, columns, rows = _bounds(index, self.shape(name))
        first, last = columns.start // MX_BLOCK, -(-columns.stop // MX_BLOCK)
        part = (experts, rows, slice(first, last))
        values = decode_mxfp4(self._inner.read(name + _BLOCKS, part), self._inner.read(name + _SCALES, part))
        values = values[:, :, columns.start - first * MX_BLOCK : columns.stop - first * MX_BLOCK]
        return values.swapaxes(1, 2)

    def nbytes(self) -> int:
        return self._inner.nbytes()

    def bytes_by_dtype(self) -> dict[str, int]:
        return self._inner.bytes_by_dtype()


class Fp8Reader:
    """Shows 8-bit floats [out, in] times the scale of their block of rows and columns (`X_scale_inv`) as float32.

    Tensors of other types are shown as stored. Only what a part touches is read. Thread safe.

    Raises CheckpointError naming the tensor for 8-bit floats without scales, scales of nothing, or scales of
    another shape than the block size gives.
    """

    def __init__(self, inner: SafetensorsReader, block: tuple[int, int]):
        self._inner, self._block = inner, block
        stored = set(inner.names())
        self._packed = {name for name in stored if inner.stored_type(name) == "F8_E4M3"}
        for name in self._packed:
            if name + _FP8_SCALE not in stored:
                raise CheckpointError(f"tensor {name}: has no {name}{_FP8_SCALE}")
            shape, scales = inner.shape(name), inner.shape(name + _FP8_SCALE)
            if len(shape) != 2 or scales != tuple(-(-n // b) for n, b in zip(shape, block, strict=True)):
                raise CheckpointError(f"tensor {name}{_FP8_SCALE}: shape {scales} does not fit {shape} "
                                      f"in blocks of {block}")
        self._scales = {name + _FP8_SCALE for name in self._packed}
        _check_types(inner, dict.fromkeys(stored - self._packed, _PLAIN))

    def names(self) -> list[str]:
        return [name for name in self._inner.names() if name not in self._scales]

    def shape(self, name: str) -> tuple[int, ...]:
        return self._inner.shape(name)

    def read(self, name: str, index: Index = ()) -> np.ndarray:
        if name not in self._packed:
            return self._inner.read(name, index)
        bounds = _bounds(index, self.shape(name))
        touched = tuple(slice(part.start // size, -(-part.stop // size))
                        for part, size in zip(bounds, self._block, strict=True))
        scales = self._inner.read(name + _FP8_SCALE, touched).astype(np.float32)
        for axis, (part, size) in enumerate(zip(bounds, self._block, strict=True)):
            scales = scales.take(np.arange(part.start, part.stop) // size - touched[axis].start, axis)
        return self._inner.read(name, bounds).astype(np.float32) * scales

    def nbytes(self) -> int:
        return self._inner.nbytes()

    def bytes_by_dtype(self) -> dict[str, int]:
        return self._inner.bytes_by_dtype()


def decode_mxfp4(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """blocks [..., n, 16] uint8, scales [..., n] uint8 -> [..., n * 32] float32."""
    halves = np.stack([blocks & 0x0F, blocks >> 4], axis=-1)  # [..., n, 16, 2]: low half first
    values = np.ldexp(_FP4[halves], scales.astype(np.int32)[..., None, None] - 127)
    return values.reshape(*blocks.shape[:-2], blocks.shape[-2] * MX_BLOCK)


def unpacked(stored: SafetensorsReader, packing: Packing | None) -> SafetensorsReader | Mxfp4Reader | Fp8Reader:
    """What a model reads of the stored tensors."""
    if packing is None:
        return stored
    return Mxfp4Reader(stored) if packing.kind == "mxfp4" else Fp8Reader(stored, packing.block)


def _check_types(stored: SafetensorsReader, wanted: Mapping[str, tuple[str, ...]]) -> None:
    """Bytes and 8-bit floats that are no part of a packed weight would pass for numbers."""
    for name, types in wanted.items():
        if stored.stored_type(name) not in types:
            raise CheckpointError(f"tensor {name} has the unsupported type {stored.stored_type(name)}")


def _bounds(index: Index, shape: tuple[int, ...]) -> tuple[slice, ...]:
    """`index` with every axis given and every end known."""
    whole = index + (slice(None),) * (len(shape) - len(index))
    return tuple(slice(*part.indices(n)[:2]) for part, n in zip(whole, shape, strict=True))
