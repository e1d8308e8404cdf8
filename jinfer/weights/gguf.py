"""Reader of GGUF files under Hugging Face names: just the asked rows and blocks are dequantised."""

from pathlib import Path
from typing import Protocol

import numpy as np

from jinfer.errors import CheckpointError
from jinfer.weights.gguf_blocks import Stored, stored
from jinfer.weights.gguf_experts import FUSED, Fused
from jinfer.weights.gguf_meta import GgufHead
from jinfer.weights.gguf_names import NAMES, Names, part_of

ROPE_FACTORS = {"rope_freqs.weight": "all", "rope_factors_short.weight": "short", "rope_factors_long.weight": "long"}


class _View(Protocol):
    """A Hugging Face tensor over one or more of the file's."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def dtype(self) -> str: ...
    def read(self, data: np.ndarray, index: tuple[slice, ...]) -> np.ndarray: ...


class GgufReader:
    """Tensors of a GGUF file of a supported architecture, as Hugging Face names, orders and scales them.

    Thread safe. Names that are none of the architecture's are kept as stored, so that a loader sees and refuses
    them. Raises CheckpointError naming the tensor for an unsupported type or data past the end of the file.
    """

    def __init__(self, path: Path, head: GgufHead):
        self._path = path
        self._entries: dict[str, _View] = {}
        self._factors: dict[str, Stored] = {}
        self._add_all(head)
        self._data = np.memmap(path, np.uint8, mode="r")

    def names(self) -> list[str]:
        """Hugging Face names, without the rope factors (`rope_factors`)."""
        return list(self._entries)

    def rope_factors(self) -> dict[str, np.ndarray]:
        """`all`, `short`, `long` -> [R/2] float32: divisors of the plain inverse frequencies, where stored."""
        return {name: entry.read(self._data, ()).astype(np.float32) for name, entry in self._factors.items()}

    def shape(self, name: str) -> tuple[int, ...]:
        return self._entry(name).shape

    def read(self, name: str, index: tuple[slice, ...] = ()) -> np.ndarray:
        """The part `index` (missing axes are whole); float types as stored, float32 for block types."""
        return self._entry(name).read(self._data, index)

    def nbytes(self) -> int:
        return sum(self.bytes_by_dtype().values())

    def bytes_by_dtype(self) -> dict[str, int]:
        """Bytes stored as `float32`, `float16`, `bfloat16` and `quantized`."""
        total: dict[str, int] = {}
        for entry in self._entries.values():
            total[entry.dtype] = total.get(entry.dtype, 0) + entry.nbytes
        return total

    def _entry(self, name: str) -> _View:
        if name not in self._entries:
            raise CheckpointError(f"tensor {name} is missing from {self._path}")
        return self._entries[name]

    def _add_all(self, head: GgufHead) -> None:
        architecture = head.metadata.get("general.architecture")
        names = _names(head)
        heads = {"attn_q": _heads(head, "head_count"), "attn_k": _heads(head, "head_count_kv")}
        heads["attn_k"] = heads["attn_k"] or heads["attn_q"]
        for tensor in head.tensors.values():
            part = part_of(names, tensor.name)
            permuted = heads[part.part] if part.part in names.permuted else 0
            is_norm = part.name.endswith("norm.weight")
            entry = stored(self._path, head, tensor, heads=permuted, added=names.norms_added if is_norm else 0.0)
            if tensor.name in ROPE_FACTORS:
                self._factors[ROPE_FACTORS[tensor.name]] = entry
            elif part.stacked:
                for i, one in enumerate(entry.unstacked()):
                    self._add(part.name.format(i), one)
            else:
                self._add(part.name, entry)
        if architecture == "gpt-oss":
            self._fuse(int(head.metadata.get("gpt-oss.block_count", 0)))

    def _add(self, name: str, entry: _View) -> None:
        if name in self._entries:
            raise CheckpointError(f"{self._path}: tensor {name} is stored twice, stacked and alone")
        self._entries[name] = entry

    def _fuse(self, layers: int) -> None:
        for layer in range(layers):
            for name, (kind, parts) in FUSED.items():
                sources = [self._entries.pop(f"blk.{layer}.{part}.{kind}", None) for part in parts]
                found = tuple(source for source in sources if isinstance(source, Stored))
                if len(found) != len(parts) or len({part.shape for part in found}) != 1:
                    raise CheckpointError(f"{self._path}: tensors blk.{layer}.{'|'.join(parts)}.{kind} are missing "
                                          "or differ in shape")
                self._add(f"model.layers.{layer}.{name}", Fused(found))


def _names(head: GgufHead) -> Names:
    """Names of the file's architecture; of llama if it has another one, which the configuration refuses."""
    architecture = head.metadata.get("general.architecture")
    if architecture == "llama" and head.metadata.get("llama.expert_count"):
        return NAMES["mixtral"]
    return NAMES.get(str(architecture), NAMES["llama"])


def _heads(head: GgufHead, key: str) -> int:
    value = head.metadata.get(f"llama.attention.{key}", 0)
    if isinstance(value, list) and len(set(value)) == 1:
        value = value[0]  # a value a layer, all the same
    return value if isinstance(value, int) and not isinstance(value, bool) else 0
