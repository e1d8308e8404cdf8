"""From a model argument and a configuration to the parts of an engine."""

import dataclasses
import os
import time
from collections.abc import Callable
from pathlib import Path

import jax

from jinfer.config import EngineConfig, LayoutConfig, ModelConfig
from jinfer.engine.admission import Admission
from jinfer.engine.assembly import Assembly, pages_in, pool_bytes
from jinfer.engine.backend import device_memory, prepare_backend, use_compilation_cache
from jinfer.engine.catalog import ProgramCatalog
from jinfer.engine.fleet import Fleet
from jinfer.engine.handover import Handover
from jinfer.engine.runner import Runner
from jinfer.engine.worker import Role, Worker
from jinfer.errors import ConfigError, LayoutError
from jinfer.kv import HostTier, PagePool
from jinfer.observe.metrics import Metrics
from jinfer.scheduler import Scheduler
from jinfer.scheduler.policy import find_policy
from jinfer.sharding import Layout
from jinfer.tokenizer import Tokenizer, load_tokenizer
from jinfer.weights import open_checkpoint, resolve_model
from jinfer.weights.checkpoint import TensorReader
from jinfer.weights.place import check_names, place

Progress = Callable[[str], None]


@dataclasses.dataclass(frozen=True, slots=True)
class Parts:
    """What an Engine drives. config has every `auto` resolved."""

    config: EngineConfig
    model: ModelConfig
    tokenizer: Tokenizer | None
    admission: Admission
    fleet: Fleet
    metrics: Metrics


def build(model: str | Path, config: EngineConfig, progress: Progress) -> Parts:
    """Checks first, then loads, compiles, sizes the pools and allocates them, for one worker after another."""
    progress("finding the model")
    def downloading(what: str, done: int, total: int) -> None:
        progress(f"{what} {done * 100 // max(total, 1)}%")

    path = resolve_model(model, on_progress=downloading)
    checkpoint = open_checkpoint(path)
    groups = device_groups(config)
    assemblies = [Assembly.build(checkpoint.config, config, layout) for _, layout in groups]
    config = assemblies[0].config
    tokenizer = _tokenizer(path)
    prepare_backend(groups[0][1].mesh)
    use_compilation_cache(config.compilation_cache, groups[0][1].mesh)
    for parts in assemblies:
        check_names(parts.parameters, checkpoint.reader, tied_head=checkpoint.config.tie_embeddings)

    metrics = Metrics(load_bytes=checkpoint.reader.nbytes() * len(groups))
    kept_free = 0 if config.disaggregation is None else int(config.disaggregation.transfer_gb * 2**30)
    devices = sum(layout.mesh.size for _, layout in groups)
    workers = []
    for (role, _), parts in zip(groups, assemblies, strict=True):
        weights = _load(parts, checkpoint.reader, metrics, progress)
        catalog = parts.catalog(weights, metrics, exchanges=role != "both")
        demand = parts.demand()
        pages = (demand.explicit(config.kv_pages) if config.kv_pages
                 else _size_pool(parts, catalog, devices, kept_free, progress))
        if config.warmup:
            catalog.warm_up(pages, progress)
        runner = Runner(catalog, weights, pages, metrics)
        host = HostTier(int(config.host_kv_gb * 2**30), catalog.page_bytes()) if config.host_kv_gb else None
        scheduler = Scheduler(
            [PagePool(count, config.page_size, window) for count, window in zip(pages, demand.windows, strict=True)],
            max_rows=config.max_rows, max_context=demand.context(pages), prefill_tokens=config.prefill_tokens,
            max_chunks=parts.buckets.max_chunks, prefill_sizes=parts.buckets.prefill, decode_steps=config.decode_steps,
            decode_rows=0 if role == "prefill" else config.decode_rows, step_tokens=config.step_tokens,
            itl_target=config.itl_target, policy=find_policy(config.policy, config.ageing),
            reserving=config.admission == "reserving", max_preemptions=config.max_preemptions,
            max_waiting=config.max_waiting, host=host)
        metrics.weight_bytes += sum(w.nbytes for w in weights)
        metrics.kv_bytes += sum(x.nbytes for x in jax.tree.leaves(runner.kv))
        metrics.state_bytes += sum(x.nbytes for x in jax.tree.leaves(runner.state))
        workers.append(Worker(scheduler, runner, role))
    max_context = min(worker.scheduler.max_context for worker in workers)  # a sequence cannot outgrow a pool
    eos = tuple(dict.fromkeys(checkpoint.config.eos_ids + (tokenizer.eos_ids if tokenizer else ())))
    if len(eos) > config.max_stop_ids:
        raise ConfigError(f"max_stop_ids: {config.max_stop_ids} is less than the model's {len(eos)} end tokens")
    admission = Admission(config, checkpoint.config, tokenizer, eos, max_context)
    fleet = Fleet(workers, Handover(kept_free, metrics), metrics)
    fleet.gauge(unfilled=True)
    if config.warmup:
        fleet.warm_up()
    return Parts(config, checkpoint.config, tokenizer, admission, fleet, metrics)


def device_groups(config: EngineConfig) -> list[tuple[Role, Layout]]:
    """Role and layout of each worker; their devices follow each other. Raises LayoutError if there are too few."""
    split = config.disaggregation
    if split is None:
        return [("both", Layout.build(config.layout))]
    devices = jax.devices()
    if split.devices > len(devices):
        raise LayoutError(f"disaggregation: needs {split.devices} devices, {len(devices)} present")
    wanted: list[tuple[Role, LayoutConfig, int]] = [("prefill", split.prefill, split.prefill_workers),
                                                    ("decode", split.decode, split.decode_workers)]
    groups: list[tuple[Role, Layout]] = []
    for role, layout, count in wanted:
        for _ in range(count):
            groups.append((role, Layout.build(layout, devices)))
            devices = devices[layout.devices :]
    return groups


def _load(parts: Assembly, reader: TensorReader, metrics: Metrics, progress: Progress) -> list[jax.Array]:
    progress("loading weights")
    began = time.perf_counter()

    def loading(done: int, total: int) -> None:
        rate = done / (time.perf_counter() - began) / 1e9
        progress(f"loading weights {done / 1e9:.1f}/{total / 1e9:.1f} GB, {rate:.1f} GB/s")

    weights = place(parts.parameters, reader, parts.layout, loading)
    metrics.load_seconds += time.perf_counter() - began
    return weights


def _size_pool(parts: Assembly, catalog: ProgramCatalog, devices: int, kept_free: int,
               progress: Progress) -> tuple[int, ...]:
    """Pages from what is left after weights, state and the largest program's temporaries.

    devices: all that share a CPU's memory. kept_free: bytes on each device for pages outside the pool.
    """
    config, mesh = parts.config, parts.layout.mesh
    if config.kv_memory_gb is not None:
        return pages_in(int(config.kv_memory_gb * 2**30), catalog, parts.demand())
    memory = device_memory(mesh.devices.flat[0], config.memory_utilization)
    if parts.layout.platform == "cpu":  # a share for the pools alone, which all virtual devices divide
        return pages_in(memory // devices, catalog, parts.demand())
    progress("measuring programs")
    return pages_in(pool_bytes(memory - kept_free, catalog), catalog, parts.demand())


def _tokenizer(path: Path) -> Tokenizer | None:
    """A folder without any tokenizer file serves token ids only; a broken tokenizer is an error."""
    if path.is_dir():
        names = {entry.name for entry in os.scandir(path)}
        if "tokenizer.json" not in names and not any(name.endswith(".model") for name in names):
            return None
    return load_tokenizer(path)
