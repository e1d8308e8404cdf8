"""Assembly: a model and a configuration made into programs, before there are weights."""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx

from jinfer.config import EngineConfig, ModelConfig
from jinfer.config.resolve import resolve
from jinfer.engine.buckets import Buckets
from jinfer.engine.catalog import ProgramCatalog, Weights, shard_bytes
from jinfer.engine.programs import Programs
from jinfer.engine.state import record_width
from jinfer.errors import ConfigError
from jinfer.kv import Demand, pages_for, pool_pages
from jinfer.kv.groups import page_groups
from jinfer.models import build_model
from jinfer.models.parameter import Parameter, Precision
from jinfer.observe.metrics import Metrics
from jinfer.sharding import Layout
from pallas_kernels.pages import check_tiling, pool_shapes


@dataclasses.dataclass(frozen=True, slots=True)
class Assembly:
    """What the engine runs and a plan compiles, for devices that may not be here.

    Attributes:
      config: every `auto` resolved. parameters: the weights, in the order programs take them.
    """

    config: EngineConfig
    model: ModelConfig
    layout: Layout
    programs: Programs
    buckets: Buckets
    parameters: list[Parameter]

    @classmethod
    def build(cls, model: ModelConfig, config: EngineConfig, layout: Layout) -> "Assembly":
        """Raises LayoutError or ConfigError where the parts do not fit together."""
        layout.check(model)
        config = resolve(config, model, layout.platform)
        assert config.max_context is not None
        if layout.platform == "tpu":
            try:
                check_tiling("KV", pool_shapes(1, layout.kv_heads(model), config.page_size, model.cache_width,
                                               config.kv_dtype, "tpu"))
            except ValueError as error:
                raise ConfigError(f"page_size: {error}") from None
        precision = Precision.of(config.dtype, config.quantization)
        graph, abstract = nnx.split(build_model(model, layout, precision))
        parameters, treedef = jax.tree.flatten(abstract)
        programs = Programs(
            graph=graph, treedef=treedef, layout=layout, config=model, max_logprobs=config.max_logprobs,
            steps=config.decode_steps, page_size=config.page_size, record_width=record_width(config.max_stop_ids),
            table_width=pages_for(config.max_context, config.page_size), max_context=config.max_context,
            groups=len(page_groups(model.layer_kinds)), max_bias=config.max_logit_bias)
        narrow_cpu = layout.platform == "cpu" and precision.weight_dtype.itemsize < 4
        buckets = Buckets.build(prefill_tokens=config.prefill_tokens, max_rows=config.max_rows,
                                smallest_rows=2 if narrow_cpu else 1)
        return cls(config, model, layout, programs, buckets, parameters)

    def demand(self) -> Demand:
        """What the page groups can use of a pool."""
        config = self.config
        assert config.max_context is not None
        return Demand(windows=tuple(group.window for group in page_groups(self.model.layer_kinds)),
                      page_size=config.page_size, max_rows=config.max_rows, max_context=config.max_context,
                      decode_steps=config.decode_steps, prefill_tokens=config.prefill_tokens,
                      max_chunks=self.buckets.max_chunks)

    def abstract_weights(self) -> list[jax.ShapeDtypeStruct]:
        """Shapes, dtypes and shardings the weights will have on the devices."""
        return [jax.ShapeDtypeStruct(p.shape, p.dtype, sharding=self.layout.sharding(*p.axes))
                for p in self.parameters]

    def catalog(self, weights: Weights, metrics: Metrics, exchanges: bool = False) -> ProgramCatalog:
        """The programs for these weights, none compiled yet.

        exchanges: pages go to other engines or come from them; with a host tier they leave the pool anyway.
        """
        return ProgramCatalog(self.programs, self.buckets, weights, jnp.dtype(self.config.kv_dtype),
                              rows=self.config.max_rows, metrics=metrics, forbid=self.config.forbid_compilation,
                              exchanges=exchanges or self.config.host_kv_gb > 0)


def pages_in(free: int, catalog: ProgramCatalog, demand: Demand) -> tuple[int, ...]:
    """P of each page group of a pool in `free` bytes a device. Raises ConfigError if one sequence would not fit."""
    one = catalog.abstract_kv((1,) * catalog.programs.groups)
    return pool_pages(free, [sum(shard_bytes(x) for x in jax.tree.leaves(group)) for group in one], demand)


def pool_bytes(memory: int, catalog: ProgramCatalog) -> int:
    """What `memory` bytes a device leave for the pool: all but weights, state and the largest temporaries."""
    kept = sum(shard_bytes(x) for x in jax.tree.leaves((catalog.weights, catalog.abstract_state())))
    return memory - kept - catalog.workspace()
