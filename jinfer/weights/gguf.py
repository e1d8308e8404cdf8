"""Reader of GGUF files under Hugging Face llama names: just the asked rows and blocks are dequantised."""

import math
import re
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from jinfer.errors import CheckpointError
from jinfer.weights.gguf_meta import GgufHead, GgufTensor

_FLOATS: dict[str, type] = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}
_BLOCKS = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K")
_WHOLE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER = {
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}
_BLOCK_NAME = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
ROPE_FACTORS = "rope_freqs.weight"


@dataclass(frozen=True, slots=True)
class _Stored:
    tensor: GgufTensor
    type: GGMLQuantizationType
    block: int  # elements of a block
    block_bytes: int
    heads: int  # > 0: q or k, whose rows are stored for the interleaved rotation of this many heads

    @property
    def nbytes(self) -> int:
        return math.prod(self.tensor.shape) // self.block * self.block_bytes


class GgufReader:
    """Tensors of a llama-architecture GGUF file. Thread safe.

    Names that are no llama tensor are kept as stored, so that a loader sees and refuses them. Raises
    CheckpointError naming the tensor for an unsupported type or data past the end of the file.
    """

    def __init__(self, path: Path, head: GgufHead):
        self._path = path
        self._entries: dict[str, _Stored] = {}
        self._factors: _Stored | None = None
        heads = {"attn_q": _heads(head, "head_count"), "attn_k": _heads(head, "head_count_kv")}
        heads["attn_k"] = heads["attn_k"] or heads["attn_q"]
        for tensor in head.tensors.values():
            match = _BLOCK_NAME.fullmatch(tensor.name)
            stored = _check(path, head, tensor, heads.get(match[2], 0) if match else 0)
            if tensor.name == ROPE_FACTORS:
                self._factors = stored
            else:
                self._entries[hf_name(tensor.name)] = stored
        self._data = np.memmap(path, np.uint8, mode="r")

    def names(self) -> list[str]:
        """Hugging Face names, without the rope factors (`rope_factors`)."""
        return list(self._entries)

    def rope_factors(self) -> np.ndarray | None:
        """[R/2] float32: what llama.cpp divides the plain inverse frequencies by; None if not stored."""
        return None if self._factors is None else self._read(self._factors, ()).astype(np.float32)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._entry(name).tensor.shape

    def read(self, name: str, index: tuple[slice, ...] = ()) -> np.ndarray:
        """The part `index` (missing axes are whole); float types as stored, float32 for block types."""
        return self._read(self._entry(name), index)

    def nbytes(self) -> int:
        return sum(entry.nbytes for entry in self._entries.values())

    def bytes_by_dtype(self) -> dict[str, int]:
        """Bytes stored as `float32`, `float16`, `bfloat16` and `quantized`."""
        total: dict[str, int] = {}
        for entry in self._entries.values():
            kind = _FLOATS.get(entry.type.name)
            dtype = "quantized" if kind is None else np.dtype(kind).name
            total[dtype] = total.get(dtype, 0) + entry.nbytes
        return total

    def _entry(self, name: str) -> _Stored:
        if name not in self._entries:
            raise CheckpointError(f"tensor {name} is missing from {self._path}")
        return self._entries[name]

    def _read(self, entry: _Stored, index: tuple[slice, ...]) -> np.ndarray:
        shape, start = entry.tensor.shape, entry.tensor.offset
        raw = np.asarray(self._data[start:start + entry.nbytes])
        if len(shape) != 2:  # norms and biases: small, read whole
            values = _values(raw, entry).reshape(shape)
            return (values[_stored_rows(np.arange(shape[0]), entry)] if entry.heads else values)[index]
        rows, columns = (*index, slice(None), slice(None))[:2]
        table = raw.reshape(shape[0], -1)
        table = table[_stored_rows(np.arange(shape[0])[rows], entry) if entry.heads else rows]
        start, stop, step = columns.indices(shape[1])
        first, last = start // entry.block, -(-stop // entry.block)  # whole blocks that hold the columns
        values = _values(table[:, first * entry.block_bytes:last * entry.block_bytes], entry)
        return values[:, start - first * entry.block:stop - first * entry.block:step]


def hf_name(name: str) -> str:
    """`blk.0.attn_q.weight` -> `model.layers.0.self_attn.q_proj.weight`; an unknown name stays as it is."""
    match = _BLOCK_NAME.fullmatch(name)
    if match and match[2] in _LAYER:
        return f"model.layers.{match[1]}.{_LAYER[match[2]]}.{match[3]}"
    stem, _, kind = name.rpartition(".")
    return f"{_WHOLE[stem]}.{kind}" if stem in _WHOLE else name


def _stored_rows(rows: np.ndarray, entry: _Stored) -> np.ndarray:
    """Where the file keeps the given rows of q or k.

    llama.cpp's converter interleaves the halves of each head, [2, H/2] -> [H/2, 2], so that the lanes of a
    rotation lie side by side; Hugging Face keeps them H/2 apart.
    """
    head_dim = entry.tensor.shape[0] // entry.heads
    head, lane = np.divmod(rows, head_dim)
    half, pair = np.divmod(lane, head_dim // 2)
    return head * head_dim + 2 * pair + half


def _values(raw: np.ndarray, entry: _Stored) -> np.ndarray:
    """Bytes [..., blocks * block_bytes] -> values [..., blocks * block]; floats are viewed, not copied."""
    kind = _FLOATS.get(entry.type.name)
    return dequantize(raw, entry.type) if kind is None else raw.view(kind)


def _heads(head: GgufHead, key: str) -> int:
    value = head.metadata.get(f"llama.attention.{key}", 0)
    return value if isinstance(value, int) and not isinstance(value, bool) else 0


def _check(path: Path, head: GgufHead, tensor: GgufTensor, heads: int) -> _Stored:
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
    stored = _Stored(tensor, kind, block, block_bytes, heads)
    if tensor.offset + stored.nbytes > head.file_size:
        raise CheckpointError(f"{path}: is truncated: tensor {tensor.name} ends at byte "
                              f"{tensor.offset + stored.nbytes} of a file of {head.file_size}")
    return stored
