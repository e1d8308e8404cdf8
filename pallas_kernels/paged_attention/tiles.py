"""The work list of a call: tiles of queries, each with the pages it sees. Integers only and no page numbers of a layer,
so that XLA computes it once for all layers."""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Tiles(NamedTuple):
    """A tile is the queries one sequence has in a window of TQ; those with work come first. NT tiles at most, and one
    entry more, past them all: a walk that looks ahead may rest there.

    Attributes:
      steps: [1] int32, blocks of pages to walk in all.
      row: [NT + 1] int32 like all that follow, the sequence. window: where the queries lie; in chunks ascending,
        several tiles of one window in turn. origin: position of the window's first query, were it the sequence's. low,
        high: the sequence's own queries of the window. page: the first entry of the page table that is seen. blocks:
        how many a split has to walk.
    """

    steps: jax.Array
    row: jax.Array
    window: jax.Array
    origin: jax.Array
    low: jax.Array
    high: jax.Array
    page: jax.Array
    blocks: jax.Array


class Walk(NamedTuple):
    """How pages are walked: S, pages of a block, splits of a context, sliding window of the model."""

    page_size: int
    block_pages: int
    splits: int
    window: int | None


def decode_tiles(kv_lengths: jax.Array, walk: Walk) -> Tiles:
    """A tile for each row that holds anything: kv_lengths [Q] int32, NT = Q, TQ = 1."""
    used = kv_lengths > 0
    row = jnp.argsort(~used, stable=True).astype(jnp.int32)
    zeros = jnp.zeros_like(row)
    return _tiles(used[row], row, row, kv_lengths[row] - 1, zeros, zeros + 1, walk)


def chunk_tiles(query_starts: jax.Array, kv_lengths: jax.Array, tokens: int, queries: int, walk: Walk) -> Tiles:
    """Tiles in ascending order of their queries: query_starts [Q + 1], kv_lengths [Q] int32; T = tokens, TQ = queries.

    NT is the number of windows and of sequences together: a sequence that shares a window adds a tile.
    """
    sequences = kv_lengths.shape[0]
    starts, stops = query_starts[:-1], query_starts[1:]
    first = starts // queries
    counts = jnp.where(stops > starts, (stops - 1) // queries - first + 1, 0)
    ends = jnp.cumsum(counts, dtype=jnp.int32)
    index = jnp.arange(-(-tokens // queries) + sequences, dtype=jnp.int32)
    # A comparison with all ends instead of a search, which XLA would make a loop.
    row = jnp.minimum(jnp.sum(ends[None] <= index[:, None], axis=1, dtype=jnp.int32), sequences - 1)
    window = first[row] + index - (ends - counts)[row]
    begin = window * queries
    low = jnp.maximum(starts[row] - begin, 0)
    high = jnp.minimum(stops[row] - begin, queries)
    origin = kv_lengths[row] - stops[row] + begin
    return _tiles(index < ends[-1], row, window, origin, low, high, walk)


def _tiles(valid, row, window, origin, low, high, walk: Walk) -> Tiles:
    size, block_pages, splits, reach = walk
    first = jnp.zeros_like(origin) if reach is None else jnp.maximum(origin + low - reach + 1, 0)
    page = first // size
    pages = (origin + high + size - 1) // size - page
    blocks = jnp.where(valid, (pages + block_pages * splits - 1) // (block_pages * splits), 0)
    window = jnp.where(valid, window, -1)
    ended = (jnp.pad(x, (0, 1), constant_values=-1) for x in (row, window, origin, low, high, page, blocks))
    return Tiles(jnp.sum(blocks, dtype=jnp.int32)[None], *ended)
