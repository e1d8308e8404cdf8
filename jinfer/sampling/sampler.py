"""The sampler: from logits to tokens, inside the step's program, the same code on CPU, TPU and GPU.

One program serves every mix of parameters. What no row asks for sits behind a `lax.cond` and costs nothing.
Order: raw logits (these give the logprobs) -> bias -> penalties -> end tokens masked before min_tokens ->
temperature -> top_k -> top_p -> min_p -> draw. Everything is float32 and no row depends on another.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jinfer.sampling.blocks import SHORT, WIDTH, argmax, split, take
from jinfer.sampling.draw import pick, uniforms
from jinfer.sampling.filters import Filters, threshold
from jinfer.sampling.logprobs import logprobs
from jinfer.sampling.penalties import penalise

LARGEST = float(jnp.finfo(jnp.float32).max)
BLOCK_ROWS = 4  # rows at a time on CPU: 0.75 MiB of logits at a vocabulary of 49,152
COLDEST = float(jnp.finfo(jnp.float32).tiny)  # its inverse is still finite


class RowParams(NamedTuple):
    """What each of R rows asks for; neutral values switch a feature off.

    Attributes:
      temperature, top_k, top_p, min_p, presence, frequency, repetition: as in SamplingParams; [R] f32, but
        top_k i32.
      seed: [R] u32, see seeds.py. position: [R] i32, of the token to be sampled. Draws depend on these two.
      stop_ids: [R, E] i32 padded with -1, ids not sampled while position < min_position, [R] i32.
      bias_ids: [R, X] i32 padded with -1. bias_values: [R, X] f32. Ids are below V: the host checks them.
      logprobs: [R] i32; -1 asks for none, 0 for the chosen token's, n for those of the n best too.
    """

    temperature: jax.Array
    top_k: jax.Array
    top_p: jax.Array
    min_p: jax.Array
    presence: jax.Array
    frequency: jax.Array
    repetition: jax.Array
    seed: jax.Array
    position: jax.Array
    stop_ids: jax.Array
    min_position: jax.Array
    bias_ids: jax.Array
    bias_values: jax.Array
    logprobs: jax.Array


class Sampled(NamedTuple):
    """tokens [R] i32; logprob [R] f32, top_ids [R, C] i32 and top_logprobs [R, C] f32 of the raw logits.

    What a row did not ask for is 0 (ids: -1). finite [R] bool: False where the largest logit is NaN or
    infinite; the token is then some token of the vocabulary.
    """

    tokens: jax.Array
    logprob: jax.Array
    top_ids: jax.Array
    top_logprobs: jax.Array
    finite: jax.Array


def sample(
    logits: jax.Array,
    params: RowParams,
    counts: jax.Array,
    slots: jax.Array,
    *,
    max_logprobs: int,
) -> Sampled:
    """Samples one token a row.

    logits [R, V] f32; counts [B + 1, V] i16 (see penalties.py), of which row slots[r] ([R] i32) belongs to
    r: it is read only if some row is edited; max_logprobs is C. Padding of the
    vocabulary is -inf.
    """
    edited = _edited(params)
    short = logits.shape[1] <= SHORT  # not worth the compile time of the faster ways

    def drawn() -> tuple[jax.Array, jax.Array]:
        # A greedy row draws too, at u = 0 the first of its best tokens: only those have a weight.
        u = jnp.where(_greedy(params)[:, None], 0.0, uniforms(params.seed, params.position))

        def asked() -> _Drawn:
            return lax.platform_dependent(
                logits, params, counts, slots, u[:, 0], cpu=_draw_in_blocks, default=_draw
            )

        def plain() -> _Drawn:
            return _draw_plainly(logits, params, u[:, 0])

        any_asked = jnp.any(edited | _filtered(params))
        block, weights, best = asked() if short else lax.cond(any_asked, asked, plain)
        return block * WIDTH + pick(weights, u[:, 1]), best

    greedy = jnp.all(_greedy(params) & ~edited)
    tokens, best = drawn() if short else lax.cond(greedy, lambda: argmax(logits), drawn)
    return Sampled(tokens, *_report(logits, tokens, params.logprobs, max_logprobs), jnp.isfinite(best))


def _greedy(params: RowParams) -> jax.Array:
    return (params.temperature <= 0) | (params.top_k == 1)


def _filtered(params: RowParams) -> jax.Array:
    """[R] bool: does the row draw from a part of the vocabulary?"""
    return ~_greedy(params) & ((params.top_k > 0) | (params.top_p < 1) | (params.min_p > 0))


def _edited(params: RowParams) -> jax.Array:
    """[R] bool: do the row's logits change before the temperature?"""
    masked = (params.position < params.min_position) & jnp.any(params.stop_ids[:, :1] >= 0, axis=1)
    penalised = (params.presence != 0) | (params.frequency != 0) | (params.repetition != 1)
    return masked | penalised | jnp.any(params.bias_ids[:, :1] >= 0, axis=1)


_Drawn = tuple[jax.Array, jax.Array, jax.Array]
"""A drawn block [R] i32 of the vocabulary, the weights in it [R, WIDTH] f32 and the largest logit [R] f32."""


def _draw_in_blocks(
    logits: jax.Array, params: RowParams, counts: jax.Array, slots: jax.Array, u: jax.Array
) -> _Drawn:
    """`_draw`, a few rows at a time.

    On CPU the arrays [R, V] in between then stay in cache (at 64 rows, fresh memory for them took longer than
    the arithmetic), and a block of rows pays only for what its own rows ask.
    """
    rows = len(slots)
    block = max(n for n in range(1, BLOCK_ROWS + 1) if rows % n == 0)

    def some(i: jax.Array, done: _Drawn) -> _Drawn:
        part = functools.partial(lax.dynamic_slice_in_dim, start_index=i * block, slice_size=block)
        drawn = _draw(logits, params, counts, slots, u, part)
        return jax.tree.map(lambda to, a: lax.dynamic_update_slice_in_dim(to, a, i * block, 0), done, drawn)

    nothing = jnp.zeros(rows, jnp.int32), jnp.zeros((rows, WIDTH), jnp.float32), jnp.zeros(rows, jnp.float32)
    return lax.fori_loop(jnp.uint32(0), jnp.uint32(rows // block), some, nothing)


def _draw(
    logits: jax.Array,
    params: RowParams,
    counts: jax.Array,
    slots: jax.Array,
    u: jax.Array,
    part: Callable[[jax.Array], jax.Array] = lambda a: a,
) -> _Drawn:
    """Draws blocks, with everything that rows can ask for.

    `part` takes the rows in question out of an array, late, so that what only a branch reads is copied there.
    """
    mine = jax.tree.map(part, params)
    x = lax.cond(
        jnp.any(_edited(mine)),
        lambda: _edit(part(logits), jax.tree.map(part, params), counts, part(slots)),
        lambda: part(logits),
    )
    best = jnp.max(x, axis=1)
    # One array of weights (the barrier): recomputed ones could differ by a bit from the threshold.
    weights = lax.optimization_barrier(_weights(x, best, mine))
    active = _filtered(mine)
    filters = Filters(
        jnp.where(active, mine.top_k, 0),
        jnp.where(active, mine.top_p, 1.0),
        jnp.where(active, mine.min_p, 0.0),
    )
    least = threshold(weights, filters)[:, None]
    kept = split(jnp.where(weights >= least, weights, 0.0), 0.0)
    block = pick(jnp.sum(kept, axis=2), part(u))
    return block, take(kept, block), best


def _draw_plainly(logits: jax.Array, params: RowParams, u: jax.Array) -> _Drawn:
    """`_draw` where no row edits or filters: two passes over the logits, no array of weights."""
    best = jnp.max(logits, axis=1)
    blocks = split(logits, -jnp.inf)
    block = pick(jnp.sum(_weights(blocks, best, params), axis=2), u)
    return block, _weights(take(blocks, block), best, params), best


def _weights(x: jax.Array, best: jax.Array, params: RowParams) -> jax.Array:
    """exp((x - best) / temperature) for x [R, ...]: 1 for the best token of a finite row.

    A greedy row is so cold that only logits equal to the best have a weight.
    """
    shape = (-1,) + (1,) * (x.ndim - 1)
    inverse = 1.0 / jnp.where(_greedy(params), COLDEST, jnp.maximum(params.temperature, COLDEST))
    return jnp.exp((x - jnp.clip(best, -LARGEST, LARGEST).reshape(shape)) * inverse.reshape(shape))


def _edit(x: jax.Array, params: RowParams, counts: jax.Array, slots: jax.Array) -> jax.Array:
    """Bias, end-token mask and penalties: logits [R, V] -> [R, V]."""
    rows = lax.broadcasted_iota(jnp.int32, params.bias_ids.shape, 0)
    x = x.at[rows, params.bias_ids].add(params.bias_values, mode="drop", wrap_negative_indices=False)
    seen = counts.at[slots].get(mode="promise_in_bounds", wrap_negative_indices=False)
    x = penalise(x, seen, params.presence, params.frequency, params.repetition)
    early = (params.position < params.min_position)[:, None]
    rows = lax.broadcasted_iota(jnp.int32, params.stop_ids.shape, 0)
    masked = jnp.where(early, params.stop_ids, -1)
    return x.at[rows, masked].set(-jnp.inf, mode="drop", wrap_negative_indices=False)


def _report(
    logits: jax.Array, tokens: jax.Array, asked: jax.Array, max_logprobs: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    rows = logits.shape[0]

    def compute() -> tuple[jax.Array, jax.Array, jax.Array]:
        chosen, ids, values = logprobs(logits, tokens, max_logprobs=max_logprobs)
        wanted = jnp.arange(max_logprobs, dtype=jnp.int32)[None] < asked[:, None]
        return jnp.where(asked >= 0, chosen, 0.0), jnp.where(wanted, ids, -1), jnp.where(wanted, values, 0.0)

    def nothing() -> tuple[jax.Array, jax.Array, jax.Array]:
        return (
            jnp.zeros(rows, jnp.float32),
            jnp.full((rows, max_logprobs), -1, jnp.int32),
            jnp.zeros((rows, max_logprobs), jnp.float32),
        )

    return lax.cond(jnp.any(asked >= 0), compute, nothing)
