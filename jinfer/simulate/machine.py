"""Machine: a model on devices that need not be here: step times, pools sized as the engine sizes them, links."""

import dataclasses
from typing import Self

from jinfer.config.device import DeviceConfig, ProfileConfig
from jinfer.config.engine import EngineConfig
from jinfer.config.model import ModelConfig
from jinfer.config.resolve import resolve
from jinfer.errors import ConfigError
from jinfer.kv import Demand, pool_pages
from jinfer.kv.groups import page_groups
from jinfer.plan.roofline import Roofline, Shard
from jinfer.simulate.cost import Link, Measured, StepTime


@dataclasses.dataclass(frozen=True, slots=True)
class Machine:
    """Attributes:
      config: resolved. shard: a device's part of the model. cost: step times.
      demand: what page groups can use. pages: P of each.
      max_context: tokens of the longest sequence that pool and model hold.
    """

    model: ModelConfig
    config: EngineConfig
    device: DeviceConfig
    shard: Shard
    cost: StepTime
    demand: Demand
    pages: tuple[int, ...]
    max_context: int

    @classmethod
    def build(cls, model: ModelConfig, config: EngineConfig, device: DeviceConfig,
              profile: ProfileConfig | None = None) -> Self:
        """Raises ConfigError or LayoutError where model, configuration and device do not fit together."""
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
        cost: StepTime = Measured(profile) if profile else roofline
        return cls(model, config, device, shard, cost, demand, pages, demand.context(pages))

    @property
    def pool_bytes(self) -> int:
        """Of the pool on one device."""
        return sum(count * each for count, each in zip(self.pages, self.shard.page, strict=True))

    def link(self, overlap: bool = True) -> Link:
        """A fresh one: it has a clock."""
        share = self.device.efficiency
        return Link(self.shard.page, self.device.host_link * share.link, self.device.network * share.interconnect,
                    self.device.bandwidth * share.bandwidth, overlap)

    def windows(self) -> tuple[int | None, ...]:
        return tuple(group.window for group in page_groups(self.model.layer_kinds))
