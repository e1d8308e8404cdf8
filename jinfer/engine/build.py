"""From a model argument and a configuration to the parts of an engine."""

import dataclasses
import os
import time
from collections.abc import Callable
from pathlib import Path

import jax

from jinfer.config import EngineConfig, ModelConfig
from jinfer.engine.admission import Admission
from jinfer.engine.assembly import Assembly, pages_in, pool_bytes
from jinfer.engine.backend import device_memory, prepare_backend, use_compilation_cache
from jinfer.engine.catalog import ProgramCatalog
from jinfer.engine.runner import Runner
from jinfer.errors import ConfigError
from jinfer.kv import HostTier, PagePool
from jinfer.observe.metrics import Metrics
from jinfer.scheduler import Scheduler
from jinfer.scheduler.policy import find_policy
from jinfer.sharding import Layout
from jinfer.tokenizer import Tokenizer, load_tokenizer
from jinfer.weights import open_checkpoint, resolve_model
from jinfer.weights.place import check_names, place

Progress = Callable[[str], None]


@dataclasses.dataclass(frozen=True, slots=True)
class Parts:
    """What an Engine drives. config has every `auto` resolved."""

    config: EngineConfig
    model: ModelConfig
    tokenizer: Tokenizer | None
    admission: Admission
    scheduler: Scheduler
    runner: Runner
    metrics: Metrics


def build(model: str | Path, config: EngineConfig, progress: Progress) -> Parts:
    """Checks first, then loads, compiles, sizes the pool and allocates it."""
    progress("finding the model")
    def downloading(what: str, done: int, total: int) -> None:
        progress(f"{what} {done * 100 // max(total, 1)}%")

    path = resolve_model(model, on_progress=downloading)
    checkpoint = open_checkpoint(path)
    layout = Layout.build(config.layout)
    parts = Assembly.build(checkpoint.config, config, layout)
    config = parts.config
    tokenizer = _tokenizer(path)
    prepare_backend(layout.mesh)
    use_compilation_cache(config.compilation_cache, layout.mesh)

    check_names(parts.parameters, checkpoint.reader, tied_head=checkpoint.config.tie_embeddings)
    progress("loading weights")
    metrics = Metrics(load_bytes=checkpoint.reader.nbytes())
    began = time.perf_counter()

    def loading(done: int, total: int) -> None:
        rate = done / (time.perf_counter() - began) / 1e9
        progress(f"loading weights {done / 1e9:.1f}/{total / 1e9:.1f} GB, {rate:.1f} GB/s")

    weights = place(parts.parameters, checkpoint.reader, layout, loading)
    metrics.load_seconds = time.perf_counter() - began
    metrics.weight_bytes = sum(w.nbytes for w in weights)
    catalog = parts.catalog(weights, metrics)
    demand = parts.demand()
    pages = demand.explicit(config.kv_pages) if config.kv_pages else _size_pool(parts, catalog, progress)
    if config.warmup:
        catalog.warm_up(pages, progress)
    runner = Runner(catalog, weights, pages, metrics)
    metrics.kv_bytes = sum(x.nbytes for x in jax.tree.leaves(runner.kv))
    metrics.page_bytes = tuple(sum(x.nbytes for x in jax.tree.leaves(group)) // count
                               for group, count in zip(runner.kv, pages, strict=True))
    metrics.state_bytes = sum(x.nbytes for x in jax.tree.leaves(runner.state))
    max_context = demand.context(pages)  # a sequence cannot outgrow the pool
    host = HostTier(int(config.host_kv_gb * 2**30), catalog.page_bytes()) if config.host_kv_gb else None
    scheduler = Scheduler(
        [PagePool(count, config.page_size, window) for count, window in zip(pages, demand.windows, strict=True)],
        max_rows=config.max_rows, max_context=max_context, prefill_tokens=config.prefill_tokens,
        max_chunks=parts.buckets.max_chunks, decode_steps=config.decode_steps, decode_rows=config.decode_rows,
        step_tokens=config.step_tokens, itl_target=config.itl_target,
        policy=find_policy(config.policy, config.ageing), reserving=config.admission == "reserving",
        max_preemptions=config.max_preemptions, max_waiting=config.max_waiting, host=host)
    metrics.count_pages(scheduler.pages.pools)
    eos = tuple(dict.fromkeys(checkpoint.config.eos_ids + (tokenizer.eos_ids if tokenizer else ())))
    if len(eos) > config.max_stop_ids:
        raise ConfigError(f"max_stop_ids: {config.max_stop_ids} is less than the model's {len(eos)} end tokens")
    admission = Admission(config, checkpoint.config, tokenizer, eos, max_context)
    return Parts(config, checkpoint.config, tokenizer, admission, scheduler, runner, metrics)


def _size_pool(parts: Assembly, catalog: ProgramCatalog, progress: Progress) -> tuple[int, ...]:
    """Pages from what is left after weights, state and the largest program's temporaries."""
    config, mesh = parts.config, parts.layout.mesh
    if config.kv_memory_gb is not None:
        return pages_in(int(config.kv_memory_gb * 2**30), catalog, parts.demand())
    memory = device_memory(mesh.devices.flat[0], config.memory_utilization)
    if parts.layout.platform == "cpu":  # a share for the pool alone, which all virtual devices divide
        return pages_in(memory // mesh.size, catalog, parts.demand())
    progress("measuring programs")
    return pages_in(pool_bytes(memory, catalog), catalog, parts.demand())


def _tokenizer(path: Path) -> Tokenizer | None:
    """A folder without any tokenizer file serves token ids only; a broken tokenizer is an error."""
    if path.is_dir():
        names = {entry.name for entry in os.scandir(path)}
        if "tokenizer.json" not in names and not any(name.endswith(".model") for name in names):
            return None
    return load_tokenizer(path)
