"""Roofline: how long a prefill or a decode call takes on a device, from what it reads and computes.

A call is a dense part (products with weights) and an attention part for each layer; either takes the longer of its
bytes over the bandwidth and its operations over the peak, each at the share of it that programs reach (Williams et
al., doi 10.1145/1498765.1498785). They follow each other, so their times are added, as are collectives.
"""

import dataclasses
import math
from collections.abc import Sequence
from operator import attrgetter
from typing import Self

from jinfer.config.device import DeviceConfig
from jinfer.config.engine import EngineConfig
from jinfer.config.model import ModelConfig
from jinfer.engine.buckets import Buckets
from jinfer.errors import LayoutError
from jinfer.kv.groups import page_groups
from jinfer.plan.sizes import ModelSizes
from jinfer.scheduler.plan import Chunk, DecodeRow

BYTES = {"float32": 4, "bfloat16": 2, "int8": 1}
POSITION = attrgetter("position")
LANES = 128  # a TPU's pools pad the last axis to them


@dataclasses.dataclass(frozen=True, slots=True)
class Shard:
    """One device's part of a model: bytes it holds, reads, and operations of a token.

    Attributes:
      weights: bytes of parameters. dense: bytes of products every token takes, the head not among them.
      head: bytes of the output head. expert: bytes of one routed expert, all layers. page: bytes of a page, by page
        group. position: bytes a position caches, by page group.
      product: operations of a token in products, the head not among them; head_product: of a sampled one in the head.
      scores: operations of a query for each position it sees, of one layer. layers: by page group.
      sums: collectives of a step. sum_width: bytes of a token in each.
    """

    weights: int
    dense: float
    head: float
    expert: float
    page: tuple[int, ...]
    position: tuple[int, ...]
    product: float
    head_product: float
    scores: float
    layers: tuple[int, ...]
    sums: int
    sum_width: float
    ranks: int

    @classmethod
    def of(cls, model: ModelConfig, config: EngineConfig, device: DeviceConfig) -> Self:
        """config: resolved (config.resolve). Raises LayoutError if the mesh does not divide the heads."""
        sizes = ModelSizes.of(model)

        def degree(axis: str) -> int:
            name = config.layout.rules.get(axis)
            return 1 if name is None else config.layout.mesh[name]

        heads, ffn, vocab = degree("kv_heads"), degree("ffn"), degree("vocab")
        if model.num_heads % heads or (model.cache_heads % heads and heads % model.cache_heads):
            raise LayoutError(f"layout: {model.num_heads} query heads and {model.cache_heads} kv heads cannot be split "
                              f"over {heads} ranks")
        plain = BYTES[config.dtype]
        each = BYTES[config.quantization or config.dtype]
        dense = each * (sizes.attention / heads + sizes.dense / ffn) + each * sizes.latent + plain * sizes.small
        expert = each * sizes.expert / ffn
        table = each * sizes.embedding / vocab
        groups = page_groups(model.layer_kinds)
        width = model.cache_width
        if device.platform == "tpu":
            width = -(-width // LANES) * LANES
        cached = width * (max(model.cache_heads, heads) // heads) * (1 if model.latent else 2) * BYTES[config.kv_dtype]
        position = tuple(len(group.layers) * cached for group in groups)
        latent = model.latent
        reach = 2 * latent.kv_rank + latent.rope_dim if latent else 2 * model.head_dim
        return cls(
            weights=round(dense + expert * sizes.experts + table * (1 if model.tie_embeddings else 2)),
            dense=dense, head=table, expert=expert, page=tuple(p * config.page_size for p in position),
            position=position,
            product=2.0 * (sizes.attention / heads + (sizes.dense + sizes.expert * sizes.active) / ffn + sizes.latent),
            head_product=2.0 * sizes.embedding / vocab, scores=2.0 * model.num_heads / heads * reach,
            layers=tuple(len(group.layers) for group in groups),
            sums=model.num_layers * ((heads > 1) * (1 + (model.qk_norm == "all")) + (ffn > 1)) + 3 * (vocab > 1),
            sum_width=float(plain * model.hidden_size), ranks=math.prod(config.layout.mesh.values()))


@dataclasses.dataclass(frozen=True, slots=True)
class Roofline:
    """Seconds of calls on one device of a mesh. Calls take the padded size of their bucket."""

    shard: Shard
    sizes: ModelSizes
    device: DeviceConfig
    buckets: Buckets
    windows: tuple[int | None, ...]
    int8: bool

    @classmethod
    def of(cls, model: ModelConfig, config: EngineConfig, device: DeviceConfig) -> Self:
        """config: resolved (config.resolve)."""
        buckets = Buckets.build(prefill_tokens=config.prefill_tokens, max_rows=config.max_rows, smallest_rows=1)
        return cls(Shard.of(model, config, device), ModelSizes.of(model), device, buckets,
                   tuple(group.window for group in page_groups(model.layer_kinds)), config.quantization == "int8")

    def prefill(self, chunks: Sequence[Chunk]) -> float:
        """Seconds of a prefill call."""
        shard = self.shard
        tokens = sum(chunk.length for chunk in chunks)
        spans = [(chunk.start, chunk.start + chunk.length) for chunk in chunks]
        operations = bytes_read = 0.0
        for window, layers, position in zip(self.windows, shard.layers, shard.position, strict=True):
            operations += layers * sum(pairs_seen(start, stop, window) for start, stop in spans)
            bytes_read += position * sum(stop if window is None else min(stop, window + stop - start)
                                         for start, stop in spans)
        return self._call(self.buckets.prefill_size(tokens), sum(chunk.final for chunk in chunks),
                          operations, bytes_read)

    def decode(self, rows: Sequence[DecodeRow], steps: int) -> float:
        """Seconds of a decode call that advances its rows by `steps` positions."""
        shard = self.shard
        ahead = (steps + 1) / 2  # of the first position, in the mean
        operations = bytes_read = 0.0
        for window, layers, position in zip(self.windows, shard.layers, shard.position, strict=True):
            if window is None:
                seen = sum(map(POSITION, rows)) + ahead * len(rows)
            else:
                seen = float(sum([window if row.position >= window else row.position + 1 for row in rows]))
            operations += layers * seen
            bytes_read += position * seen
        size = self.buckets.decode_size(len(rows))
        step = self._call(size, size, operations, bytes_read)
        return self.device.call_seconds + steps * (step - self.device.call_seconds)

    def _call(self, tokens: int, sampled: int, pairs: float, kv_bytes: float) -> float:
        """pairs: (query, position) of all layers."""
        shard, device = self.shard, self.device
        share = device.efficiency
        bandwidth = device.bandwidth * share.bandwidth
        peak = device.peak(self.int8) * share.compute
        weights = shard.dense + shard.expert * self.sizes.experts_hit(tokens) + (shard.head if sampled else 0.0)
        products = shard.product * tokens + shard.head_product * sampled
        dense = max(weights / bandwidth, products / peak)
        attention = max(kv_bytes / bandwidth, shard.scores * pairs / (device.flops * share.attention))
        return dense + attention + self._collectives(tokens) + device.call_seconds

    def _collectives(self, tokens: int) -> float:
        """All-reduces in rings: each device sends 2 (n - 1) / n of the bytes."""
        shard, device = self.shard, self.device
        if shard.ranks == 1 or not shard.sums:
            return 0.0
        rate = (device.interconnect or device.network) * device.efficiency.interconnect
        sent = 2 * (shard.ranks - 1) / shard.ranks * shard.sum_width * tokens
        return shard.sums * (device.interconnect_latency + sent / rate)


def pairs_seen(start: int, stop: int, window: int | None) -> int:
    """Pairs of a query at start..stop-1 and a position it sees, itself included."""
    if window is None or stop <= window:
        return (start + 1 + stop) * (stop - start) // 2
    if start >= window:
        return window * (stop - start)
    return pairs_seen(start, window, None) + window * (stop - window)
