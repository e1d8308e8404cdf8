"""One random token a row by inverting the cumulative distribution, with two uniforms instead of V Gumbels.

A block is drawn by the blocks' masses, then a token in it: exact, as P(token) = P(block) P(token | block).
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jinfer.sampling.blocks import LANES, WIDTH, first, split, take

ROTATIONS = (13, 15, 26, 6), (17, 29, 16, 24)


def uniforms(seed: jax.Array, position: jax.Array) -> jax.Array:
    """Two uniforms in [0, 1) that depend on a row's seed and position only: [R] u32, [R] i32 -> [R, 2] f32.

    They are the two words of threefry-2x32 (Salmon et al. 2011) of the counter (0, position) under the key
    (0, seed), as in `jax.random.fold_in(key(seed), position)`, but whatever JAX's configuration.
    """
    keys = jnp.zeros_like(seed), seed, seed ^ jnp.uint32(0x1BD11BDA)
    a, b = keys[0], position.astype(jnp.uint32) + keys[1]
    for i in range(5):
        for rotation in ROTATIONS[i % 2]:
            a = a + b
            b = a ^ (b << rotation | b >> (32 - rotation))
        a, b = a + keys[(i + 1) % 3], b + keys[(i + 2) % 3] + jnp.uint32(i + 1)
    return (jnp.stack([a, b], axis=1) >> 8).astype(jnp.float32) * jnp.float32(2.0**-24)


def cumsum(x: jax.Array) -> jax.Array:
    """Sums of x [R, n, w] f32 up to each element in the order of the last two axes.

    Products with triangles: XLA:CPU takes those from a library but compiles the many steps of a scan.
    """
    _, n, w = x.shape
    inside = jnp.dot(x, np.triu(np.ones((w, w), np.float32)), precision=lax.Precision.HIGHEST)
    before = jnp.dot(inside[:, :, -1], np.triu(np.ones((n, n), np.float32), 1), precision=lax.Precision.HIGHEST)
    return inside + before[:, :, None]


def pick(weights: jax.Array, u: jax.Array) -> jax.Array:
    """Draws index i with probability weights[i] / sum: [R, n] f32 >= 0, [R] f32 in [0, 1) -> [R] i32.

    An index of weight 0 is never drawn while a positive one exists, whatever the round-off of the sums.
    """
    parts = split(weights, 0.0, LANES)
    mass = jnp.where(parts > 0, cumsum(parts), 0.0)
    total = jnp.max(mass, axis=(1, 2), keepdims=True)
    hit = (parts > 0) & ((mass > u[:, None, None] * total) | (mass == total))
    return jnp.minimum(first(hit.reshape(weights.shape[0], -1)), weights.shape[1] - 1)


def draw(weights: jax.Array, least: jax.Array, u: jax.Array) -> jax.Array:
    """Draws a token [R] i32 by weights [R, V] f32, of those >= least [R], with uniforms u [R, 2].

    Where none has a positive weight (a broken row), some token.
    """
    blocks = split(weights, 0.0)
    sums = jnp.sum(jnp.where(blocks >= least[:, None, None], blocks, 0.0), axis=2)
    block = pick(sums, u[:, 0])
    inside = take(blocks, block)
    token = block * WIDTH + pick(jnp.where(inside >= least[:, None], inside, 0.0), u[:, 1])
    return jnp.minimum(token, weights.shape[1] - 1)
