"""What the layers of a call share: the KV pool, positions and where sequences keep their pages."""

from typing import NamedTuple

import jax

from jinfer.config import ModelConfig
from jinfer.models.rope import cos_sin
from pallas_kernels import Pages


class KVPages(NamedTuple):
    """Pool of one page group: k, v of [L * P, K, S, H], L its layers; layer l of it owns the pages from l * P, the
    first of them its null page. Latent attention has no v: values are lanes of k.

    One array for all layers of a group, addressed by page and never sliced: a few donated arguments a call instead
    of 2 L (docs/decisions.md).
    """

    k: Pages
    v: Pages | None


KVPools = tuple[KVPages, ...]  # of a model, one a page group


class Rotary(NamedTuple):
    """cos, sin: [T, R/2] float32 rotary tables."""

    cos: jax.Array
    sin: jax.Array


class StepContext(NamedTuple):
    """What the layers of a call need to know about its T tokens and Q sequences.

    Attributes:
      rotary: of the model's rope and, if it has one, its local_rope.
      page_tables: [Q, M] int32, one a page group. query_starts: [Q + 1] int32. kv_lengths: [Q] int32, this call's
        tokens included.
    """

    rotary: tuple[Rotary, ...]
    page_tables: tuple[jax.Array, ...]
    query_starts: jax.Array
    kv_lengths: jax.Array


class LayerContext(NamedTuple):
    """The part of a StepContext that one layer reads, and first_page [], where its part of the pool begins."""

    rotary: Rotary
    page_table: jax.Array
    query_starts: jax.Array
    kv_lengths: jax.Array
    first_page: jax.Array


def rotary_tables(config: ModelConfig, positions: jax.Array, prompt_lengths: jax.Array) -> tuple[Rotary, ...]:
    """StepContext.rotary of T tokens; positions and prompt_lengths [T] int32, see `rope.cos_sin`."""
    ropes = (config.rope,) if config.local_rope is None else (config.rope, config.local_rope)
    return tuple(Rotary(*cos_sin(rope, config.rotary_dim, positions, prompt_lengths)) for rope in ropes)
