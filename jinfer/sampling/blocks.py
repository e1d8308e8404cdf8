"""The vocabulary in blocks: arg-max and the k best without a sort of the vocabulary.

XLA:CPU reduces a float maximum at memory speed but runs `argmax` (a reduction over pairs) sixty times slower,
and `lax.top_k` slows down with the row length on every backend. Both need only the maxima of blocks first.
"""

import jax
import jax.numpy as jnp
from jax import lax

WIDTH = 64  # tokens a block: near sqrt(V), so that the blocks' maxima and the k best blocks are both short


def split(x: jax.Array, fill: float) -> jax.Array:
    """[R, V] -> [R, N, WIDTH], padded at the end with `fill`. Free when V is a multiple of WIDTH."""
    rows, vocab = x.shape
    count = -(-vocab // WIDTH)
    if count * WIDTH != vocab:
        x = jnp.pad(x, ((0, 0), (0, count * WIDTH - vocab)), constant_values=fill)
    return x.reshape(rows, count, WIDTH)


def take(blocks: jax.Array, index: jax.Array) -> jax.Array:
    """Block index[r] of each row: [R, N, W], [R] i32 -> [R, W]."""
    return jnp.take_along_axis(blocks, index[:, None, None], axis=1)[:, 0]


def first(hit: jax.Array) -> jax.Array:
    """Index of the first True in each row, or the last index if there is none: [R, n] bool -> [R] i32."""
    last = hit.shape[1] - 1
    return jnp.min(jnp.where(hit, lax.broadcasted_iota(jnp.int32, hit.shape, 1), last), axis=1)


def argmax(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Lowest index of the largest value and that value: [R, V] f32 -> [R] i32, [R] f32.

    A row with a NaN gives NaN and some index within the vocabulary.
    """
    blocks = split(x, -jnp.inf)
    tops = jnp.max(blocks, axis=2)
    best = jnp.max(tops, axis=1)
    block = first(tops == best[:, None])
    index = block * WIDTH + first(take(blocks, block) == best[:, None])
    return jnp.minimum(index, x.shape[1] - 1), best


def top(x: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    """The k best of each row, best first, equal values by index: [R, V] -> values [R, k], ids [R, k] i32.

    The k best elements lie in the k blocks with the best maxima, so two small `lax.top_k` are exact.
    """
    blocks = split(x, -jnp.inf)
    _, chosen = lax.top_k(jnp.max(blocks, axis=2), min(k, blocks.shape[1]))
    chosen = jnp.sort(chosen, axis=1)  # candidates in the order of their ids, so that ties go to the lower id
    candidates = jnp.take_along_axis(blocks, chosen[:, :, None], axis=1).reshape(x.shape[0], -1)
    values, at = lax.top_k(candidates, k)
    ids = jnp.take_along_axis(chosen, at // WIDTH, axis=1) * WIDTH + at % WIDTH
    return values, ids
