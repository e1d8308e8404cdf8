#!/usr/bin/env python
"""One decode step at a given number of rows: the whole program, and attention with its KV write alone.

    .venv/bin/python scripts/bench_decode.py --rows 64 --set quantization=int8
"""

import argparse
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np

from jinfer.bench.machine import measure
from jinfer.config import EngineConfig
from jinfer.config.loading import load_config
from jinfer.engine.catalog import Key
from jinfer.engine.engine import Engine
from jinfer.engine.state import Column
from pallas_kernels import kv_update, paged_attention


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--context", type=int, default=200, help="mean of the lognormal context lengths, at most 511")
    parser.add_argument("--repeat", type=int, default=15)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="any field of EngineConfig")
    options = parser.parse_args()
    config = load_config(EngineConfig, None, ["warmup=false", "max_context=2048", "kv_memory_gb=2", *options.set])
    engine = Engine(options.model, config)
    runner, model, rows = engine.workers[0].runner, engine.model_config, options.rows
    program = runner.catalog.get(Key("decode", rows), runner.pages)

    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(np.log(options.context) - 0.125, 0.5, rows), 8, 511).astype(np.int32)
    records, table = np.array(runner.state.rows), np.array(runner.state.page_table[0])
    records[1 : rows + 1, [Column.LENGTH, Column.ACTIVE]] = np.stack([lengths, np.ones_like(lengths)], 1)
    records[1 : rows + 1, Column.MAX_POSITION] = 10**6
    records[1 : rows + 1, Column.STOP_IDS :] = records[1 : rows + 1, Column.LOGPROBS, None] = -1
    records[1 : rows + 1, [Column.TOP_P, Column.REPETITION]] = np.float32(1).view(np.int32)  # temperature 0: greedy
    page = 1
    for row, length in enumerate(lengths, 1):
        count = (length + 64) // config.page_size + 1
        table[row, :count] = np.arange(page, page + count)
        page += count
    state = runner.state._replace(rows=jnp.asarray(records), page_table=jnp.asarray(table)[None])
    vector, fields = runner.catalog.programs.decode_packing(rows).empty()
    fields.slots[:] = np.arange(1, rows + 1)
    heads, width = model.num_heads, model.head_dim
    q = jnp.asarray(rng.standard_normal((rows, heads, width)), engine.config.dtype)
    starts = jnp.arange(rows + 1, dtype=jnp.int32)

    def attention(kv, lengths, table):
        """All layers' KV writes and attention, each layer's query depending on the last one's result."""
        (kv,) = kv  # one page group: all layers of the models this measures see everything
        x, (pool, kv_heads, _, _) = q, kv.k.data.shape
        sequences = (table, starts, lengths + 1)
        for layer in range(model.num_layers):
            new, first = x[:, :kv_heads], jnp.int32(layer * (pool // model.num_layers))
            kv = type(kv)(*kv_update(*kv, new, new, *sequences, first_page=first, decode=True))
            out = paged_attention(x, *kv, *sequences, scale=width**-0.5, first_page=first, decode=True)
            x = x + out.astype(x.dtype)
        return (kv,), x

    alone = jax.jit(attention, donate_argnums=0)
    kv, arguments = runner.kv, (jnp.asarray(lengths), jnp.asarray(table[1 : rows + 1]))
    steps, parts = [], []
    for _ in range(options.repeat + 2):  # alternating, so that both see the same machine
        start = time.perf_counter()
        kv, state, out = program(runner.weights, kv, state, vector.copy())
        np.asarray(out)
        steps.append(time.perf_counter() - start)
        start = time.perf_counter()
        kv, x = alone(kv, *arguments)
        x.block_until_ready()
        parts.append(time.perf_counter() - start)
    runner.kv, runner.state = kv, state
    step, part = (statistics.median(times[2:]) for times in (steps, parts))
    keys = runner.kv[0].k.data
    moved = 2 * int(lengths.sum()) * model.num_layers * keys.shape[1] * width * keys.dtype.itemsize
    bandwidth = measure(()).bytes_per_second
    weights = engine.config.quantization or engine.config.dtype
    print(f"{rows} rows, mean context {lengths.mean():.0f}, weights {weights}, "
          f"KV {engine.config.kv_dtype}, pages of {config.page_size}")
    print(f"step {step * 1e3:.1f} ms; attention and KV writes alone {part * 1e3:.1f} ms ({part / step:.0%} of it), "
          f"{part / model.num_layers * 1e3:.2f} ms a layer, {moved / part / 1e9:.1f} GB/s "
          f"of {bandwidth / 1e9:.1f} ({moved / part / bandwidth:.0%})")
    engine.close()


if __name__ == "__main__":
    main()
