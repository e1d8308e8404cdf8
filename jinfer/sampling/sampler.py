"""The sampler: from logits to tokens, inside the step's program, the same code on CPU, TPU and GPU.

One program serves every mix of parameters. What no row asks for sits behind a `lax.cond` and costs nothing.
Order: raw logits (these give the logprobs) -> bias -> penalties -> end tokens masked before min_tokens ->
temperature -> top_k -> top_p -> min_p -> draw. Everything is float32 and no row depends on another.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jinfer.sampling.blocks import argmax
from jinfer.sampling.draw import draw, uniforms
from jinfer.sampling.filters import Filters, threshold
from jinfer.sampling.logprobs import logprobs
from jinfer.sampling.penalties import penalise

LARGEST = float(jnp.finfo(jnp.float32).max)
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
    tokens, best = lax.cond(
        jnp.all(_greedy(params) & ~_edited(params)),
        lambda: argmax(logits),
        lambda: lax.platform_dependent(
            logits, _pack(params, slots), counts, cpu=_choose_each, default=_choose
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
    """What `_choose` needs of a row beside its logits, as columns of one f32 array [R, 11 + 2 (X + E)].

    One, because every array is work for the compiler. Whole numbers are below 2^24, hence exact. ids and
    biases [R, X + E] are what to add to which logits; the others are [R].
    """

    slot: jax.Array
    edited: jax.Array
    presence: jax.Array
    frequency: jax.Array
    repetition: jax.Array
    temperature: jax.Array
    top_k: jax.Array
    top_p: jax.Array
    min_p: jax.Array
    u_block: jax.Array
    u_token: jax.Array
    ids: jax.Array
    biases: jax.Array


# A greedy row draws too: so cold that only the best token is left (the first of equal ones, at u = 0).
_GREEDY = {"temperature": 0.0, "top_k": 0.0, "top_p": 1.0, "min_p": 1.0, "u_block": 0.0, "u_token": 0.0}


def _pack(params: RowParams, slots: jax.Array) -> jax.Array:
    """The fields of _Row in one array."""
    u = uniforms(params.seed, params.position)
    early = (params.position < params.min_position)[:, None]
    row = _Row(
        slots,
        _edited(params),
        params.presence,
        params.frequency,
        params.repetition,
        params.temperature,
        params.top_k,
        params.top_p,
        params.min_p,
        u[:, 0],
        u[:, 1],
        jnp.concatenate([params.bias_ids, jnp.where(early, params.stop_ids, -1)], axis=1),
        jnp.pad(params.bias_values, ((0, 0), (0, params.stop_ids.shape[1])), constant_values=-jnp.inf),
    )
    columns = [a.astype(jnp.float32).reshape(len(slots), -1) for a in row]
    packed = jnp.concatenate(columns, axis=1)
    neutral = np.full(packed.shape[1], np.nan, np.float32)
    for name, value in _GREEDY.items():
        neutral[_Row._fields.index(name)] = value
    return jnp.where(_greedy(params)[:, None] & ~np.isnan(neutral), neutral, packed)


def _unpack(packed: jax.Array) -> _Row:
    scalars = len(_Row._fields) - 2
    edits = packed[:, scalars:]
    ids, biases = jnp.split(edits, 2, axis=1)
    return _Row(*(packed[:, i] for i in range(scalars)), ids, biases)


def _choose_each(logits: jax.Array, rows: jax.Array, counts: jax.Array) -> tuple[jax.Array, jax.Array]:
    """`_choose`, row by row.

    On CPU the arrays [V] in between then stay in cache (at 64 rows, fresh memory for [R, V] took longer than
    the arithmetic), and a row pays only for what it asks itself.
    """
    tokens, best = lax.map(
        lambda row: _choose(row[0], row[1], counts), (logits[:, None], rows[:, None])
    )
    return tokens[:, 0], best[:, 0]


def _choose(logits: jax.Array, rows: jax.Array, counts: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Tokens [R] i32 and the largest logits [R] f32, with everything that rows can ask for."""
    row = _unpack(rows)
    logits = lax.cond(jnp.any(row.edited > 0), _edit, lambda logits, *_: logits, logits, rows, counts)
    best = jnp.max(logits, axis=1)
    # exp((x - best) / temperature): 1 for the best token of a finite row. One array of weights (the barrier):
    # recomputed ones could differ by a bit from the threshold.
    centre = jnp.clip(best, -LARGEST, LARGEST)
    inverse = 1.0 / jnp.maximum(row.temperature, COLDEST)
    weights = lax.optimization_barrier(jnp.exp((logits - centre[:, None]) * inverse[:, None]))
    least = threshold(weights, Filters(row.top_k, row.top_p, row.min_p))
    return draw(weights, least, jnp.stack([row.u_block, row.u_token], axis=1)), best


def _edit(logits: jax.Array, rows: jax.Array, counts: jax.Array) -> jax.Array:
    """Bias, end-token mask and penalties: logits [R, V]."""
    row = _unpack(rows)
    index = jnp.arange(len(rows), dtype=jnp.int32)[:, None]
    ids, slots = row.ids.astype(jnp.int32), row.slot.astype(jnp.int32)
    logits = logits.at[index, ids].add(row.biases, mode="drop", wrap_negative_indices=False)
    seen = counts.at[slots].get(mode="promise_in_bounds", wrap_negative_indices=False)
    return penalise(logits, seen, row.presence, row.frequency, row.repetition)


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
