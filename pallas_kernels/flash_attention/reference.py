"""flash_attention in plain jnp, a tile of queries at a time: the truth in tests and the path CPUs run."""

import jax
import jax.numpy as jnp

from pallas_kernels.options import MASKED, capped

TILE = 128  # queries whose scores exist at a time


def flash_attention(q, k, v, starts, *, scale, window, soft_cap, sinks):
    """See api.flash_attention."""
    tokens, heads, width = q.shape
    kv_heads = k.shape[1]
    group = heads // kv_heads
    first = first_visible(starts, tokens, window)
    # What no query sees may hold anything: NaN * 0 is NaN.
    real = jnp.arange(tokens) < starts[-1]
    v = jnp.where(real[:, None, None], v, 0)
    sink = None if sinks is None else sinks.reshape(kv_heads, group, 1, 1)
    tiles = -(-tokens // TILE)
    padded = jnp.pad(q, ((0, tiles * TILE - tokens), (0, 0), (0, 0))).reshape(tiles, TILE, kv_heads, group, width)
    index = jnp.arange(tiles * TILE, dtype=jnp.int32).reshape(tiles, TILE)
    first = jnp.pad(first, (0, tiles * TILE - tokens)).reshape(tiles, TILE)
    position = jnp.arange(tokens, dtype=jnp.int32)

    def tile(args):
        q, first, last = args
        scores = jnp.einsum("tkgh,ckh->kgtc", q, k, precision="highest", preferred_element_type=jnp.float32)
        seen = (position >= first[:, None]) & (position <= last[:, None])
        scores = jnp.where(seen, capped(scores * scale, soft_cap), MASKED)
        top = scores.max(-1, keepdims=True)
        top = top if sink is None else jnp.maximum(top, sink)
        probs = jnp.where(seen, jnp.exp(scores - top), 0.0)
        total = probs.sum(-1, keepdims=True) + (0.0 if sink is None else jnp.exp(sink - top))
        out = jnp.einsum("kgtc,ckh->kgth", probs.astype(v.dtype), v, precision="highest",
                         preferred_element_type=jnp.float32)
        return (out / jnp.where(total == 0.0, 1.0, total)).transpose(2, 0, 1, 3)

    out = jax.lax.map(tile, (padded, first, index))
    return out.reshape(tiles * TILE, heads, width)[:tokens].astype(q.dtype)


def first_visible(starts: jax.Array, tokens: int, window: int | None) -> jax.Array:
    """[T] int32: the first token each token sees. Padding sees from starts[Q] on, so itself at least."""
    index = jnp.arange(tokens, dtype=jnp.int32)
    begin = starts[jnp.searchsorted(starts[1:], index, side="right")]
    return begin if window is None else jnp.maximum(begin, index - window + 1)
