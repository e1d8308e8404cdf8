"""top_k, top_p and min_p as one threshold a row, without sorting the vocabulary.

All three keep the tokens whose weight (probability over the best one's) is at least some value. The value
is read off the best CANDIDATES tokens; only rows that need more of the vocabulary search it by bisection
over the bits of the weight, which for non-negative floats are ordered like the floats.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jinfer.sampling.blocks import at, top_values
from jinfer.sampling.draw import cumsum

CANDIDATES = 64  # above the usual top_k; costs a quarter of the bisection on CPU

_bits = functools.partial(lax.bitcast_convert_type, new_dtype=jnp.int32)
_value = functools.partial(lax.bitcast_convert_type, new_dtype=jnp.float32)


class Filters(NamedTuple):
    """top_k [R] i32 (<= 0: off), top_p [R] f32 (>= 1: off), min_p [R] f32 (0: off)."""

    top_k: jax.Array
    top_p: jax.Array
    min_p: jax.Array


class _Span(NamedTuple):
    """low, high [R] i32: bits of a weight whose tokens from there up reach the goal, and of one whose do not.

    mass_low, mass_high [R] f32: the number or mass of those tokens.
    """

    low: jax.Array
    high: jax.Array
    mass_low: jax.Array
    mass_high: jax.Array


def threshold(weights: jax.Array, filters: Filters) -> jax.Array:
    """The smallest weight each row keeps: weights [R, V] f32, the best of a row 1 -> [R] f32.

    top_k comes first (equal weights at the edge stay together), then top_p over the mass that is left: the
    smallest set of best tokens that reaches it, at least the best token; min_p is relative to the best token.
    """
    vocab = weights.shape[1]
    by_rank, by_mass = (filters.top_k > 0) & (filters.top_k < vocab), filters.top_p < 1
    start, end = jnp.where(jnp.any(by_rank), 0, 1), jnp.where(jnp.any(by_mass), 2, 1)

    def search(ranked: jax.Array) -> jax.Array:
        def turn(i: jax.Array, edge: jax.Array) -> jax.Array:
            # The first turn counts tokens, the second adds up their weights.
            asked = jnp.where(i == 0, by_rank, by_mass)
            unit = jnp.where(i == 0, 1.0, 0.0)
            total = _reach(weights, edge, unit)
            goal = jnp.where(i == 0, filters.top_k.astype(jnp.float32), filters.top_p * total)
            sums = cumsum(jnp.maximum(ranked, unit)[:, None])[:, 0]
            place = jnp.sum(sums < goal[:, None], axis=1, dtype=jnp.int32)
            read = at(ranked, jnp.minimum(place, ranked.shape[1] - 1)[:, None])[:, 0]
            # Not among the candidates: below the last of them, or equal to it.
            low = jnp.where(asked & (place < ranked.shape[1]), jnp.maximum(read, edge), edge)
            high = jnp.where(asked & (place == ranked.shape[1]), _bits(read) + 1, _bits(low))
            return _largest(weights, _Span(_bits(low), high, total, jnp.zeros_like(total)), goal, unit)

        return lax.fori_loop(start, end, turn, jnp.zeros_like(filters.top_p))

    edge = lax.cond(
        start < end,
        lambda: search(top_values(weights, min(CANDIDATES, vocab))),
        lambda: jnp.zeros_like(filters.top_p),
    )
    return jnp.minimum(jnp.maximum(edge, filters.min_p), 1.0)


def _reach(weights: jax.Array, least: jax.Array, unit: jax.Array) -> jax.Array:
    """Mass [R] of the tokens of weight >= least [R]; their number if unit is 1 instead of 0."""
    return jnp.sum(jnp.where(weights >= least[:, None], jnp.maximum(weights, unit), 0.0), axis=1)


def _largest(weights: jax.Array, span: _Span, goal: jax.Array, unit: jax.Array) -> jax.Array:
    """A weight t [R] in the span: the tokens of weight >= t are the fewest that reach `goal` [R].

    Stops as soon as at most one token lies between the two ends.
    """

    def open_(span: _Span) -> jax.Array:
        # Two tokens in between would have a mass of at least twice the lower end.
        two = 2.0 * jnp.maximum(_value(span.low), unit)
        return (span.high - span.low > 1) & (span.mass_low - span.mass_high >= two)

    def halve(span: _Span) -> _Span:
        middle = (span.low + span.high) >> 1
        mass = _reach(weights, _value(middle), unit)
        up, down = open_(span) & (mass >= goal), open_(span) & (mass < goal)
        return _Span(
            jnp.where(up, middle, span.low),
            jnp.where(down, middle, span.high),
            jnp.where(up, mass, span.mass_low),
            jnp.where(down, mass, span.mass_high),
        )

    return _value(lax.while_loop(lambda span: jnp.any(open_(span)), halve, span).low)
