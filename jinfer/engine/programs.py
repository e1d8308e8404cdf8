"""The compiled regimes: prefill of ragged chunks, decode of rows, and the rare preparation of a row.

All take (weights, kv, state, packed) and return kv and state, which they own: both are donated. `packed` is the
call's one upload, the last result its one download.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from jinfer.config import ModelConfig
from jinfer.engine.packing import Packing
from jinfer.engine.state import Column, DeviceState, row_params
from jinfer.models.context import KVPools, StepContext, rotary_tables
from jinfer.sampling.logprobs import in_blocks, logprobs
from jinfer.sampling.penalties import record_output, reset_row
from jinfer.sampling.sampler import RowParams, Sampled, sample
from jinfer.sampling.spread import spread
from jinfer.sharding import Layout


class PrefillFields(NamedTuple):
    """Upload of a prefill call: T tokens of Q chunks (T and Q padded).

    tokens: [T]. targets: [T], the token after each, for prompt logprobs. slots: [Q], 0 for padding chunks.
    starts, lengths: [Q], positions of each chunk. samples: [Q], 1 where a token is sampled at its end.
    records: [Q, F]. tables: [G, Q, M], the rows' whole page tables in every page group.
    """

    tokens: jax.Array
    targets: jax.Array
    slots: jax.Array
    starts: jax.Array
    lengths: jax.Array
    samples: jax.Array
    records: jax.Array
    tables: jax.Array


class DecodeFields(NamedTuple):
    """Upload of a decode call: slots [R] (0 for padding rows); [G, R] the page each row got in every page group, 0 for
    none, and its place in the row's table.
    """

    slots: jax.Array
    new_page: jax.Array
    new_page_index: jax.Array


class PrepareFields(NamedTuple):
    """Upload of a preparation: slot and prompt_length [1]; tokens [C], -1 padding; bias ids and values [X]."""

    slot: jax.Array
    prompt_length: jax.Array
    tokens: jax.Array
    bias_ids: jax.Array
    bias_values: jax.Array


@dataclasses.dataclass(frozen=True, eq=False)
class Programs:
    """The functions to compile, bound to one model and its static sizes.

    Attributes:
      graph: the split module; weights are its leaves, in order, with `treedef`.
      max_logprobs: C. steps: tokens a decode call generates. page_size: S. record_width: F. table_width: M.
      groups: G, page groups. max_context: most tokens of a row. max_bias: X.
    """

    graph: nnx.GraphDef
    treedef: jax.tree_util.PyTreeDef
    layout: Layout
    config: ModelConfig
    max_logprobs: int
    steps: int
    page_size: int
    record_width: int
    table_width: int
    groups: int
    max_context: int
    max_bias: int

    def prefill_packing(self, tokens: int, chunks: int) -> Packing[PrefillFields]:
        return Packing(PrefillFields, tokens=(tokens,), targets=(tokens,), slots=(chunks,), starts=(chunks,),
                       lengths=(chunks,), samples=(chunks,), records=(chunks, self.record_width),
                       tables=(self.groups, chunks, self.table_width))

    def decode_packing(self, rows: int) -> Packing[DecodeFields]:
        return Packing(DecodeFields, slots=(rows,), new_page=(self.groups, rows), new_page_index=(self.groups, rows))

    def prepare_packing(self) -> Packing[PrepareFields]:
        return Packing(PrepareFields, slot=(1,), prompt_length=(1,), tokens=(self.max_context,),
                       bias_ids=(self.max_bias,), bias_values=(self.max_bias,))

    def prefill(self, weights: list[jax.Array], kv: KVPools, state: DeviceState, packed: jax.Array, *, tokens: int,
                chunks: int) -> tuple[KVPools, DeviceState, jax.Array, jax.Array]:
        """Returns (kv, state, sampled [Q, 3 + 2C], prompt logprobs [T, 1 + 2C]); see `pack_sampled`."""
        model = nnx.merge(self.graph, jax.tree.unflatten(self.treedef, weights))
        fields = self.prefill_packing(tokens, chunks).unpack(packed)
        query_starts = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(fields.lengths, dtype=jnp.int32)])
        index = jnp.arange(tokens, dtype=jnp.int32)
        row = jnp.searchsorted(query_starts[1:], index, side="right").astype(jnp.int32)
        row = jnp.minimum(row, chunks - 1)
        valid = index < query_starts[-1]
        positions = jnp.where(valid, fields.starts[row] + index - query_starts[row], 0)
        ends = fields.starts + fields.lengths
        records = fields.records.at[:, Column.LENGTH].set(ends)
        rotary = rotary_tables(self.config, positions, records[row, Column.PROMPT_LENGTH])
        step = StepContext(rotary, tuple(fields.tables), query_starts, ends)
        hidden, kv = model(fields.tokens, kv, step, decode=False)

        state = state._replace(page_table=state.page_table.at[:, fields.slots].set(fields.tables))
        last = hidden[jnp.maximum(query_starts[1:] - 1, 0)]
        sampled, state = self._sample(
            model, last, state, records, fields.slots, position=ends, emits=fields.samples == 1)

        def score() -> jax.Array:
            def best(logits: jax.Array, targets: jax.Array) -> jax.Array:
                return pack_logprobs(*logprobs(logits, targets, max_logprobs=self.max_logprobs))

            return in_blocks(hidden, fields.targets, functools.partial(self._spread, best, model))

        asked = jnp.any(records[:, Column.PROMPT_LOGPROBS] == 1)
        scores = jax.lax.cond(asked, score, lambda: jnp.zeros((tokens, 1 + 2 * self.max_logprobs), jnp.int32))
        return kv, state, sampled, scores

    def decode(self, weights: list[jax.Array], kv: KVPools, state: DeviceState, packed: jax.Array, *,
               rows: int) -> tuple[KVPools, DeviceState, jax.Array]:
        """Returns (kv, state, sampled [n, R, 3 + 2C]); n is `steps`. Ended rows give token -1 and cost no attention."""
        model = nnx.merge(self.graph, jax.tree.unflatten(self.treedef, weights))
        fields = self.decode_packing(rows).unpack(packed)
        owner = jnp.where(fields.new_page > 0, fields.slots, 0)  # no new page: write into the null slot's table
        groups = jnp.arange(self.groups, dtype=jnp.int32)[:, None]
        table = state.page_table.at[groups, owner, fields.new_page_index].set(fields.new_page)
        state = state._replace(page_table=table.at[:, 0].set(0))
        page_tables = tuple(state.page_table[:, fields.slots])
        query_starts = jnp.arange(rows + 1, dtype=jnp.int32)

        def advance(kv: KVPools, state: DeviceState) -> tuple[KVPools, DeviceState, jax.Array]:
            records = state.rows[fields.slots]
            active = (records[:, Column.ACTIVE] == 1) & (fields.slots > 0)
            position = records[:, Column.LENGTH]
            lengths = jnp.where(active, position + 1, 0)
            rotary = rotary_tables(self.config, position, records[:, Column.PROMPT_LENGTH])
            step = StepContext(rotary, page_tables, query_starts, lengths)
            hidden, kv = model(records[:, Column.LAST_TOKEN], kv, step, decode=True)
            records = records.at[:, Column.LENGTH].add(active.astype(jnp.int32))
            sampled, state = self._sample(
                model, hidden, state, records, fields.slots, position=records[:, Column.LENGTH], emits=active)
            return kv, state, sampled

        if self.steps == 1:
            kv, state, sampled = advance(kv, state)
            return kv, state, sampled[None]

        def turn(i: jax.Array, carry: tuple[KVPools, DeviceState, jax.Array]) -> tuple[KVPools, DeviceState, jax.Array]:
            kv, state, out = carry
            kv, state, sampled = advance(kv, state)
            return kv, state, out.at[i].set(sampled)

        out = jnp.zeros((self.steps, rows, 3 + 2 * self.max_logprobs), jnp.int32)
        return jax.lax.fori_loop(0, self.steps, turn, (kv, state, out))

    def prepare(self, state: DeviceState, packed: jax.Array) -> DeviceState:
        """Sets what a penalised or biased request keeps beyond its record, before its first chunk."""
        fields = self.prepare_packing().unpack(packed)
        slot = fields.slot[0]
        return state._replace(
            counts=reset_row(state.counts, slot, fields.tokens, fields.prompt_length[0]),
            bias_ids=state.bias_ids.at[slot].set(fields.bias_ids),
            bias_values=state.bias_values.at[slot].set(
                jax.lax.bitcast_convert_type(fields.bias_values, jnp.float32)))

    def _spread(self, function: Callable[..., Any], model: Any, hidden: jax.Array, rows: Any,
                *shared: jax.Array) -> Any:
        """function(logits [R, V], rows, *shared) of hidden [R, D], each device with its share of the rows."""
        return spread(function, self.layout, self.config.vocab_size, model.logits(hidden), rows, *shared)

    def _sample(self, model: Any, hidden: jax.Array, state: DeviceState, records: jax.Array,
                slots: jax.Array, *, position: jax.Array, emits: jax.Array) -> tuple[jax.Array, DeviceState]:
        """Samples the token at `position` [R] of each row that emits; writes the rows back to the state."""
        params = row_params(records, position, state.bias_ids[slots], state.bias_values[slots], emits)

        def draw(logits: jax.Array, rows: tuple[RowParams, jax.Array], counts: jax.Array) -> jax.Array:
            return pack_sampled(sample(logits, rows[0], counts, rows[1], max_logprobs=self.max_logprobs))

        packed = self._spread(draw, model, hidden, (params, slots), state.counts)
        # What a row computes without being asked (padding, a row that has ended) may be anything, NaN too.
        token, finite = jnp.where(emits, packed[:, 0], -1), (packed[:, 1] == 1) | ~emits
        packed = packed.at[:, 0].set(token).at[:, 1].set(finite.astype(jnp.int32))
        stopped = jnp.any(params.stop_ids == token[:, None], axis=1)
        ended = stopped | (position + 1 >= records[:, Column.MAX_POSITION]) | ~finite
        records = records.at[:, Column.ACTIVE].set((emits & ~ended).astype(jnp.int32))
        records = records.at[:, Column.LAST_TOKEN].set(jnp.maximum(token, 0))
        counted = emits & ((params.presence != 0) | (params.frequency != 0) | (params.repetition != 1))
        state = state._replace(
            rows=state.rows.at[slots].set(records).at[0].set(0),
            counts=record_output(state.counts, slots, jnp.maximum(token, 0), counted))
        return packed, state


def pack_sampled(sampled: Sampled) -> jax.Array:
    """[R, 3 + 2C] int32: token (-1: none), finite, logprob, C ids, C logprobs; floats bit-cast.

    One array, so that devices that sampled a part of the rows exchange their results once.
    """
    return jnp.concatenate(
        [sampled.tokens[:, None], sampled.finite[:, None].astype(jnp.int32), _bits(sampled.logprob)[:, None],
         sampled.top_ids, _bits(sampled.top_logprobs)], axis=1)


def pack_logprobs(chosen: jax.Array, ids: jax.Array, values: jax.Array) -> jax.Array:
    """[R, 1 + 2C] int32: logprob of the chosen token, C ids, C logprobs; floats bit-cast."""
    return jnp.concatenate([_bits(chosen)[:, None], ids, _bits(values)], axis=1)


def _bits(x: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(x, jnp.int32)
