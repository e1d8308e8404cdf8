"""One random token a row by inverting the cumulative distribution, with two uniforms instead of V Gumbels.

A block is drawn by the blocks' masses, then a token in it: exact, as P(token) = P(block) P(token | block).
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from jinfer.sampling.blocks import WIDTH, first


def uniforms(seed: jax.Array, position: jax.Array) -> jax.Array:
    """Two uniforms in [0, 1) that depend on a row's seed and position only: [R] u32, [R] i32 -> [R, 2] f32.

    They are the two words of `fold_in(key(seed), position)`, itself a threefry-2x32 hash (Salmon et al.
    2011): unlike `random.bits` these do not change with `jax_default_prng_impl` or
    `jax_threefry_partitionable`.
    """

    def words(seed: jax.Array, position: jax.Array) -> jax.Array:
        key = jax.random.key(seed, impl="threefry2x32")
        return jax.random.key_data(jax.random.fold_in(key, position))

    return (jax.vmap(words)(seed, position) >> 8).astype(jnp.float32) * jnp.float32(2.0**-24)


def pick(weights: jax.Array, u: jax.Array) -> jax.Array:
    """Draws index i with probability weights[i] / sum: [R, n] f32 >= 0, [R] f32 in [0, 1) -> [R] i32.

    An index of weight 0 is never drawn while a positive one exists, whatever the round-off of the sums.
    """
    mass = jnp.cumsum(weights, axis=1)
    positive = weights > 0
    # `positive`: a parallel prefix sum need not be monotone in the last bit: it could end on weight 0.
    hit = positive & (mass > u[:, None] * mass[:, -1:])
    last = weights.shape[1] - 1 - first(positive[:, ::-1])
    return jnp.where(jnp.any(hit, axis=1), first(hit), last)


def draw(sums: jax.Array, block_of: Callable[[jax.Array], jax.Array], u: jax.Array) -> jax.Array:
    """Draws a token [R] i32 with uniforms u [R, 2].

    sums [R, N] f32 are the masses of the blocks; block_of maps their indices [R] to weights [R, WIDTH] f32.
    """
    block = pick(sums, u[:, 0])
    return block * WIDTH + pick(block_of(block), u[:, 1])
