"""PageMoves: programs that move whole pages within the pool, out of it and into it."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jinfer.config import ModelConfig
from jinfer.engine.packing import Packing
from jinfer.kv.groups import page_groups
from jinfer.models.context import KVPages, KVPools

COPIES = 64  # copies of each group that one call can make; it takes as long as those it is told
BLOCKS = (1, 8)  # pages one call gathers or scatters; more pages are more calls, none is padded


class CopyFields(NamedTuple):
    """Upload of page copies: counts [G]; sources, targets [G, n], of which the first counts[g] are made, in order."""

    counts: jax.Array
    sources: jax.Array
    targets: jax.Array


class BlockFields(NamedTuple):
    """Upload of a gather or a scatter: pages [n], in the order of the block."""

    pages: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True)
class Payload:
    """KV pages outside a pool, as one engine hands them to another (`Runner.export`, `Runner.place`).

    A pytree of device arrays: jax.device_put takes it to another mesh.

    Attributes:
      blocks: of each page group, blocks of pages: KVPages of [n, L, K, S, H] (scales [n, L, K, S]), L the group's
        layers, sharded on K.
      places: of each block, where its n pages stand among those of the request, in order of position.
    """

    blocks: tuple[tuple[KVPages, ...], ...]
    places: tuple[tuple[tuple[int, ...], ...], ...] = dataclasses.field(metadata={"static": True})

    @property
    def nbytes(self) -> int:
        """Of all devices together."""
        return sum(x.nbytes for x in jax.tree.leaves(self.blocks))


@dataclasses.dataclass(frozen=True, slots=True)
class PageMoves:
    """The functions to compile. A page is its K, S, H in all layers of its group.

    They slice page by page and update the donated pool in a loop: XLA does that in place on every platform, where a
    gather or a scatter of many pages would lay the pool out anew on a TPU.

    Attributes:
      layers: L of each page group.
    """

    layers: tuple[int, ...]

    @classmethod
    def of(cls, config: ModelConfig) -> "PageMoves":
        return cls(tuple(len(group.layers) for group in page_groups(config.layer_kinds)))

    def copy_packing(self, count: int) -> Packing[CopyFields]:
        groups = len(self.layers)
        return Packing(CopyFields, counts=(groups,), sources=(groups, count), targets=(groups, count))

    def block_packing(self, count: int) -> Packing[BlockFields]:
        return Packing(BlockFields, pages=(count,))

    def copy(self, kv: KVPools, packed: jax.Array, *, count: int) -> KVPools:
        """Copies up to `count` pages of each group, one after another."""
        fields = self.copy_packing(count).unpack(packed)

        def group(g: int, pool: KVPages) -> KVPages:
            def turn(i: jax.Array, pool: KVPages) -> KVPages:
                source, target = fields.sources[g, i], fields.targets[g, i]
                return jax.tree.map(lambda x: self._write(x, g, target, self._read(x, g, source)), pool)

            return jax.lax.fori_loop(0, fields.counts[g], turn, pool)

        return tuple(group(g, pool) for g, pool in enumerate(kv))

    def gather(self, pool: KVPages, packed: jax.Array, *, group: int, count: int) -> KVPages:
        """A block of `count` pages of a group's pool, which stays as it is: leaves [count, L, K, S, H]."""
        pages = self.block_packing(count).unpack(packed).pages

        def leaf(x: jax.Array) -> jax.Array:
            def turn(i: jax.Array, block: jax.Array) -> jax.Array:
                return jax.lax.dynamic_update_slice_in_dim(block, self._read(x, group, pages[i])[None], i, axis=0)

            return jax.lax.fori_loop(0, count, turn, jnp.zeros((count, self.layers[group], *x.shape[1:]), x.dtype))

        return jax.tree.map(leaf, pool)

    def scatter(self, pool: KVPages, block: KVPages, packed: jax.Array, *, group: int,
                count: int) -> tuple[KVPages, jax.Array]:
        """Writes a block to pages of a group's pool. Returns the pool and a number that is there when it is done."""
        pages = self.block_packing(count).unpack(packed).pages

        def turn(i: jax.Array, pool: KVPages) -> KVPages:
            return jax.tree.map(lambda x, pages_of: self._write(x, group, pages[i], pages_of[i]), pool, block)

        return jax.lax.fori_loop(0, count, turn, pool), pages[0]

    def _read(self, x: jax.Array, group: int, page: jax.Array) -> jax.Array:
        """[L, K, S, H] of x [L * P, K, S, H]."""
        return jax.lax.dynamic_index_in_dim(self._by_layer(x, group), page, axis=1, keepdims=False)

    def _write(self, x: jax.Array, group: int, page: jax.Array, value: jax.Array) -> jax.Array:
        by_layer = self._by_layer(x, group)
        return jax.lax.dynamic_update_index_in_dim(by_layer, value, page, axis=1).reshape(x.shape)

    def _by_layer(self, x: jax.Array, group: int) -> jax.Array:
        layers = self.layers[group]
        return x.reshape(layers, x.shape[0] // layers, *x.shape[1:])


def blocks(pages: Sequence[Any]) -> Iterator[Sequence[Any]]:
    """Cuts a list into parts of the sizes in BLOCKS, the largest first."""
    start = 0
    for size in reversed(BLOCKS):
        while len(pages) - start >= size:
            yield pages[start : start + size]
            start += size
