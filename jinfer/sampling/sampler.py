"""The sampler: from logits to tokens, inside the step's program, the same code on CPU, TPU and GPU.

One program serves every mix of parameters. What no row asks for sits behind a `lax.cond` and costs nothing.
Order: raw logits (these give the logprobs) -> bias -> penalties -> end tokens masked before min_tokens ->
temperature -> top_k -> top_p -> min_p -> draw. Everything is float32 and every row is independent of the others.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jinfer.sampling.blocks import argmax, split, take
from jinfer.sampling.draw import draw, uniforms
from jinfer.sampling.filters import Filters, threshold
from jinfer.sampling.logprobs import logprobs
from jinfer.sampling.penalties import penalise

LARGEST = float(jnp.finfo(jnp.float32).max)
COLDEST = 1e-20  # below it 1 / temperature would overflow; such a row is greedy in all but name


class RowParams(NamedTuple):
    """What each of R rows asks for (X biased ids, E end ids at most; both may be padding only).

    temperature, top_k, top_p, min_p, presence, frequency, repetition: as in SamplingParams, [R] f32 (top_k i32).
    seed [R] u32, position [R] i32: of the token to be sampled; the random stream depends on these alone.
    stop_ids [R, E] i32 (-1: padding) are not sampled while position < min_position [R] i32.
    bias_ids [R, X] i32 (-1: padding), bias_values [R, X] f32. Ids must be below V: the host checks them.
    logprobs [R] i32: -1 none, 0 the chosen token's, n the n best too.
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

    What a row did not ask for is 0 (ids: -1). finite [R] bool: False where the largest logit is NaN or infinite;
    the token is then some token of the vocabulary.
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
    vocab_size: int | None = None,
) -> Sampled:
    """Samples one token a row.

    logits [R, V] f32; counts [B + 1, V] i16 (see penalties.py), of which row slots[r] ([R] i32) belongs to r: it
    is read only if some row is penalised; max_logprobs is C; ids from vocab_size up are padding of the head.
    """
    if vocab_size is not None and vocab_size < logits.shape[1]:
        inside = lax.broadcasted_iota(jnp.int32, logits.shape, 1) < vocab_size
        logits = jnp.where(inside, logits, -jnp.inf)
    penalised = (params.presence != 0) | (params.frequency != 0) | (params.repetition != 1)
    masked = (params.position < params.min_position)[:, None] & (params.stop_ids >= 0)
    edited = jnp.any(penalised) | jnp.any(masked) | jnp.any(params.bias_ids >= 0)

    def edit() -> jax.Array:
        rows = jnp.arange(logits.shape[0], dtype=jnp.int32)[:, None]
        vocab = logits.shape[1]  # an index out of range is dropped
        x = logits.at[rows, jnp.where(params.bias_ids < 0, vocab, params.bias_ids)].add(
            params.bias_values, mode="drop"
        )
        x = lax.cond(
            jnp.any(penalised),
            lambda x: penalise(x, counts[slots], params.presence, params.frequency, params.repetition),
            lambda x: x,
            x,
        )
        return x.at[rows, jnp.where(masked, params.stop_ids, vocab)].set(-jnp.inf, mode="drop")

    # Choosing in both branches, rather than after them, saves a copy of the logits where nothing is edited.
    tokens, best = lax.cond(edited, lambda: _choose(edit(), params), lambda: _choose(logits, params))
    return Sampled(tokens, *_report(logits, tokens, params.logprobs, max_logprobs), jnp.isfinite(best))


def _choose(logits: jax.Array, params: RowParams) -> tuple[jax.Array, jax.Array]:
    """Tokens [R] i32 and the largest logits [R] f32."""
    best_token, best = argmax(logits)
    greedy = (params.temperature <= 0) | (params.top_k == 1)
    filters = Filters(
        jnp.where(greedy, 0, params.top_k),
        jnp.where(greedy, 1.0, params.top_p),
        jnp.where(greedy, 0.0, params.min_p),
    )
    filtered = jnp.any((filters.top_k > 0) | (filters.top_p < 1) | (filters.min_p > 0))
    top_logit = jnp.clip(best, -LARGEST, LARGEST)
    inverse = 1.0 / jnp.maximum(params.temperature, COLDEST)

    def weigh(x: jax.Array) -> jax.Array:
        """exp((x - best) / temperature), [R, ...] -> same: 1 for the best token, never NaN for a finite row."""
        shape = (-1,) + (1,) * (x.ndim - 1)
        return jnp.exp((jnp.maximum(x, -LARGEST) - top_logit.reshape(shape)) * inverse.reshape(shape))

    def whole() -> jax.Array:
        blocks = split(logits, -jnp.inf)
        sums = jnp.sum(weigh(blocks), axis=2)
        return draw(sums, lambda index: weigh(take(blocks, index)), uniforms(params.seed, params.position))

    def cut() -> jax.Array:
        # The barrier makes one array of the weights: recomputed ones could differ by a bit from the threshold.
        weights = lax.optimization_barrier(weigh(logits))
        least = threshold(weights, filters)[:, None]
        blocks = split(weights, 0.0)
        sums = jnp.sum(jnp.where(blocks >= least[:, :, None], blocks, 0.0), axis=2)

        def block_of(index: jax.Array) -> jax.Array:
            block = take(blocks, index)
            return jnp.where(block >= least, block, 0.0)

        return draw(sums, block_of, uniforms(params.seed, params.position))

    drawn = lax.cond(
        jnp.all(greedy), lambda: best_token, lambda: lax.cond(filtered, cut, whole)
    )
    tokens = jnp.where(greedy, best_token, jnp.minimum(drawn, logits.shape[1] - 1))
    return tokens, best


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
