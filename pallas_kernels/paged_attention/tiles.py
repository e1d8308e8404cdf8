"""The work list of a call: tiles of queries, each with the pages it sees. Integers only, no page numbers of a layer,
so that XLA computes it once for all layers."""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Tiles(NamedTuple):
    """Up to NT tiles of at most TQ consecutive queries of one sequence; those with work come first.

    steps: [1] int32, blocks to walk in all. Each [NT] int32: row, its sequence; begin, its first query; position, of that query in the
    sequence; end, positions before it are seen; page, the first entry of the page table it needs; blocks, how many.
    """

    steps: jax.Array
    row: jax.Array
    begin: jax.Array
    position: jax.Array
    end: jax.Array
    page: jax.Array
    blocks: jax.Array


def decode_tiles(kv_lengths: jax.Array, *, page_size: int, block_pages: int, splits: int, window: int | None) -> Tiles:
    """A tile for each row that holds anything: kv_lengths [Q] int32, NT = Q."""
    used = kv_lengths > 0
    row = jnp.argsort(~used, stable=True).astype(jnp.int32)
    end = kv_lengths[row]
    return _tiles(used[row], row, row, end - 1, end, page_size, block_pages, splits, window)


def chunk_tiles(query_starts: jax.Array, kv_lengths: jax.Array, tokens: int, *, queries: int, page_size: int,
                block_pages: int, splits: int, window: int | None) -> Tiles:
    """Tiles in ascending order of their queries: query_starts [Q + 1], kv_lengths [Q] int32, NT = T // TQ + Q."""
    sequences = kv_lengths.shape[0]
    counts = query_starts[1:] - query_starts[:-1]
    ends = jnp.cumsum((counts + queries - 1) // queries, dtype=jnp.int32)
    index = jnp.arange(tokens // queries + sequences, dtype=jnp.int32)
    # A comparison with all ends instead of a search, which XLA would make a loop.
    row = jnp.minimum(jnp.sum(ends[None] <= index[:, None], axis=1, dtype=jnp.int32), sequences - 1)
    before = (index - (ends[row] - (counts[row] + queries - 1) // queries)) * queries  # queries of the row before
    position = kv_lengths[row] - counts[row] + before
    end = position + jnp.minimum(counts[row] - before, queries)
    return _tiles(index < ends[-1], row, query_starts[row] + before, position, end, page_size, block_pages, splits, window)


def _tiles(valid, row, begin, position, end, page_size, block_pages, splits, window) -> Tiles:
    first = jnp.zeros_like(position) if window is None else jnp.maximum(position - window + 1, 0)
    page = first // page_size
    pages = (end + page_size - 1) // page_size - page
    blocks = (pages + block_pages * splits - 1) // (block_pages * splits)  # of each split
    blocks = jnp.where(valid, blocks, 0)
    return Tiles(jnp.sum(blocks, dtype=jnp.int32)[None], row, begin, position, end, page, blocks)
