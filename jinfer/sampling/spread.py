"""Rows of logits dealt out over the devices that computed parts of them."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jinfer.sampling.blocks import mask_padding
from jinfer.sharding import Layout


def spread(function: Callable[..., Any], layout: Layout, vocab_size: int, logits: jax.Array, rows: Any,
           *shared: jax.Array) -> Any:
    """function(logits, rows, *shared) with its R rows divided over the devices that divide the vocabulary.

    A gather would give every device all logits, and all of them the same work; dealt out, a device receives and
    works on R / n rows.

    Args:
      function: works on each row alone; called with whole rows of the vocabulary, its padding -inf.
      vocab_size: V without its padding.
      logits: [R, V padded] float32, cut on V. rows: a tree of arrays [R, ...]. shared: arrays everyone sees whole.

    Returns:
      What function returns, a tree of arrays [R, ...], whole on every device.
    """
    axis, parts = layout.mesh_axis("vocab"), layout.degree("vocab")
    if axis is None or parts == 1:
        return function(mask_padding(logits, vocab_size), rows, *shared)
    count = logits.shape[0]

    def pad(x: jax.Array) -> jax.Array:
        # With its last row: a row of zeros could ask for something that no row asks for.
        return jnp.pad(x, ((0, -count % parts), *((0, 0),) * (x.ndim - 1)), mode="edge")

    def local(logits: jax.Array, rows: Any, *shared: jax.Array) -> Any:
        logits = jax.lax.all_to_all(logits, axis, split_axis=0, concat_axis=1, tiled=True)
        return function(mask_padding(logits, vocab_size), rows, *shared)

    cut, whole = PartitionSpec(axis), PartitionSpec()
    dealt = jax.shard_map(local, mesh=layout.mesh, in_specs=(PartitionSpec(None, axis), cut, *(whole for _ in shared)),
                          out_specs=cut, check_vma=False)
    # Rows said to be whole: else the partitioner cuts what comes before and after on rows too.
    logits = jax.lax.with_sharding_constraint(pad(logits), layout.sharding(None, "vocab"))
    out = dealt(logits, jax.tree.map(lambda x: pad(layout.whole(x)), rows), *map(layout.whole, shared))
    return jax.tree.map(lambda x: layout.whole(x)[:count], out)
