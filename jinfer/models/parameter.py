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


def shifted(parameter: Parameter, offset: float) -> Parameter:
    """The parameter plus a constant (Gemma stores its norms' distance from one)."""
    return dataclasses.replace(
        parameter, read=lambda reader, index: parameter.read(reader, index).astype(np.float32) + np.float32(offset))


def padded_rows(name: str, shape: tuple[int, ...], rows: int, axes: tuple[str | None, ...]) -> Parameter:
    """A [rows, D] matrix whose rows past the checkpoint's are zero (a vocabulary padded to the mesh)."""

    def read(reader: Reader, index: Index) -> np.ndarray:
        start, stop = index[0].start, index[0].stop
        if start >= shape[0]:
            return np.zeros((stop - start, index[1].stop - index[1].start), np.float32)
        part = reader.read(name, (slice(start, min(stop, shape[0])), *index[1:]))
        return np.pad(part, ((0, stop - start - part.shape[0]), (0, 0)))

    return Parameter((rows, *shape[1:]), axes, {name: shape}, read)


@dataclasses.dataclass(frozen=True, slots=True)
class Rows:
    """Rows of a checkpoint tensor [total, ...], from `first` on: all of it, or its part of a fused projection."""

    name: str
    first: int
    total: int

    def read(self, reader: Reader, start: int, stop: int, tail: Index) -> np.ndarray:
        """Rows start:stop of the part."""
        return reader.read(self.name, (slice(self.first + start, self.first + stop), *tail))


def side_by_side(parts: tuple[Rows, ...], shape: tuple[int, ...], axes: tuple[str | None, ...],
                 cuts: int) -> Parameter:
    """Equal matrices [F, ...] as one [len(parts) * F, ...] that can be cut into `cuts` along F.

    Each cut holds its share of the first matrix, then of the second: [cuts, len(parts), F / cuts, ...], flat.
    A plain matrix: of [len(parts), F, ...] cut on F, XLA:GPU gathers all cuts before it multiplies.
    """
    share = shape[0] // cuts
    rows = len(parts) * share  # of one cut

    def read(reader: Reader, index: Index) -> np.ndarray:
        first, last = index[0].start // rows, -(-index[0].stop // rows)
        pieces = [part.read(reader, cut * share, (cut + 1) * share, index[1:])
                  for cut in range(first, last) for part in parts]
        return np.concatenate(pieces)[index[0].start - first * rows : index[0].stop - first * rows]

    return Parameter((cuts * rows, *shape[1:]), axes, {part.name: (part.total, *shape[1:]) for part in parts}, read)


def grouped_heads(q: Rows, k: Rows, v: Rows, *, num_heads: int, num_kv_heads: int, kv_heads: int, head_dim: int,
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
        pieces = []
        for head in range(first, last):
            source = head // repeat
            pieces += [part.read(reader, a * head_dim, b * head_dim, index[1:]) for part, a, b in
                       ((q, head * group, (head + 1) * group), (k, source, source + 1), (v, source, source + 1))]
        return np.concatenate(pieces)[index[0].start - first * rows : index[0].stop - first * rows]

    sources = {part.name: (part.total, *tail) for part in (q, k, v)}
    return Parameter((kv_heads * rows, *tail), ("kv_heads", *(None for _ in tail)), sources, read)


def repeated_heads(name: str, heads: int, kv_heads: int, group: int, head_dim: int) -> Parameter:
    """A vector [heads * H] with a value a lane of each head as [K, group, H], heads repeated up to K * group."""
    repeat = kv_heads * group // heads

    def read(reader: Reader, index: Index) -> np.ndarray:
        lanes = reader.read(name).reshape(heads, head_dim)
        return np.repeat(lanes, repeat, axis=0).reshape(kv_heads, group, head_dim)[index]

    return Parameter((kv_heads, group, head_dim), ("kv_heads", None, None), {name: (heads * head_dim,)}, read)


def half_split(parameter: Parameter, passed: int, rotated: int) -> Parameter:
    """Rows of heads, `passed` lanes and then `rotated` ones, for the rotation of lanes R/2 apart.

    The checkpoint keeps rotated lanes as neighbouring pairs (DeepSeek); scores do not change if queries and keys are
    reordered alike.
    """
    head_dim = passed + rotated

    def read(reader: Reader, index: Index) -> np.ndarray:
        first, last = index[0].start // head_dim, -(-index[0].stop // head_dim)  # whole heads
        heads = parameter.read(reader, (slice(first * head_dim, last * head_dim), *index[1:]))
        heads = heads.reshape(last - first, head_dim, *heads.shape[1:])
        lanes = np.concatenate([np.arange(passed), passed + np.arange(rotated).reshape(-1, 2).T.ravel()])
        rows = heads[:, lanes].reshape(-1, *heads.shape[2:])
        return rows[index[0].start - first * head_dim : index[0].stop - first * head_dim]

    return dataclasses.replace(parameter, read=read)


def head_rows(name: str, heads: int, stored: int, first: int, lanes: int, inputs: int, dtype: np.dtype) -> Parameter:
    """Lanes first : first + lanes of each head of a matrix [heads * stored, inputs]: [N, lanes, inputs]."""

    def read(reader: Reader, index: Index) -> np.ndarray:
        begin, end = index[0].start, index[0].stop
        rows = reader.read(name, (slice(begin * stored, end * stored), index[2]))
        return rows.reshape(end - begin, stored, -1)[:, first : first + lanes][:, index[1]]

    return Parameter((heads, lanes, inputs), ("kv_heads", None, None), {name: (heads * stored, inputs)}, read, dtype)
