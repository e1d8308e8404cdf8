"""compile_steps: the engine's programs for devices that are not here, and what their HLO says about them."""

import dataclasses
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import jax

from jinfer.config import EngineConfig, ModelConfig
from jinfer.engine.assembly import Assembly, pages_in, pool_bytes
from jinfer.engine.catalog import Key, ProgramCatalog, shard_bytes
from jinfer.kv.groups import page_groups
from jinfer.observe.metrics import Metrics
from jinfer.plan import checks
from jinfer.plan.hlo import Module
from jinfer.sharding import Layout
from pallas_kernels.chips import chip

SMALL_WEIGHT = 2**20  # bytes; norms and biases may be copied


@dataclasses.dataclass(frozen=True, slots=True)
class StepReport:
    """One compiled program; bytes are those of one device.

    Attributes:
      seconds: to trace and compile it on this machine.
      arguments, aliased, temporaries, peak: bytes, as the compiler reports them; aliased ones are updated in place.
      collectives: exchanges between devices that every call makes, by kind (in a loop's body counted once).
      copies: what writes a weight or a layer's KV anew, and what of pool and state is not updated in place; a sound
        program has none.
    """

    key: Key
    seconds: float
    arguments: int
    aliased: int
    temporaries: int
    peak: int
    collectives: Counter[str]
    copies: list[str]


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """Bytes are those of one device.

    Attributes:
      memory: what jinfer may use. weights, state, pool: what it holds of that. pages: P of each page group.
      steps: the programs, in the order asked for.
    """

    memory: int
    weights: int
    state: int
    pool: int
    pages: tuple[int, ...]
    steps: dict[Key, StepReport]


def compile_steps(model: ModelConfig, config: EngineConfig, devices: Sequence[Any], *,
                  keys: Sequence[Key] | None = None, progress: Callable[[str], None] | None = None) -> Plan:
    """Compiles programs as the engine would, without weights, for attached devices or those of a topology.

    Args:
      config: with the layout; `auto`s are resolved for the devices' platform, the pool is sized from their memory.
      devices: see pallas_kernels.aot.topology.
      keys: which programs; None takes the largest prefill and the largest decode.
      progress: told what comes next.

    Raises:
      LayoutError, ConfigError: the parts do not fit together, or one sequence not into the memory.
    """
    parts = Assembly.build(model, config, Layout.build(config.layout, devices))
    catalog = parts.catalog(parts.abstract_weights(), Metrics())
    memory = int(chip(devices[0].device_kind).hbm * config.memory_utilization)
    if progress is not None:
        progress("sizing the pool")
    demand = parts.demand()
    pages = (demand.explicit(config.kv_pages) if config.kv_pages
             else pages_in(pool_bytes(memory, catalog), catalog, demand))
    steps = {}
    for key in keys or catalog.largest():
        if progress is not None:
            progress(f"compiling {key.kind}[{key.size}]")
        steps[key] = _compile(catalog, key, pages)
    return Plan(memory, weights=_bytes(catalog.weights), state=_bytes(catalog.abstract_state()),
                pool=_bytes(catalog.abstract_kv(pages)), pages=pages, steps=steps)


def expected_collectives(model: ModelConfig, config: EngineConfig) -> Counter[str]:
    """Exchanges of a prefill or decode call under tensor parallelism, by kind; what `StepReport.collectives` should be.

    A sum after each layer's attention and each layer's feed-forward network (that of shared experts travels with the
    routed ones'), one more where queries and keys are normalised over all heads; one after the embedding, of which a
    device has its part of the rows; logits change hands once, from a part of each row to a part of the rows, and the
    few numbers sampled from them are collected once. Not for int8 weights, whose sums are left to the partitioner.
    """

    def cut(axis: str) -> bool:
        name = config.layout.rules.get(axis)
        return name is not None and config.layout.mesh[name] > 1

    attention = 1 + (model.qk_norm == "all")
    sums = model.num_layers * (attention * cut("kv_heads") + cut("ffn")) + cut("vocab")
    counts = {"all-reduce": sums, "all-to-all": int(cut("vocab")), "all-gather": int(cut("vocab"))}
    return Counter({kind: count for kind, count in counts.items() if count})


def _compile(catalog: ProgramCatalog, key: Key, pages: tuple[int, ...]) -> StepReport:
    start = time.perf_counter()
    compiled = catalog.compile(key, pages)
    seconds = time.perf_counter() - start
    memory, module = compiled.memory_analysis(), Module(compiled.as_text() or "")
    assert memory is not None, "the compiler says nothing about memory"
    kv, state = catalog.abstract_kv(pages), catalog.abstract_state()
    numbers = _numbers(module)
    copies = checks.weight_copies(module, numbers["weights"], SMALL_WEIGHT)
    groups = page_groups(catalog.programs.config.layer_kinds)
    layer = min(shard_bytes(pool.k.data) // len(group.layers) for pool, group in zip(kv, groups, strict=True))
    copies += checks.pool_copies(module, numbers["kv"], layer)
    kept = numbers["kv"] + numbers["state"]
    copies += [f"{name} is not updated in place" for name in checks.not_donated(module, kept)]
    assert len(kept) == len(jax.tree.leaves((kv, state))), (kept, module.parameters())
    return StepReport(key, seconds, memory.argument_size_in_bytes, memory.alias_size_in_bytes,
                      memory.temp_size_in_bytes, memory.peak_memory_in_bytes, checks.collectives(module), copies)


def _numbers(module: Module) -> dict[str, list[int]]:
    """Numbers of the program's parameters by the argument they belong to."""
    numbers: dict[str, list[int]] = {"weights": [], "kv": [], "state": [], "packed": []}
    for number, parameter in sorted(module.parameters().items()):
        argument = next(name for name in numbers if parameter.source.startswith(name))
        numbers[argument].append(number)
    return numbers


def _bytes(arrays: Any) -> int:
    return sum(shard_bytes(x) for x in jax.tree.leaves(arrays))
