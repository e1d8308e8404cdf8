"""Arrays cut on kv heads go from one mesh to another, device to device, whatever number of heads each has a copy of."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from jinfer.config import ModelConfig
from jinfer.sharding.layout import Layout

AXIS = 2  # of the heads in a block of pages, [n, L, K, S, H]


class Piece(NamedTuple):
    """Heads from `start` on, on one device."""

    start: int
    data: jax.Array


@dataclasses.dataclass(frozen=True, slots=True)
class HeadPlacement:
    """Where blocks of pages lie.

    Attributes:
      sharding: cuts AXIS, if anything. heads: K, copies included. kv_heads: different ones, the first K / kv_heads
        of K are copies of the first of them.
    """

    sharding: NamedSharding
    heads: int
    kv_heads: int

    @classmethod
    def of(cls, layout: Layout, model: ModelConfig) -> "HeadPlacement":
        """Of the KV pool of a model."""
        return cls(layout.sharding(*[None] * AXIS, "kv_heads"), layout.kv_heads(model), model.cache_heads)

    def shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Of a block here that has this shape elsewhere."""
        return (*shape[:AXIS], self.heads, *shape[AXIS + 1 :])

    def place(self, pieces: Sequence[Piece]) -> jax.Array:
        """An array here, of the pieces of one that may lie anywhere. Returns at once; nothing touches the host."""
        theirs = max(piece.start + piece.data.shape[AXIS] for piece in pieces)
        shape = self.shape(pieces[0].data.shape)
        shards = []
        for device, index in self.sharding.addressable_devices_indices_map(shape).items():
            assert index is not None
            first, stop, _ = index[AXIS].indices(self.heads)
            wanted = [head * self.kv_heads // self.heads * (theirs // self.kv_heads) for head in range(first, stop)]
            parts = [jax.device_put(part, device) for part in _cut(pieces, wanted)]
            shards.append(parts[0] if len(parts) == 1 else jnp.concatenate(parts, AXIS))
        return jax.make_array_from_single_device_arrays(shape, self.sharding, shards)


def pieces_of(x: jax.Array) -> list[Piece]:
    """What the devices of an array hold, the same heads once."""
    found: dict[int, jax.Array] = {}
    for shard in x.addressable_shards:
        start, _, _ = shard.index[AXIS].indices(x.shape[AXIS])
        found.setdefault(start, shard.data)
    return [Piece(start, data) for start, data in sorted(found.items())]


def _cut(pieces: Sequence[Piece], wanted: Sequence[int]) -> Iterator[jax.Array]:
    """The wanted heads in order, in as few parts as they lie on devices."""
    at = 0
    while at < len(wanted):
        start, data = next(piece for piece in reversed(pieces) if piece.start <= wanted[at])
        stop = at + 1
        while stop < len(wanted) and wanted[stop] == wanted[stop - 1] + 1 < start + data.shape[AXIS]:
            stop += 1
        first = wanted[at] - start
        whole = stop - at == data.shape[AXIS]
        yield data if whole else jax.lax.slice_in_dim(data, first, first + stop - at, axis=AXIS)
        at = stop
