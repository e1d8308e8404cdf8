"""What the machine can do, measured: memory bandwidth and matrix-product peak, the roof of every figure."""

import dataclasses
import time

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True, slots=True)
class Machine:
    """Attributes:
      bytes_per_second: reading a large float32 array (it does not fit any cache).
      flops_per_second: of a 1024^3 product, by the dtype of its inputs (int8: int32 accumulation).
    """

    bytes_per_second: float
    flops_per_second: dict[str, float]


def measure(dtypes: tuple[str, ...] = ("float32", "bfloat16", "int8")) -> Machine:
    """Takes a few seconds on two cores."""
    words = 64 * 2**20
    array = jax.jit(lambda: jnp.ones(words, jnp.float32))()
    read = jax.jit(jnp.sum)
    size = 1024
    peaks = {}
    for dtype in dtypes:
        a, b = (jnp.ones((size, size), dtype) for _ in range(2))
        accumulator = jnp.int32 if dtype == "int8" else jnp.float32
        # Contracting the last axes is how jinfer's own products lie.
        dot = jax.jit(lambda a, b, acc=accumulator: jax.lax.dot_general(
            a, b, (((1,), (1,)), ((), ())), preferred_element_type=acc))
        peaks[dtype] = 2 * size**3 / _fastest(dot, a, b)
    return Machine(4 * words / _fastest(read, array), peaks)


def _fastest(function, *args, repeat: int = 7) -> float:
    """Seconds of the fastest call: the roof is what the machine can do undisturbed."""
    jax.block_until_ready(function(*args))
    best = float("inf")
    for _ in range(repeat):
        start = time.perf_counter()
        jax.block_until_ready(function(*args))
        best = min(best, time.perf_counter() - start)
    return best
