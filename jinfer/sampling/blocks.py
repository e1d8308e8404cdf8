"""The vocabulary in blocks: arg-max and the k best without a sort of the vocabulary.

XLA:CPU reduces a float maximum at memory speed but runs `argmax` (a reduction over pairs) sixty times slower,
and `lax.top_k` slows down with the row length on every backend. Both need only the maxima of blocks first.

The sampler is part of every program, so all of it is written for a short compile time on XLA:CPU: what is
done by a library there (float32 reductions and products, `lax.top_k`) is free, other steps cost milliseconds.
"""

import jax
import jax.numpy as jnp
from jax import lax

WIDTH = 64  # tokens a block: near sqrt(V), so that the blocks' maxima and the k best blocks are both short
SHORT = 512  # tokens of a vocabulary that takes longer to compile for than to rank by `lax.top_k`


def split(x: jax.Array, fill: float) -> jax.Array:
    """[R, V] -> [R, N, WIDTH], padded at the end with `fill`. Free when V is a multiple of WIDTH."""
    rows, length = x.shape
    count = -(-length // WIDTH)
    if count * WIDTH != length:
        x = jnp.pad(x, ((0, 0), (0, count * WIDTH - length)), constant_values=fill)
    return x.reshape(rows, count, WIDTH)


def mask_padding(logits: jax.Array, vocab_size: int) -> jax.Array:
    """-inf for the ids from vocab_size up, which pad the vocabulary to the mesh: [R, V] f32 -> [R, V]."""
    if logits.shape[1] == vocab_size:
        return logits
    return jnp.where(lax.broadcasted_iota(jnp.int32, logits.shape, 1) < vocab_size, logits, -jnp.inf)


def at(x: jax.Array, index: jax.Array) -> jax.Array:
    """`take_along_axis` 1 of indices known to be inside, so that none has to be checked."""
    return jnp.take_along_axis(x, index, axis=1, mode="promise_in_bounds", wrap_negative_indices=False)


def take(blocks: jax.Array, index: jax.Array) -> jax.Array:
    """Block index[r] of each row: [R, N, W], [R] i32 -> [R, W]."""
    return at(blocks, index[:, None, None])[:, 0]


def first(hit: jax.Array) -> jax.Array:
    """Index of the first True in each row, or the last index if there is none: [R, n] bool -> [R] i32."""
    # From the end and as float32, whose maximum is cheaper than an integer minimum.
    last = hit.shape[1] - 1
    left = (last - lax.broadcasted_iota(jnp.int32, hit.shape, 1)).astype(jnp.float32)
    return last - jnp.max(jnp.where(hit, left, 0.0), axis=1).astype(jnp.int32)


def argmax(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Lowest index of the largest value and that value: [R, V] f32 -> [R] i32, [R] f32.

    A row with a NaN gives NaN and some index within the vocabulary.
    """
    if x.shape[1] <= SHORT:
        return lax.top_k(x, 1)[1][:, 0], jnp.max(x, axis=1)
    blocks = split(x, -jnp.inf)
    tops = jnp.max(blocks, axis=2)
    best = jnp.max(tops, axis=1)
    block = first(tops == best[:, None])
    index = block * WIDTH + first(take(blocks, block) == best[:, None])
    return jnp.minimum(index, x.shape[1] - 1), best


def top(x: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    """The k best of each row, best first, equal values by index: [R, V] -> values [R, k], ids [R, k] i32."""
    if x.shape[1] <= SHORT:
        values, ids = lax.top_k(x, k)
        return values, ids
    blocks, chosen = _best_blocks(x, k)
    chosen = jnp.sort(chosen, axis=1)  # candidates in the order of their ids, so that ties go to the lower id
    values, place = lax.top_k(at(blocks, chosen[:, :, None]).reshape(x.shape[0], -1), k)
    return values, at(chosen, lax.div(place, WIDTH)) * WIDTH + lax.rem(place, WIDTH)


def top_values(x: jax.Array, k: int) -> jax.Array:
    """The values of `top` alone [R, k]."""
    if x.shape[1] > SHORT:
        blocks, chosen = _best_blocks(x, k)
        x = at(blocks, chosen[:, :, None]).reshape(x.shape[0], -1)
    return lax.top_k(x, k)[0]


def _best_blocks(x: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    """All blocks [R, N, WIDTH], and which k [R, k] have the best maxima: the k best elements are in those."""
    blocks = split(x, -jnp.inf)
    return blocks, lax.top_k(jnp.max(blocks, axis=2), min(k, blocks.shape[1]))[1]
