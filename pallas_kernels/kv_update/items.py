"""The work list of the kernels: which rows of which pages get which tokens."""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Items(NamedTuple):
    """Runs of tokens that lie in one page and in one block of tokens, in the order of the tokens: all int32.

    Attributes:
      pages, offsets, tokens, counts: [I]; item i puts `counts` tokens from token `tokens` on into page `pages` from
        position `offsets` on. Only the first starts[-1] mean anything.
      starts: [blocks + 1]; the items of a block of tokens b are starts[b]:starts[b + 1].
    """

    pages: jax.Array
    offsets: jax.Array
    tokens: jax.Array
    counts: jax.Array
    starts: jax.Array


def work_items(page_table: jax.Array, query_starts: jax.Array, kv_lengths: jax.Array, tokens: int, page_size: int,
               block: int, *, decode: bool) -> Items:
    """The items of T = `tokens` tokens in blocks of `block`, arguments as api.kv_update's.

    The list does not depend on the layer (no first_page here), so XLA computes it once for all of them.
    """
    sequences = kv_lengths.shape[0]
    bounds = jnp.arange(0, tokens + block, block, dtype=jnp.int32)
    if decode:
        begin = row = jnp.arange(sequences, dtype=jnp.int32)
        count = (kv_lengths > 0).astype(jnp.int32)
        position = kv_lengths - 1
    else:  # the segments that both the sequences' ends and the blocks' ends leave uncut
        used = query_starts[-1]
        begin = jnp.sort(jnp.minimum(jnp.concatenate([query_starts[:-1], bounds[1:-1]]), used))
        count = jnp.append(begin[1:], used) - begin
        row = jnp.minimum(_at_or_below(query_starts[1:], begin), sequences - 1)
        position = kv_lengths[row] - query_starts[row + 1] + begin
    first = position // page_size
    touched = jnp.where(count > 0, (position + count - 1) // page_size - first + 1, 0)
    last = jnp.cumsum(touched, dtype=jnp.int32)
    index = jnp.arange(min(tokens, tokens // page_size + 2 * begin.shape[0]), dtype=jnp.int32)
    segment = jnp.minimum(_at_or_below(last, index), begin.shape[0] - 1)
    page = first[segment] + index - (last - touched)[segment]
    low = jnp.maximum(position[segment], page * page_size)
    high = jnp.minimum((position + count)[segment], (page + 1) * page_size)
    token = (begin - position)[segment] + low
    starts = jnp.sum((index < last[-1]) & (token < bounds[:, None]), axis=1, dtype=jnp.int32)
    return Items(page_table.at[row[segment], page].get(mode="clip"), low % page_size, token, high - low, starts)


def _at_or_below(ends: jax.Array, x: jax.Array) -> jax.Array:
    """How many of the non-decreasing `ends` are <= x: a comparison of all with all, without a loop."""
    return jnp.searchsorted(ends, x, side="right", method="compare_all").astype(jnp.int32)
