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

    known = known_k & known_p
    rest = (weights, filters.top_p, k, known_k, edge)
    searched = lax.cond(
        jnp.all(known),
        lambda: found,
        lambda: lax.platform_dependent(
            known, *rest, cpu=_bisect_rows, default=lambda _, *rest: _bisect(*rest)
        ),
    )
    return jnp.where(known, found, searched)


def _bisect(
    weights: jax.Array, top_p: jax.Array, k: jax.Array, known_k: jax.Array, edge: jax.Array
) -> jax.Array:
    """Thresholds [R] from the whole vocabulary; edge [R] is that of top_k where known_k [R]."""
    edge = lax.cond(
        jnp.all(known_k),
        lambda: edge,
        lambda: jnp.where(known_k, edge, _largest(weights, k.astype(jnp.float32), counting=True)),
    )
    mass = jnp.sum(jnp.where(weights >= edge[:, None], weights, 0.0), axis=1)
    nucleus = lax.cond(
        jnp.any(top_p < 1),
        lambda: _largest(weights, jnp.where(top_p < 1, top_p * mass, jnp.inf), counting=False),
        lambda: jnp.zeros_like(mass),
    )
    return jnp.maximum(edge, nucleus)


def _bisect_rows(known: jax.Array, *rest: jax.Array) -> jax.Array:
    """`_bisect` of the unknown rows one by one: on CPU a row stays in cache and known rows cost nothing."""
    unknown_first = jnp.argsort(known)

    def one(i: jax.Array, least: jax.Array) -> jax.Array:
        row = unknown_first[i]
        (value,) = _bisect(*(lax.dynamic_slice_in_dim(a, row, 1) for a in rest))
        return least.at[row].set(value)

    return lax.fori_loop(0, jnp.sum(~known, dtype=jnp.int32), one, jnp.zeros_like(rest[1]))


class _Span(NamedTuple):
    """low, high [R] i32: bits of a weight whose tokens from there up reach the goal, and of one whose do not.

    mass_low, mass_high [R] f32: the number or mass of those tokens.
    """

    low: jax.Array
    high: jax.Array
    mass_low: jax.Array
    mass_high: jax.Array


def _largest(weights: jax.Array, goal: jax.Array, *, counting: bool) -> jax.Array:
    """A weight t [R]: the tokens of weight >= t are the fewest that reach `goal` [R] in number or in mass.

    0 where even all of them do not. Stops as soon as at most one token lies between the two ends.
    """
    bits = functools.partial(lax.bitcast_convert_type, new_dtype=jnp.int32)
    value = functools.partial(lax.bitcast_convert_type, new_dtype=jnp.float32)
    amounts = jnp.ones_like(weights) if counting else weights

    def reach(low: jax.Array) -> jax.Array:
        return jnp.sum(jnp.where(weights >= value(low)[:, None], amounts, 0.0), axis=1)

    def open_(span: _Span) -> jax.Array:
        # Two tokens in between would have a mass of at least twice the lower end.
        two = 2.0 if counting else 2.0 * value(span.low)
        return (span.high - span.low > 1) & (span.mass_low - span.mass_high >= two)

    def halve(span: _Span) -> _Span:
        middle = span.low + (span.high - span.low) // 2
        mass = reach(middle)
        up, down = open_(span) & (mass >= goal), open_(span) & (mass < goal)
        return _Span(
            jnp.where(up, middle, span.low),
            jnp.where(down, middle, span.high),
            jnp.where(up, mass, span.mass_low),
            jnp.where(down, mass, span.mass_high),
        )

    rows = weights.shape[0]
    low, above_one = jnp.zeros(rows, jnp.int32), jnp.full(rows, bits(jnp.float32(1.0)) + 1)
    total = jnp.full(rows, weights.shape[1], jnp.float32) if counting else jnp.sum(weights, axis=1)
    start = _Span(low, above_one, total, jnp.zeros(rows, jnp.float32))
    # A goal that nothing reaches leaves low at 0; do not look for it.
    start = start._replace(high=jnp.where(goal > total, low, above_one))
    return value(lax.while_loop(lambda span: jnp.any(open_(span)), halve, start).low)
