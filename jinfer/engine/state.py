"""The device state: what a running request keeps on the device. Donated to every program."""

import enum
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jinfer.sampling.sampler import RowParams
from jinfer.scheduler import Request


class Column(enum.IntEnum):
    """Columns of a row's int32 record; floats are bit-cast. The stop ids follow the last one.

    LENGTH: positions whose KV is written. LAST_TOKEN: the token at position LENGTH. ACTIVE: 1 while tokens are
    to come. MAX_POSITION: a row ends with that many tokens. MIN_POSITION: stop ids are masked before it.
    """

    LENGTH = 0
    LAST_TOKEN = 1
    ACTIVE = 2
    PROMPT_LENGTH = 3
    MAX_POSITION = 4
    MIN_POSITION = 5
    TOP_K = 6
    SEED = 7
    LOGPROBS = 8
    PROMPT_LOGPROBS = 9
    BIASED = 10
    TEMPERATURE = 11
    TOP_P = 12
    MIN_P = 13
    PRESENCE = 14
    FREQUENCY = 15
    REPETITION = 16
    STOP_IDS = 17


class DeviceState(NamedTuple):
    """B slots and the null slot 0, which padding rows name and nobody reads.

    rows: [B + 1, F] int32 records, see Column. page_table: [G, B + 1, M] int32, of G page groups. counts: [B + 1, V]
    int16, which tokens a row has seen (sampling.penalties). bias_ids, bias_values: [B + 1, X] int32 (-1 padding) and
    float32. counts and bias are kept up for rows that use them only.
    """

    rows: jax.Array
    page_table: jax.Array
    counts: jax.Array
    bias_ids: jax.Array
    bias_values: jax.Array


def record_width(max_stop_ids: int) -> int:
    """F."""
    return Column.STOP_IDS + max_stop_ids


def record(request: Request, width: int) -> np.ndarray:
    """The row record a request starts with: [F] int32, LENGTH and LAST_TOKEN not set."""
    params = request.params
    row = np.zeros(width, np.int32)
    row[Column.PROMPT_LENGTH] = len(request.prompt)
    row[Column.MAX_POSITION] = request.max_position
    row[Column.MIN_POSITION] = min(len(request.prompt) + params.min_tokens, request.max_position)  # fits an int32
    row[Column.TOP_K] = min(params.top_k, 2**31 - 1)
    row[Column.LOGPROBS] = -1 if params.logprobs is None else params.logprobs
    row[Column.PROMPT_LOGPROBS] = request.scores_prompt
    row[Column.BIASED] = bool(params.logit_bias)
    row[Column.SEED : Column.SEED + 1] = np.array([request.seed], np.uint32).view(np.int32)
    row[Column.TEMPERATURE : Column.STOP_IDS] = np.array(
        [params.temperature, params.top_p, params.min_p, params.presence_penalty, params.frequency_penalty,
         params.repetition_penalty], np.float32).view(np.int32)
    row[Column.STOP_IDS :] = -1
    row[Column.STOP_IDS : Column.STOP_IDS + len(request.stop_ids)] = request.stop_ids
    return row


def row_params(rows: jax.Array, position: jax.Array, bias_ids: jax.Array, bias_values: jax.Array,
               emits: jax.Array) -> RowParams:
    """The sampler's view of records [R, F]; position [R] of the token to sample; bias [R, X]; emits [R] bool.

    A row that does not emit asks for nothing, so that padding never takes a batch off the fast paths.
    """
    rows = jnp.where(emits[:, None], rows, _neutral(rows.shape[1]))

    def real(column: Column) -> jax.Array:
        return jax.lax.bitcast_convert_type(rows[:, column], jnp.float32)

    return RowParams(
        temperature=real(Column.TEMPERATURE), top_k=rows[:, Column.TOP_K], top_p=real(Column.TOP_P),
        min_p=real(Column.MIN_P), presence=real(Column.PRESENCE), frequency=real(Column.FREQUENCY),
        repetition=real(Column.REPETITION),
        seed=jax.lax.bitcast_convert_type(rows[:, Column.SEED], jnp.uint32), position=position,
        stop_ids=rows[:, Column.STOP_IDS :], min_position=rows[:, Column.MIN_POSITION],
        bias_ids=jnp.where(rows[:, Column.BIASED, None] == 1, bias_ids, -1), bias_values=bias_values,
        logprobs=rows[:, Column.LOGPROBS])


def _neutral(width: int) -> np.ndarray:
    """The record of a greedy request without any other wish: [F] int32."""
    row = np.zeros(width, np.int32)
    row[Column.LOGPROBS] = -1
    row[[Column.TOP_P, Column.REPETITION]] = np.ones(2, np.float32).view(np.int32)
    row[Column.STOP_IDS :] = -1
    return row
