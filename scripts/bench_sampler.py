"""Times the sampler alone: python scripts/bench_sampler.py [--vocab 49152] [--rows 1 8 64].

Prints the median of a call for each mix of parameters, the bytes of the logits a second that it means (one
pass over the logits is the least a sampler can do), and the time to compile the one program that serves
them all.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from jinfer.sampling.penalties import new_counts, record_output, reset_row
from jinfer.sampling.sampler import RowParams, sample

MIXES: dict[str, dict[str, object]] = {
    "greedy": {},
    "temperature": {"temperature": 0.8},
    "min_p": {"temperature": 0.8, "min_p": 0.05},
    "top_k 50, top_p 0.95": {"temperature": 0.8, "top_k": 50, "top_p": 0.95},
    "top_p 0.9, narrow": {"temperature": 0.3, "top_p": 0.9},
    "top_p 0.9, wide": {"temperature": 1.0, "top_p": 0.9},
    "top_p 0.9, wide in 1 row of 8": {"temperature": 0.3, "top_p": 0.9, "mixed": True},
    "top_k 500, top_p 0.9": {"temperature": 1.0, "top_k": 500, "top_p": 0.9},
    "greedy, repetition 1.1": {"repetition": 1.1},
    "greedy, bias": {"bias": True},
    "greedy, logprobs 5": {"logprobs": 5},
    "everything": {
        "temperature": 0.8, "top_k": 50, "top_p": 0.95, "min_p": 0.01, "presence": 0.5, "frequency": 0.5,
        "repetition": 1.1, "bias": True, "logprobs": 20,
    },
}  # fmt: skip


def row_params(rows: int, mix: dict[str, object]) -> RowParams:
    def full(name: str, neutral: float, dtype: type) -> np.ndarray:
        return np.full(rows, mix.get(name, neutral), dtype)

    biased = np.full((rows, 8), -1, np.int32)
    if mix.get("bias"):
        biased[:, :3] = [3, 5, 7]
    temperature = full("temperature", 0, np.float32)
    if mix.get("mixed"):
        temperature[::8] = 1.0
    return RowParams(
        temperature,
        full("top_k", 0, np.int32),
        full("top_p", 1, np.float32),
        full("min_p", 0, np.float32),
        full("presence", 0, np.float32),
        full("frequency", 0, np.float32),
        full("repetition", 1, np.float32),
        np.arange(rows, dtype=np.uint32),
        np.full(rows, 100, np.int32),
        np.full((rows, 4), -1, np.int32),
        np.zeros(rows, np.int32),
        biased,
        np.ones((rows, 8), np.float32),
        full("logprobs", -1, np.int32),
    )


def median(call: Callable[[], object], repeats: int) -> float:
    """Seconds of a call."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(call())
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--vocab", type=int, default=49152)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--max-logprobs", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=15)
    args = parser.parse_args()
    device = jax.devices()[0]
    print(f"{device.platform} {device.device_kind}, vocabulary {args.vocab}")
    for rows in args.rows:
        bench(rows, args.vocab, args.max_logprobs, args.repeats)


def bench(rows: int, vocab: int, max_logprobs: int, repeats: int) -> None:
    # About the entropy of a small language model: a nucleus of tens of tokens, sometimes of hundreds.
    logits = jnp.asarray(np.random.default_rng(0).gumbel(size=(rows, vocab)).astype(np.float32) * 1.3)
    counts, slots = new_counts(rows, vocab), jnp.arange(rows, dtype=jnp.int32)
    start = time.perf_counter()
    lowered = jax.jit(sample, static_argnames="max_logprobs").lower(
        logits, row_params(rows, {}), counts, slots, max_logprobs=max_logprobs
    )
    step = lowered.compile()
    seconds, temporaries = time.perf_counter() - start, step.memory_analysis().temp_size_in_bytes
    print(f"\n{rows} rows: compiled in {seconds:.2f} s, temporaries {temporaries / 2**20:.1f} MiB")
    for name, mix in MIXES.items():
        params = jax.device_put(row_params(rows, mix))
        seconds = median(lambda params=params: step(logits, params, counts, slots), repeats)  # type: ignore[misc]
        print(f"  {name:32s} {seconds * 1e3:8.3f} ms  {logits.nbytes / seconds / 1e9:6.2f} GB/s of logits")

    record, reset = jax.jit(record_output, donate_argnums=0), jax.jit(reset_row, donate_argnums=0)
    tokens, active, context = slots * 7, jnp.ones(rows, bool), jnp.arange(2048, dtype=jnp.int32) % 1000

    def recorded() -> jax.Array:
        nonlocal counts
        counts = record(counts, slots, tokens, active)
        return counts

    def restarted() -> jax.Array:
        nonlocal counts
        counts = reset(counts, slots[0], context, jnp.int32(1000))
        return counts

    for name, call in {"record_output": recorded, "reset_row, 2048 tokens": restarted}.items():
        call()
        print(f"  {name:32s} {median(call, repeats) * 1e3:8.3f} ms")


if __name__ == "__main__":
    main()
