"""The work of a grouped product: which blocks of rows meet which groups."""

import jax
import jax.numpy as jnp


def group_starts(group_sizes: jax.Array) -> jax.Array:
    """[E] int32 -> [E + 1] int32: where each group's rows begin, and where the last one's end."""
    return jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(group_sizes, dtype=jnp.int32)])


def pairs(starts: jax.Array, rows: int, blocks: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The (group, block) pairs that have rows in common, in the order of both.

    Args:
      starts: [E + 1] int32, see group_starts. rows: of a block. blocks: how many there are.

    Returns:
      Group and block of each pair, [blocks + min(E, rows of all blocks)] int32, and how many are used, int32; the
      others repeat the last one. No rows at all give one pair that has none in common.
    """
    groups = starts.shape[0] - 1
    begins, ends = starts[:-1], starts[1:]
    first = begins // rows
    through = jnp.cumsum(jnp.where(ends > begins, (ends - 1) // rows - first + 1, 0), dtype=jnp.int32)
    count = jnp.maximum(through[-1], 1)
    index = jnp.minimum(jnp.arange(blocks + min(groups, blocks * rows), dtype=jnp.int32), count - 1)
    # A sum, since searchsorted is a loop of many launches on a GPU.
    group = jnp.minimum(jnp.sum(through <= index[:, None], axis=1, dtype=jnp.int32), groups - 1)
    block = (ends[group] - 1) // rows - (through[group] - 1 - index)
    return group, jnp.clip(block, 0, blocks - 1), count
