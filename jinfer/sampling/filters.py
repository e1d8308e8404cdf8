"""top_k, top_p and min_p as one threshold a row, without sorting the vocabulary.

All three keep the tokens whose weight (probability over the best one's) is at least some value. The value is read
off the best CANDIDATES tokens; only rows that need more of the vocabulary search it by bisection over the bits of
the weight, which for non-negative floats are ordered like the floats.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jinfer.sampling.blocks import top

CANDIDATES = 64  # above the usual top_k; costs a quarter of the bisection on CPU


class Filters(NamedTuple):
    """top_k [R] i32 (<= 0: off), top_p [R] f32 (>= 1: off), min_p [R] f32 (0: off)."""

    top_k: jax.Array
    top_p: jax.Array
    min_p: jax.Array

    def any_search(self) -> jax.Array:
        """[] bool: does a row cut by rank or mass?"""
        return jnp.any((self.top_k > 0) | (self.top_p < 1))


def threshold(weights: jax.Array, filters: Filters) -> jax.Array:
    """The smallest weight each row keeps: weights [R, V] f32 in [0, 1] -> [R] f32.

    top_k comes first (equal weights at the edge stay together), then top_p over the mass that is left: the
    smallest set of best tokens that reaches it, at least the best token; min_p is relative to the best token.
    """
    best = jnp.max(weights, axis=1)
    searched = lax.cond(
        filters.any_search(), lambda: _search(weights, filters), lambda: jnp.zeros_like(filters.top_p)
    )
    return jnp.minimum(jnp.maximum(searched, filters.min_p * best), best)


def _search(weights: jax.Array, filters: Filters) -> jax.Array:
    vocab = weights.shape[1]
    count = min(CANDIDATES, vocab)
    k = jnp.where((filters.top_k <= 0) | (filters.top_k >= vocab), vocab, filters.top_k)
    ranked, _ = top(weights, count)
    total = jnp.sum(weights, axis=1)

    # top_k: the k-th candidate, unless it is beyond them or more tokens may be equal to it
    edge = jnp.take_along_axis(ranked, jnp.minimum(k, count)[:, None] - 1, axis=1)[:, 0]
    limited = k < vocab
    known_k = ~limited | ((k <= count) & ((ranked[:, -1] < edge) | (count == vocab)))
    edge = jnp.where(limited, edge, 0.0)
    mass = jnp.where(limited, jnp.sum(jnp.where(ranked >= edge[:, None], ranked, 0.0), axis=1), total)

    # top_p: candidates whose better ones have not reached it
    better = jnp.cumsum(ranked, axis=1)
    goal = filters.top_p * mass
    keeps = jnp.concatenate([jnp.ones_like(better[:, :1], bool), better[:, :-1] < goal[:, None]], axis=1)
    nucleus = jnp.min(jnp.where(keeps, ranked, jnp.inf), axis=1)
    cut = filters.top_p < 1
    known_p = ~cut | (known_k & ((better[:, -1] >= goal) | limited | (count == vocab)))
    found = jnp.maximum(edge, jnp.where(cut, nucleus, 0.0))

    def bisect() -> jax.Array:
        edge_ = lax.cond(
            jnp.all(known_k), lambda: edge, lambda: jnp.where(known_k, edge, _largest(weights, k, counting=True))
        )
        mass_ = jnp.sum(jnp.where(weights >= edge_[:, None], weights, 0.0), axis=1)
        goal_ = jnp.where(cut, filters.top_p * mass_, jnp.inf)
        return jnp.maximum(edge_, _largest(weights, goal_, counting=False))

    known = known_k & known_p
    return jnp.where(known, found, lax.cond(jnp.all(known), lambda: found, bisect))


def _largest(weights: jax.Array, goal: jax.Array, *, counting: bool) -> jax.Array:
    """The largest t such that the tokens of weight >= t reach `goal` in number or in mass; 0 if none does."""

    def halve(_: int, span: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, high = span
        middle = low + (high - low) // 2
        at_least = weights >= lax.bitcast_convert_type(middle, jnp.float32)[:, None]
        reached = jnp.sum(jnp.where(at_least, 1.0 if counting else weights, 0.0), axis=1) >= goal
        return jnp.where(reached, middle, low), jnp.where(reached, high, middle)

    one = lax.bitcast_convert_type(jnp.float32(1.0), jnp.int32)
    low = jnp.zeros(weights.shape[0], jnp.int32)
    low, _ = lax.fori_loop(0, 30, halve, (low, jnp.full_like(low, one + 1)))  # one + 1 < 2**30
    return lax.bitcast_convert_type(low, jnp.float32)
