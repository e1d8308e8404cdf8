"""Machine: a model on devices that need not be here: step times, pools sized as the engine sizes them, links."""

import dataclasses
import math
from collections.abc import Iterable
from typing import Self

from jinfer.bench.jobs import Job
from jinfer.config.device import DeviceConfig, ProfileConfig
from jinfer.config.engine import EngineConfig
from jinfer.config.layout import DisaggregationConfig
from jinfer.config.model import ModelConfig
from jinfer.config.resolve import resolve
from jinfer.engine.buckets import Buckets
from jinfer.errors import ConfigError
from jinfer.kv import Demand, PagePool, pool_pages
from jinfer.kv.cost import SwapCost
from jinfer.kv.host import HostTier
from jinfer.plan.roofline import Roofline, Shard
from jinfer.scheduler import Scheduler
from jinfer.scheduler.policy import find_policy
from jinfer.simulate.cost import Link, Measured, StepTime
from jinfer.simulate.driver import Simulator
from jinfer.simulate.recorder import Recorder
from jinfer.simulate.worker import Worker


@dataclasses.dataclass(frozen=True, slots=True)
class Machine:
    """Attributes:
      config: resolved. shard: a device's part of the model. cost: step times.
      buckets: sizes of calls. demand: what page groups can use. pages: P of each.
      max_context: tokens of the longest sequence that pool and model hold.
      split: with workers that prefill and workers that decode this is one of the latter, prefill one of the former.
    """

    model: ModelConfig
    config: EngineConfig
    device: DeviceConfig
    shard: Shard
    cost: StepTime
    demand: Demand
    buckets: Buckets
    pages: tuple[int, ...]
    max_context: int
    split: DisaggregationConfig | None = None
    prefill: "Machine | None" = None

    @classmethod
    def build(cls, model: ModelConfig, config: EngineConfig, device: DeviceConfig,
              profile: ProfileConfig | None = None) -> Self:
        """Raises ConfigError or LayoutError where model, configuration and device do not fit together."""
        split = config.disaggregation
        if split is not None:
            kept = dataclasses.replace(device, reserve=device.reserve + split.transfer_gb * 2**30)
            alone = dataclasses.replace(config, disaggregation=None)
            prefill, decode = (cls.build(model, dataclasses.replace(alone, layout=layout), kept, profile)
                               for layout in (split.prefill, split.decode))
            most = min(prefill.max_context, decode.max_context)
            return dataclasses.replace(decode, max_context=most, split=split,
                                       prefill=dataclasses.replace(prefill, max_context=most))
        if config.max_context is None and model.rope.kind != "dynamic":
            config = dataclasses.replace(config, max_context=model.max_context)
        config = resolve(config, model, device.platform)
        assert config.max_context is not None
        shard = Shard.of(model, config, device)
        roofline = Roofline.of(model, config, device)
        demand = Demand(windows=roofline.windows, page_size=config.page_size, max_rows=config.max_rows,
                        max_context=config.max_context, decode_steps=config.decode_steps,
                        prefill_tokens=config.prefill_tokens, max_chunks=roofline.buckets.max_chunks)
        if config.kv_pages:
            pages = demand.explicit(config.kv_pages)
        elif config.kv_memory_gb is not None:
            pages = pool_pages(int(config.kv_memory_gb * 2**30), shard.page, demand)
        else:
            free = int(device.memory * config.memory_utilization - shard.weights - device.reserve)
            if free <= 0:
                raise ConfigError(f"device: {shard.weights / 2**30:.2f} GiB of weights and "
                                  f"{device.reserve / 2**30:.2f} GiB of reserve on each of {shard.ranks} devices leave "
                                  f"nothing of {device.memory * config.memory_utilization / 2**30:.2f} GiB for KV")
            pages = pool_pages(free, shard.page, demand)
        cost: StepTime = Measured(profile, roofline.buckets) if profile else roofline
        return cls(model, config, device, shard, cost, demand, roofline.buckets, pages, demand.context(pages))

    @property
    def pool_bytes(self) -> int:
        """Of the pool on one device."""
        return sum(count * each for count, each in zip(self.pages, self.shard.page, strict=True))

    def link(self, overlap: bool = True) -> Link:
        """A fresh one: it has a clock."""
        share = self.device.efficiency
        return Link(self.shard.page, self.device.host_link * share.link, self.device.network * share.interconnect,
                    self.device.bandwidth * share.bandwidth, overlap, self.shard.ranks)

    def scheduler(self, decode_rows: int | None = None) -> Scheduler:
        """A production scheduler with empty pools, built as the engine builds its own; 0 decode_rows only prefills."""
        config = self.config
        pools = [PagePool(count, config.page_size, window)
                 for count, window in zip(self.pages, self.demand.windows, strict=True)]
        together = [size * self.shard.ranks for size in self.shard.page]
        budget = int(config.host_kv_gb * 2**30)
        return Scheduler(
            pools, max_rows=config.max_rows, max_context=self.max_context, prefill_tokens=config.prefill_tokens,
            max_chunks=self.demand.max_chunks, prefill_sizes=self.buckets.prefill, decode_steps=config.decode_steps,
            decode_rows=config.decode_rows if decode_rows is None else decode_rows,
            step_tokens=config.step_tokens, itl_target=config.itl_target,
            policy=find_policy(config.policy, config.ageing), reserving=config.admission == "reserving",
            max_preemptions=config.max_preemptions, max_waiting=config.max_waiting,
            host=HostTier(budget, together) if budget else None,
            swap_cost=SwapCost(self.device.host_link * self.device.efficiency.link * self.shard.ranks))

    def workers(self, overlap: bool = True) -> list[Worker]:
        """One, or those that prefill and those that decode."""
        if self.prefill is None or self.split is None:
            return [Worker(self.scheduler(), self.cost, self.link(overlap))]
        first = self.prefill
        return ([Worker(first.scheduler(0), first.cost, first.link(overlap), "prefill")
                 for _ in range(self.split.prefill_workers)]
                + [Worker(self.scheduler(), self.cost, self.link(overlap), "decode")
                   for _ in range(self.split.decode_workers)])

    def simulate(self, jobs: Iterable[Job], *, stall: float = 0.2, overlap: bool = True,
                 lockstep: bool = False, workers: list[Worker] | None = None) -> Recorder:
        """Sends the jobs to one engine and returns what happened. stall, lockstep: see Simulator. overlap: see Link.

        workers: fresh ones to send them to instead; of several that do all, to the one with the fewest requests.
        """
        transfer = math.inf if self.split is None else self.split.transfer_gb * 2**30
        simulator = Simulator(workers or self.workers(overlap), host_seconds=self.device.host_seconds, stall=stall,
                              cache=self.config.prefix_cache, lockstep=lockstep, transfer=transfer)
        return simulator.run(jobs)

    @property
    def devices(self) -> int:
        """Of the engine, all workers together."""
        return self.shard.ranks if self.split is None else self.split.devices
