"""Times the sampler alone: python scripts/bench_sampler.py [--vocab 49152] [--rows 1 8 64].

Prints the median of a call for each mix of parameters, the bytes of the logits a second that it means (one pass
over the logits is the least a sampler can do), and the time to compile the one program that serves them all.
"""

import argparse
import functools
import statistics
import time

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


def median(call: object, *args: object, repeats: int) -> float:
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(call(*args))  # type: ignore[operator]
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocab", type=int, default=49152)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--max-logprobs", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=15)
    args = parser.parse_args()
    device = jax.devices()[0]
    print(f"{device.platform} {device.device_kind}, vocabulary {args.vocab}")
    for rows in args.rows:
        rng = np.random.default_rng(0)
        # about the entropy of a small language model: a nucleus of tens of tokens, sometimes of hundreds
        logits = jnp.asarray(rng.gumbel(size=(rows, args.vocab)).astype(np.float32) * 1.3)
        counts, slots = new_counts(rows, args.vocab), jnp.arange(rows, dtype=jnp.int32)
        step = jax.jit(functools.partial(sample, max_logprobs=args.max_logprobs))
        start = time.perf_counter()
        compiled = step.lower(logits, row_params(rows, {}), counts, slots).compile()
        memory = compiled.memory_analysis()
        print(
            f"\n{rows} rows: compiled in {time.perf_counter() - start:.2f} s, "
            f"temporaries {memory.temp_size_in_bytes / 2**20:.1f} MiB"
        )
        for name, mix in MIXES.items():
            params = jax.device_put(row_params(rows, mix))
            seconds = median(compiled, logits, params, counts, slots, repeats=args.repeats)
            print(f"  {name:32s} {seconds * 1e3:8.3f} ms   logits read at {logits.nbytes / seconds / 1e9:6.2f} GB/s")
        record = jax.jit(record_output, donate_argnums=0)
        reset = jax.jit(reset_row, donate_argnums=0)
        tokens, active = slots * 7, jnp.ones(rows, bool)
        context = jnp.arange(2048, dtype=jnp.int32) % 1000

        def kept(update: object, *rest: object) -> jax.Array:
            nonlocal counts
            counts = update(counts, *rest)  # type: ignore[operator]
            return counts

        for name, call in {
            "record_output": lambda: kept(record, slots, tokens, active),
            "reset_row, 2048 tokens": lambda: kept(reset, slots[0], context, jnp.int32(1000)),
        }.items():
            call()
            print(f"  {name:32s} {median(call, repeats=args.repeats) * 1e3:8.3f} ms")


if __name__ == "__main__":
    main()
