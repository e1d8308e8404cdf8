"""top_k, top_p and min_p as one threshold a row, without sorting the vocabulary.

All three keep the tokens whose weight (probability over the best one's) is at least some value. The value
is read off the best CANDIDATES tokens; only rows that need more of the vocabulary search it by bisection
over the bits of the weight, which for non-negative floats are ordered like the floats. A SHORT vocabulary
consists of candidates only.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jinfer.sampling.blocks import SHORT, top_values
from jinfer.sampling.draw import cumsum

CANDIDATES = 64  # above the usual top_k; costs a quarter of the bisection on CPU

_bits = functools.partial(lax.bitcast_convert_type, new_dtype=jnp.int32)
_value = functools.partial(lax.bitcast_convert_type, new_dtype=jnp.float32)


class Filters(NamedTuple):
    """top_k [R] i32 (<= 0: off), top_p [R] f32 (>= 1: off), min_p [R] f32 (0: off)."""

    top_k: jax.Array
    top_p: jax.Array
    min_p: jax.Array


def threshold(weights: jax.Array, filters: Filters) -> jax.Array:
    """The smallest weight each row keeps: weights [R, V] f32, the best of a row 1 -> [R] f32.

    top_k comes first (equal weights at the edge stay together), then top_p over the mass that is left: the
    smallest set of best tokens that reaches it, at least the best token; min_p is relative to the best token.
    """
    vocab = weights.shape[1]
    k, p = filters.top_k.astype(jnp.float32), filters.top_p
    edge = lax.cond(
        jnp.any(((k > 0) & (k < vocab)) | (p < 1)), _search, lambda _, k, p: jnp.zeros_like(p), weights, k, p
    )
    return jnp.minimum(jnp.maximum(edge, filters.min_p), 1.0)


def _search(weights: jax.Array, k: jax.Array, p: jax.Array) -> jax.Array:
    """Thresholds [R] of top_k and top_p."""
    vocab = weights.shape[1]
    ranked = top_values(weights, vocab if vocab <= SHORT else CANDIDATES)
    by_rank = (k > 0) & (k < vocab)

    # Counting and adding up are one code, compiled once.
    def turn(i: jax.Array, edge: jax.Array) -> jax.Array:
        # Turn 0 counts tokens, turn 1 adds up the weights of those that it left.
        unit = jnp.where(i == 0, 1.0, 0.0)
        active = jnp.where(i == 0, by_rank, p < 1)
        sums = cumsum(jnp.where(ranked >= edge[:, None], jnp.maximum(ranked, unit), 0.0))
        whole = ranked.shape[1] == vocab
        total = sums[:, -1] if whole else _reach(weights, edge, unit)
        goal = jnp.where(i == 0, k, p * total)
        reached = sums >= goal[:, None]
        found = jnp.max(jnp.where(reached & active[:, None], ranked, edge[:, None]), axis=1)
        if whole:
            return found
        low = _bits(found)
        high = jnp.where(active & ~reached[:, -1], _bits(ranked[:, -1]) + 1, low)
        return _bisect(weights, jnp.stack([low, high], axis=1), total, goal, unit)

    start = jnp.where(jnp.any(by_rank), 0, 1)
    return lax.fori_loop(start, 2, turn, jnp.zeros_like(p))


def _reach(weights: jax.Array, least: jax.Array, unit: jax.Array) -> jax.Array:
    """Mass [R] of the tokens of weight >= least [R]; their number if unit is 1 instead of 0."""
    return jnp.sum(jnp.where(weights >= least[:, None], jnp.maximum(weights, unit), 0.0), axis=1)


def _bisect(
    weights: jax.Array, ends: jax.Array, total: jax.Array, goal: jax.Array, unit: jax.Array
) -> jax.Array:
    """A weight t [R] between two: the tokens of weight >= t are the fewest that reach `goal` [R].

    ends [R, 2] i32: bits of a weight whose tokens from there up reach the goal (their mass is at most total
    [R]), and of one whose do not. Stops as soon as at most one token lies between the two.
    """

    def is_open(ends: jax.Array, masses: jax.Array) -> jax.Array:
        # Two tokens in between would have a mass of at least twice the lower end.
        two = 2.0 * jnp.maximum(_value(ends[:, :1]), unit)
        return (ends[:, 1:] - ends[:, :1] > 1) & (masses[:, :1] - masses[:, 1:] >= two)

    def halve(state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        ends, masses = state
        middle = (ends[:, 0] + ends[:, 1]) >> 1
        mass = _reach(weights, _value(middle), unit)
        moves = ((mass < goal)[:, None] == np.array([[False, True]])) & is_open(ends, masses)
        return jnp.where(moves, middle[:, None], ends), jnp.where(moves, mass[:, None], masses)

    masses = jnp.stack([total, jnp.zeros_like(total)], axis=1)
    ends, _ = lax.while_loop(lambda state: jnp.any(is_open(*state)), halve, (ends, masses))
    return _value(ends[:, 0])
