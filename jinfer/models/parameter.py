"""Parameter: the shape, sharding and source of one weight. A model is a list of them."""

import dataclasses
from collections.abc import Callable
from typing import Protocol, Self

import ml_dtypes
import numpy as np

Index = tuple[slice, ...]
FLOAT32 = np.dtype(np.float32)


class Reader(Protocol):
    """What a parameter needs of a checkpoint (jinfer.weights.TensorReader)."""

    def shape(self, name: str) -> tuple[int, ...]: ...

    def read(self, name: str, index: Index = ()) -> np.ndarray: ...


@dataclasses.dataclass(frozen=True, slots=True)
class Parameter:
    """Attributes:
      shape: global shape, in the orientation [out..., in] of checkpoints.
      axes: a logical axis or None for each dimension.
      sources: checkpoint tensors it is assembled from, with the shape each must have.
      read: assembles the part `index` (one slice a dimension, all bounded) of this parameter; reads no more
        of the sources than it needs.
      dtype: of the array on the device; the loader converts.
    """

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    sources: dict[str, tuple[int, ...]]
    read: Callable[[Reader, Index], np.ndarray]
    dtype: np.dtype = FLOAT32

    def __post_init__(self) -> None:
        assert len(self.shape) == len(self.axes), (self.shape, self.axes)


@dataclasses.dataclass(frozen=True, slots=True)
class Precision:
    """How matrices are stored and multiplied.

    Attributes:
      activation_dtype: of the residual stream. weight_dtype: of matrices; int8 adds a scale per output channel.
      inputs_first: matrices lie [*in, *out] on the device instead of [*out, *in].
    """

    activation_dtype: np.dtype
    weight_dtype: np.dtype
    inputs_first: bool

    @classmethod
    def of(cls, dtype: str, quantization: str | None) -> Self:
        """From the names of EngineConfig, `auto` already resolved."""
        activations = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
        weights = np.dtype(np.int8) if quantization == "int8" else activations
        return cls(activations, weights, inputs_first=weights == np.float32)

    def rows_first(self) -> Self:
        return dataclasses.replace(self, inputs_first=False)


def plain(name: str, shape: tuple[int, ...], axes: tuple[str | None, ...]) -> Parameter:
    """A parameter that is one checkpoint tensor as it stands."""
    return Parameter(shape, axes, {name: shape}, lambda reader, index: reader.read(name, index))


def padded_rows(name: str, shape: tuple[int, ...], rows: int, axes: tuple[str | None, ...]) -> Parameter:
    """A [rows, D] matrix whose rows past the checkpoint's are zero (a vocabulary padded to the mesh)."""

    def read(reader: Reader, index: Index) -> np.ndarray:
        start, stop = index[0].start, index[0].stop
        if start >= shape[0]:
            return np.zeros((stop - start, index[1].stop - index[1].start), np.float32)
        part = reader.read(name, (slice(start, min(stop, shape[0])), *index[1:]))
        return np.pad(part, ((0, stop - start - part.shape[0]), (0, 0)))

    return Parameter((rows, *shape[1:]), axes, {name: shape}, read)


def side_by_side(names: tuple[str, ...], shape: tuple[int, ...], axes: tuple[str | None, ...],
                 parts: int) -> Parameter:
    """Equal tensors [F, ...] as one [len(names) * F, ...] that can be cut into `parts` along F.

    Each part holds its share of the first tensor, then of the second: [parts, len(names), F / parts, ...], flat.
    A plain matrix: of [len(names), F, ...] cut on F, XLA:GPU gathers all parts before it multiplies.
    """
    share = shape[0] // parts
    rows = len(names) * share  # of one part

    def read(reader: Reader, index: Index) -> np.ndarray:
        first, last = index[0].start // rows, -(-index[0].stop // rows)
        pieces = [reader.read(name, (slice(part * share, (part + 1) * share), *index[1:]))
                  for part in range(first, last) for name in names]
        return np.concatenate(pieces)[index[0].start - first * rows : index[0].stop - first * rows]

    return Parameter((parts * rows, *shape[1:]), axes, dict.fromkeys(names, shape), read)


def grouped_heads(q: str, k: str, v: str, *, num_heads: int, num_kv_heads: int, kv_heads: int, head_dim: int,
                  tail: tuple[int, ...]) -> Parameter:
    """Query, key and value projections fused by kv head: [K * (G + 2) * H, *tail].

    Group g holds the query heads that use kv head g, then its key, then its value, so that cutting K cuts
    all three alike. `kv_heads` may be a multiple of the checkpoint's `num_kv_heads`: heads are then repeated.
    `tail` is (D,) for weights and () for biases. A plain matrix: with axes of its own for K, G and H, XLA:TPU
    lays the weight out anew in every call.
    """
    group = num_heads // kv_heads
    repeat = kv_heads // num_kv_heads
    rows = (group + 2) * head_dim  # of one kv head

    def read(reader: Reader, index: Index) -> np.ndarray:
        first, last = index[0].start // rows, -(-index[0].stop // rows)
        parts = []
        for head in range(first, last):
            source = head // repeat
            parts += [reader.read(name, (slice(a * head_dim, b * head_dim), *index[1:])) for name, a, b in
                      ((q, head * group, (head + 1) * group), (k, source, source + 1), (v, source, source + 1))]
        return np.concatenate(parts)[index[0].start - first * rows : index[0].stop - first * rows]

    keys = (num_kv_heads * head_dim, *tail)
    sources = {q: (num_heads * head_dim, *tail), k: keys, v: keys}
    return Parameter((kv_heads * rows, *tail), ("kv_heads", *(None for _ in tail)), sources, read)
