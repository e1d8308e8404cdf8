"""From a model argument and a configuration to the parts of an engine."""

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
from flax import nnx

from jinfer.config import EngineConfig, ModelConfig
from jinfer.engine.admission import Admission
from jinfer.engine.backend import device_memory, prepare_backend, use_compilation_cache
from jinfer.engine.buckets import Buckets
from jinfer.engine.catalog import ProgramCatalog, shard_bytes
from jinfer.engine.programs import Programs
from jinfer.engine.runner import Runner
from jinfer.engine.state import record_width
from jinfer.errors import ConfigError
from jinfer.kv import PagePool, pages_for, pool_pages
from jinfer.models import build_model
from jinfer.models.parameter import Precision
from jinfer.observe.metrics import Metrics
from jinfer.scheduler import Scheduler
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
    layout.check(checkpoint.config)
    config = resolve(config, checkpoint.config)
    tokenizer = _tokenizer(path)
    prepare_backend(layout.mesh)
    use_compilation_cache(config.compilation_cache, layout.mesh)

    precision = Precision.of(config.dtype, config.quantization)
    graph, abstract = nnx.split(build_model(checkpoint.config, layout, precision))
    parameters, treedef = jax.tree.flatten(abstract)
    check_names(parameters, checkpoint.reader, tied_head=checkpoint.config.tie_embeddings)
    progress("loading weights")
    weights = place(parameters, checkpoint.reader, layout)

    metrics = Metrics(weight_bytes=sum(w.nbytes for w in weights))
    assert config.max_context is not None
    programs = Programs(
        graph=graph, treedef=treedef, layout=layout, config=checkpoint.config, max_logprobs=config.max_logprobs,
        steps=config.decode_steps, page_size=config.page_size, record_width=record_width(config.max_stop_ids),
        table_width=pages_for(config.max_context, config.page_size), max_context=config.max_context,
        max_bias=config.max_logit_bias)
    narrow_cpu = jax.default_backend() == "cpu" and precision.weight_dtype.itemsize < 4
    buckets = Buckets.build(prefill_tokens=config.prefill_tokens, max_rows=config.max_rows,
                            smallest_rows=2 if narrow_cpu else 1)
    catalog = ProgramCatalog(
        programs, buckets, weights, jnp.dtype(config.kv_dtype), kv_heads=layout.kv_heads(checkpoint.config),
        rows=config.max_rows, metrics=metrics, forbid=config.forbid_compilation)
    pages = config.kv_pages or _size_pool(config, layout, catalog, weights, progress)
    if config.warmup:
        catalog.warm_up(pages, progress)
    runner = Runner(catalog, weights, pages, metrics)
    metrics.kv_bytes = sum(x.nbytes for x in jax.tree.leaves(runner.kv))
    metrics.state_bytes = sum(x.nbytes for x in jax.tree.leaves(runner.state))
    metrics.pages_total = pages - 1
    metrics.pages_free = pages - 1
    # A sequence cannot outgrow the pool; requests that try are refused with both numbers.
    max_context = min(config.max_context, (pages - 1) * config.page_size)
    scheduler = Scheduler(
        PagePool(pages, config.page_size), max_rows=config.max_rows, max_context=max_context,
        prefill_tokens=config.prefill_tokens, max_chunks=buckets.max_chunks, decode_steps=config.decode_steps)
    eos = tuple(dict.fromkeys(checkpoint.config.eos_ids + (tokenizer.eos_ids if tokenizer else ())))
    if len(eos) > config.max_stop_ids:
        raise ConfigError(f"max_stop_ids: {config.max_stop_ids} is less than the model's {len(eos)} end tokens")
    admission = Admission(config, checkpoint.config, tokenizer, eos, max_context)
    return Parts(config, checkpoint.config, tokenizer, admission, scheduler, runner, metrics)


def resolve(config: EngineConfig, model: ModelConfig) -> EngineConfig:
    """Replaces every `auto` and None that depends on the model or the platform."""
    dtype = config.dtype
    if dtype == "auto":
        dtype = "float32" if jax.default_backend() == "cpu" else "bfloat16"
    kv_dtype = config.kv_dtype
    if kv_dtype == "auto":
        # An int8 model has given up more precision than bfloat16 KV costs.
        kv_dtype = "bfloat16" if config.quantization == "int8" else dtype
    max_context = config.max_context or model.max_context
    if max_context > model.max_context and model.rope.kind != "dynamic":  # which stretches to any length
        raise ConfigError(f"max_context: {max_context} is more than the model's {model.max_context}")
    return dataclasses.replace(config, dtype=dtype, kv_dtype=kv_dtype, max_context=max_context,
                               max_logprobs=min(config.max_logprobs, model.vocab_size))


def _size_pool(config: EngineConfig, layout: Layout, catalog: ProgramCatalog, weights: list[jax.Array],
               progress: Progress) -> int:
    """Pages from what is left after weights, state and the largest program's temporaries."""
    token = sum(shard_bytes(x) for x in jax.tree.leaves(catalog.abstract_kv(pages=1))) // config.page_size
    assert config.max_context is not None
    if config.kv_memory_gb is not None:
        free = int(config.kv_memory_gb * 2**30)
    else:
        device = layout.mesh.devices.flat[0]
        free = device_memory(device, config.memory_utilization)
        if device.platform == "cpu":  # a share for the pool alone, which all virtual devices divide
            free //= layout.mesh.size
        else:
            progress("measuring programs")
            free -= sum(shard_bytes(x) for x in jax.tree.leaves((weights, catalog.abstract_state())))
            free -= catalog.workspace(pages=2)
    return pool_pages(free, token_bytes=token, page_size=config.page_size, max_rows=config.max_rows,
                      max_context=config.max_context)


def _tokenizer(path: Path) -> Tokenizer | None:
    """A folder without any tokenizer file serves token ids only; a broken tokenizer is an error."""
    if path.is_dir():
        names = {entry.name for entry in os.scandir(path)}
        if "tokenizer.json" not in names and not any(name.endswith(".model") for name in names):
            return None
    return load_tokenizer(path)
