"""The sampler: from logits to tokens, inside the step's program, the same code on CPU, TPU and GPU.

One program serves every mix of parameters. What no row asks for sits behind a `lax.cond` and costs nothing.
Order: raw logits (these give the logprobs) -> bias -> penalties -> end tokens masked before min_tokens ->
temperature -> top_k -> top_p -> min_p -> draw. Everything is float32 and no row depends on another.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jinfer.sampling.blocks import argmax
from jinfer.sampling.draw import draw, uniforms
from jinfer.sampling.filters import Filters, threshold
from jinfer.sampling.logprobs import logprobs
from jinfer.sampling.penalties import penalise

LARGEST = float(jnp.finfo(jnp.float32).max)
COLDEST = 1e-20  # below it 1 / temperature would overflow; such a row is greedy in all but name


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
    vocab_size: int | None = None,
) -> Sampled:
    """Samples one token a row.

    logits [R, V] f32; counts [B + 1, V] i16 (see penalties.py), of which row slots[r] ([R] i32) belongs to
    r: it is read only if some row is penalised; max_logprobs is C; ids from vocab_size up are padding of
    the head.
    """
    if vocab_size is not None and vocab_size < logits.shape[1]:
        inside = lax.broadcasted_iota(jnp.int32, logits.shape, 1) < vocab_size
        logits = jnp.where(inside, logits, -jnp.inf)
    edited = _edited(params)
    tokens, best = lax.cond(
        jnp.all(_greedy(params) & ~edited),
        lambda: argmax(logits),
        lambda: lax.platform_dependent(
            _Row.of(logits, params, edited, slots), counts, cpu=_choose_each, default=_choose
        ),
    )
    return Sampled(tokens, *_report(logits, tokens, params.logprobs, max_logprobs), jnp.isfinite(best))


def _greedy(params: RowParams) -> jax.Array:
    return (params.temperature <= 0) | (params.top_k == 1)


def _edited(params: RowParams) -> jax.Array:
    """[R] bool: do the row's logits change before the temperature?"""
    masked = (params.position < params.min_position) & jnp.any(params.stop_ids[:, :1] >= 0, axis=1)
    penalised = (params.presence != 0) | (params.frequency != 0) | (params.repetition != 1)
    return masked | penalised | jnp.any(params.bias_ids[:, :1] >= 0, axis=1)


class _Row(NamedTuple):
    """What `_choose` needs of each row.

    logits [R, V] f32; slots [R] i32; knobs: the fields of _Knobs in one array [R, n], as every array more is
    work for the compiler; ids [R, X + E] i32 and what to add to their logits, [R, X + E] f32.
    """

    logits: jax.Array
    slots: jax.Array
    knobs: jax.Array
    ids: jax.Array
    biases: jax.Array

    @classmethod
    def of(cls, logits: jax.Array, params: RowParams, edited: jax.Array, slots: jax.Array) -> "_Row":
        """A greedy row draws too: so cold that only the best token is left (the first of equal ones, at u = 0)."""
        greedy = _greedy(params)
        u = uniforms(params.seed, params.position)
        knobs = _Knobs(
            edited.astype(jnp.float32),
            params.presence,
            params.frequency,
            params.repetition,
            jnp.where(greedy, LARGEST, 1.0 / jnp.maximum(params.temperature, COLDEST)),
            jnp.where(greedy, 0, jnp.minimum(params.top_k, logits.shape[1])).astype(jnp.float32),
            jnp.where(greedy, 1.0, params.top_p),
            jnp.where(greedy, 1.0, params.min_p),
            jnp.where(greedy, 0.0, u[:, 0]),
            jnp.where(greedy, 0.0, u[:, 1]),
        )
        early = (params.position < params.min_position)[:, None]
        return cls(
            logits,
            slots,
            jnp.stack(knobs, axis=1),
            jnp.concatenate([params.bias_ids, jnp.where(early, params.stop_ids, -1)], axis=1),
            jnp.pad(params.bias_values, ((0, 0), (0, params.stop_ids.shape[1])), constant_values=-jnp.inf),
        )


class _Knobs(NamedTuple):
    edited: jax.Array
    presence: jax.Array
    frequency: jax.Array
    repetition: jax.Array
    inverse: jax.Array
    top_k: jax.Array
    top_p: jax.Array
    min_p: jax.Array
    u_block: jax.Array
    u_token: jax.Array


def _choose_each(rows: _Row, counts: jax.Array) -> tuple[jax.Array, jax.Array]:
    """`_choose`, row by row.

    On CPU the arrays [V] in between then stay in cache (at 64 rows, fresh memory for [R, V] took longer than
    the arithmetic), and a row pays only for what it asks itself.
    """
    one = jax.tree.map(lambda a: a[:, None], rows)
    tokens, best = lax.map(lambda row: _choose(row, counts), one)
    return tokens[:, 0], best[:, 0]


def _choose(row: _Row, counts: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Tokens [R] i32 and the largest logits [R] f32, with everything that rows can ask for."""
    knobs = _Knobs(*row.knobs.T)
    logits = lax.cond(jnp.any(knobs.edited > 0), _edit, lambda row, _: row.logits, row, counts)
    best = jnp.max(logits, axis=1)
    # exp((x - best) / temperature): 1 for the best token of a finite row. One array of weights (the barrier):
    # recomputed ones could differ by a bit from the threshold.
    centre = jnp.clip(best, -LARGEST, LARGEST)
    weights = lax.optimization_barrier(jnp.exp((logits - centre[:, None]) * knobs.inverse[:, None]))
    least = threshold(weights, Filters(knobs.top_k, knobs.top_p, knobs.min_p))
    return draw(weights, least, jnp.stack([knobs.u_block, knobs.u_token], axis=1)), best


def _edit(row: _Row, counts: jax.Array) -> jax.Array:
    """Bias, end-token mask and penalties: logits [R, V]."""
    knobs = _Knobs(*row.knobs.T)
    index = jnp.arange(row.logits.shape[0], dtype=jnp.int32)[:, None]
    x = row.logits.at[index, row.ids].add(row.biases, mode="drop", wrap_negative_indices=False)
    seen = counts.at[row.slots].get(mode="promise_in_bounds", wrap_negative_indices=False)
    return penalise(x, seen, knobs.presence, knobs.frequency, knobs.repetition)


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
