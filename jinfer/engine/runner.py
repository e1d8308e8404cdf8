"""Runner: owns what lives on the device, dispatches step plans, and collects their results one step late."""

import dataclasses
import itertools
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jinfer.engine.catalog import Key, ProgramCatalog
from jinfer.engine.host_store import HostStore, Transfer
from jinfer.engine.packing import Packing
from jinfer.engine.page_moves import COPIES, Payload, blocks
from jinfer.engine.state import DeviceState, record
from jinfer.models.context import KVPages, KVPools
from jinfer.observe.metrics import Metrics
from jinfer.scheduler import Request, StepPlan
from jinfer.scheduler.plan import PageCopy, Received


@dataclasses.dataclass(slots=True)
class Pending:
    """A dispatched plan and its results, still on the device or on their way to the host."""

    plan: StepPlan
    moved: jax.Array | None = None  # ready when the pages that came from outside are in the pool
    prefill: jax.Array | None = None  # [Q, 3 + 2C]
    scores: jax.Array | None = None  # [T, 1 + 2C], only if a chunk asked for prompt logprobs
    decode: jax.Array | None = None  # [n, R, 3 + 2C]
    dispatched: float = 0.0
    prefill_seconds: float | None = None  # what the calls took, once they are collected
    decode_seconds: float | None = None

    def is_ready(self) -> bool:
        """All calls are done."""
        return all(x.is_ready() for x in jax.tree.leaves((self.moved, self.prefill, self.scores, self.decode)))


@dataclasses.dataclass(frozen=True, slots=True)
class Sampled:
    """Results on the host, one row a chunk or decode row; see programs.pack_sampled.

    tokens, finite: [.., rows] int32. logprob: [.., rows] float32. top_ids, top_logprobs: [.., rows, C].
    """

    tokens: np.ndarray
    finite: np.ndarray
    logprob: np.ndarray
    top_ids: np.ndarray
    top_logprobs: np.ndarray

    @classmethod
    def unpack(cls, packed: np.ndarray) -> "Sampled":
        count = (packed.shape[-1] - 3) // 2
        return cls(packed[..., 0], packed[..., 1], packed[..., 2].view(np.float32), packed[..., 3 : 3 + count],
                   packed[..., 3 + count :].view(np.float32))


class Runner:
    """The device side of the engine. Not thread-safe: one loop drives it."""

    def __init__(self, catalog: ProgramCatalog, weights: list[jax.Array], pages: tuple[int, ...], metrics: Metrics):
        self.catalog = catalog
        self.weights = weights
        self.pages = pages
        self.metrics = metrics
        self.kv: KVPools = zeros(catalog.abstract_kv(pages))
        self.state: DeviceState = zeros(catalog.abstract_state())
        self.host = HostStore(catalog.programs.layout, catalog.page_bytes())
        self._packings: dict[Key, Packing] = {}
        self._records: dict[Request, np.ndarray] = {}
        self._ready = 0.0  # when the device finished the last collected call

    def dispatch(self, plan: StepPlan) -> Pending:
        """Starts a plan's calls and returns at once. Under a transfer guard: only the uploads named here happen.

        What the plan moves takes effect in this order: outs, ins, received, copies (one after another), then the calls.
        Nothing waits for it, except where more pages are on their way to or from the host than HostStore allows.
        """
        pending = Pending(plan)
        with jax.transfer_guard("disallow"):
            if plan.outs:
                self.metrics.pages_swapped_out += len(plan.outs)
                self.metrics.swap_out_bytes += self.host.save(
                    plan.outs, lambda move: self._gather(move.group, (move.page,)))
            if plan.ins:
                self.metrics.pages_swapped_in += len(plan.ins)
                self.metrics.swap_in_bytes += self.host.load(
                    plan.ins, lambda move, page: self._scatter(move.group, (move.page,), page, pending))
            for received in plan.received:
                self._receive(received, pending)
            if plan.copies:
                self._copy(plan.copies)
            if plan.chunks:
                self._prefill(plan, pending)
            if plan.rows:
                self._decode(plan, pending)
        for result in (pending.prefill, pending.scores, pending.decode):
            if result is not None:
                result.copy_to_host_async()
        pending.dispatched = time.perf_counter()
        return pending

    def collect(self, pending: Pending) -> tuple[Sampled | None, np.ndarray | None, Sampled | None]:
        """Waits for a plan's results: (prefill [Q], prompt scores [T, 1 + 2C], decode [n, R])."""
        metrics, prefill, scores, decode = self.metrics, None, None, None
        start = max(self._ready, pending.dispatched)
        if pending.moved is not None:  # the calls waited for them; it is not what they take
            pending.moved.block_until_ready()
            now = time.perf_counter()
            metrics.move_seconds += max(0.0, now - start)
            start = max(start, now)
        if pending.prefill is not None:
            prefill = Sampled.unpack(np.asarray(pending.prefill))
            if pending.scores is not None:
                scores = np.asarray(pending.scores)
            now = time.perf_counter()
            pending.prefill_seconds = now - start
            metrics.prefill_seconds += pending.prefill_seconds
            start = now
        if pending.decode is not None:
            decode = Sampled.unpack(np.asarray(pending.decode))
            now = time.perf_counter()
            pending.decode_seconds = now - start
            metrics.decode_seconds += pending.decode_seconds
            start = now
        self._ready = start
        return prefill, scores, decode

    def transfers(self) -> list[Transfer]:
        """Copies between host and devices that have ended since the last call: what the link achieves."""
        found = self.host.transfers()
        self.metrics.swap_seconds += sum(transfer.seconds for transfer in found)
        return found

    def export(self, pages: Sequence[Sequence[int]]) -> Payload:
        """Starts to take pages out of the pool, for another engine; behind the calls dispatched so far.

        Args:
          pages: of each page group, in order of position; 0 is none, it is left out.
        """
        taken: list[tuple[KVPages, ...]] = []
        places: list[tuple[tuple[int, ...], ...]] = []
        with jax.transfer_guard("disallow"):
            for group, each in enumerate(pages):
                parts = tuple(tuple(part) for part in blocks([i for i, page in enumerate(each) if page]))
                taken.append(tuple(self._gather(group, [each[i] for i in part]) for part in parts))
                places.append(parts)
        return Payload(tuple(taken), tuple(places))

    def place(self, payload: Payload) -> Payload:
        """Starts to bring another engine's pages onto this one's devices."""
        return jax.device_put(payload, self.catalog.programs.layout.sharding(None, None, "kv_heads"))

    def forget(self, request: Request) -> None:
        """A request ended; what the host keeps for it goes."""
        self._records.pop(request, None)

    def close(self) -> None:
        """Frees the arrays of devices and host."""
        self.host.close()
        for array in jax.tree.leaves((self.weights, self.kv, self.state)):
            array.delete()

    def _packing(self, key: Key) -> Packing:
        if key not in self._packings:
            self._packings[key] = self.catalog.packing(key)
        return self._packings[key]

    def _call(self, key: Key, vector: np.ndarray, *arguments: Any) -> Any:
        """Runs a program. The vector is the one implicit transfer a call makes: device_put costs ten times more."""
        compiled = self.catalog.get(key, self.pages)
        with jax.transfer_guard_host_to_device("allow"):
            return compiled(*arguments, vector)

    def _gather(self, group: int, pages: Sequence[int]) -> KVPages:
        key = Key("gather", len(pages), group)
        vector, fields = self._packing(key).empty()
        fields.pages[:] = pages
        return self._call(key, vector, self.kv[group])

    def _scatter(self, group: int, pages: Sequence[int], block: KVPages, pending: Pending) -> jax.Array:
        key = Key("scatter", len(pages), group)
        vector, fields = self._packing(key).empty()
        fields.pages[:] = pages
        pool, pending.moved = self._call(key, vector, self.kv[group], block)
        self.kv = (*self.kv[:group], pool, *self.kv[group + 1 :])
        return pending.moved

    def _receive(self, received: Received, pending: Pending) -> None:
        assert received.request.given is not None
        payload: Payload = received.request.given.payload
        for group, pages in enumerate(received.pages):
            for block, places in zip(payload.blocks[group], payload.places[group], strict=True):
                self._scatter(group, [pages[i] for i in places], block, pending)  # to the null page what nobody wants

    def _copy(self, copies: Sequence[PageCopy]) -> None:
        self.metrics.forked_pages += len(copies)
        key = Key("copy", COPIES)
        for batch in itertools.batched(copies, COPIES):
            vector, fields = self._packing(key).empty()
            for move in batch:
                i = fields.counts[move.group]
                fields.sources[move.group, i], fields.targets[move.group, i] = move.source, move.target
                fields.counts[move.group] += 1
            self.kv = self._call(key, vector, self.kv)

    def _prefill(self, plan: StepPlan, pending: Pending) -> None:
        buckets = self.catalog.buckets
        total = sum(chunk.length for chunk in plan.chunks)
        size = buckets.prefill_size(total)
        vector, fields = self._packing(Key("prefill", size)).empty()
        begin = 0
        scored = False
        for i, chunk in enumerate(plan.chunks):
            request, end = chunk.request, begin + chunk.length
            if chunk.joins:
                self._join(request, chunk.slot)
            fields.tokens[begin:end] = request.tokens(chunk.start, chunk.start + chunk.length)
            if request.scores_prompt:
                scored = True
                following = request.tokens(chunk.start + 1, chunk.start + chunk.length + 1)
                fields.targets[begin : begin + len(following)] = following
            fields.slots[i] = chunk.slot
            fields.starts[i] = chunk.start
            fields.lengths[i] = chunk.length
            fields.samples[i] = chunk.samples
            fields.records[i] = self._records[request]
            for table, pages in zip(fields.tables, request.pages, strict=True):
                table[i, : len(pages)] = pages
            begin = end
        self.kv, self.state, pending.prefill, scores = self._call(
            Key("prefill", size), vector, self.weights, self.kv, self.state)
        pending.scores = scores if scored else None
        self.metrics.prefill_calls += 1
        self.metrics.prefill_tokens += total
        self.metrics.padded_prefill_tokens += size - total

    def _decode(self, plan: StepPlan, pending: Pending) -> None:
        count = len(plan.rows)
        size = self.catalog.buckets.decode_size(count)
        vector, fields = self._packing(Key("decode", size)).empty()
        fields.slots[:count] = [row.slot for row in plan.rows]
        for i, row in enumerate(plan.rows):
            for group, index, page in row.new_pages:
                fields.new_page_index[group, i], fields.new_page[group, i] = index, page
        self.kv, self.state, pending.decode = self._call(
            Key("decode", size), vector, self.weights, self.kv, self.state)
        self.metrics.decode_calls += 1
        self.metrics.padded_decode_rows += size - count

    def _join(self, request: Request, slot: int) -> None:
        """A request (re)enters a slot: its record is kept until it ends, rare state goes up on its own."""
        programs = self.catalog.programs
        if request not in self._records:
            self._records[request] = record(request, programs.record_width)
        params = request.params
        if not (params.penalised or params.logit_bias):
            return
        vector, fields = self._packing(Key("prepare", 0)).empty()
        fields.slot[0] = slot
        fields.prompt_length[0] = len(request.prompt)
        fields.tokens[:] = -1
        fields.tokens[: request.length] = request.tokens(0, request.length)
        fields.bias_ids[:] = -1
        fields.bias_ids[: len(params.logit_bias)] = list(params.logit_bias)
        fields.bias_values[: len(params.logit_bias)] = np.array(
            list(params.logit_bias.values()), np.float32).view(np.int32)
        self.state = self._call(Key("prepare", 0), vector, self.state)


def zeros(abstract):
    """Arrays of zeros made on the devices, never on the host. Zeros, so that no stale NaN meets a mask."""
    shardings = jax.tree.map(lambda x: x.sharding, abstract)
    return jax.jit(lambda: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), abstract), out_shardings=shardings)()

