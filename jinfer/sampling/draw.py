"""One random token a row by inverting the cumulative distribution, with two uniforms instead of V Gumbels.

A block is drawn by the blocks' masses, then a token in it: exact, as P(token) = P(block) P(token | block).
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jinfer.sampling.blocks import WIDTH, split

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
    """Sums up to each element: [R, n] f32 -> [R, n]; by triangles, in two levels if n is large."""
    rows, n = x.shape
    if n <= WIDTH:
        return jnp.sum(jnp.where(np.tri(n, dtype=bool).T, x[:, :, None], 0.0), axis=1)
    triangle = np.tri(WIDTH, dtype=np.float32).T
    inside = jnp.dot(split(x, 0.0), triangle, precision=lax.Precision.HIGHEST)
    ends = inside[:, :, -1]
    return (inside + (cumsum(ends) - ends)[:, :, None]).reshape(rows, -1)[:, :n]


def pick(weights: jax.Array, u: jax.Array) -> jax.Array:
    """Draws index i with probability weights[i] / sum: [R, n] f32 >= 0, [R] f32 in [0, 1) -> [R] i32.

    An index of weight 0 is never drawn while a positive one exists, whatever the round-off of the sums.
    """
    mass = cumsum(weights)
    total = mass[:, -1:]
    mass = jnp.where(weights > 0, mass, 0.0)
    # The least mass above the goal; were there none by round-off, the largest mass.
    score = jnp.where(mass > u[:, None] * total, 2 * total - mass, mass)
    return lax.top_k(score, 1)[1][:, 0]
