"""What a kernel's bench.py declares: shapes worth compiling (`sweep`) and shapes worth timing (`timing`)."""

import dataclasses
import importlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.pages import Pages, pool_shapes, quantize, widen

OPERATIONS = ("flash_attention", "paged_attention", "kv_update", "grouped_matmul")
FORMATS = ("bfloat16", "float32", "int8", "float8_e4m3fn")
HEAD_DIMS = (64, 80, 96, 128, 192, 256)


@dataclasses.dataclass(frozen=True, slots=True)
class Case:
    """One shape of one operation.

    Attributes:
      name: unique within the operation, such as 'decode 64x1024 llama-8b bfloat16'.
      function: called with what `make` returns; takes `implementation` by keyword.
      make: from a PRNG key to the arguments, in JAX only: `jax.eval_shape(make, key)` gives their shapes.
      chain: (arguments, result) to the arguments of a next call that cannot start before this one has ended.
      bytes: HBM bytes the operation has to move. flops: operations it has to do.
    """

    name: str
    function: Callable[..., Any]
    make: Callable[[jax.Array], tuple[Any, ...]]
    chain: Callable[[tuple[Any, ...], Any], tuple[Any, ...]]
    bytes: int
    flops: int


@dataclasses.dataclass(frozen=True, slots=True)
class Heads:
    """Query heads, kv heads and head dim of one device's shard of a model."""

    name: str
    heads: int
    kv_heads: int
    head_dim: int


MODELS = (Heads("llama-8b", 32, 8, 128), Heads("llama-70b/8", 8, 1, 128))
# Latent attention (arXiv 2412.19437): keys of 576 lanes, of which the first are the values. An eighth of V3 has the
# shape of V2-Lite.
LATENT = (Heads("deepseek-v3", 128, 1, 576), Heads("deepseek-v3/8", 16, 1, 576))
VALUE_LANES = 512


def cases(operation: str, kind: str, platform: str) -> list[Case]:
    """The cases of an operation's bench.py, or of any module by its full name.

    Args:
      kind: 'sweep' or 'timing', functions of the module. platform: tpu, gpu or cpu, which pools are shaped for.

    Raises:
      ValueError: two cases have one name.
    """
    module = operation if "." in operation else f"pallas_kernels.{operation}.bench"
    found = getattr(importlib.import_module(module), kind)(platform)
    if len({case.name for case in found}) != len(found):
        raise ValueError(f"names of {operation}'s {kind} cases are not unique")
    return found


def normal(key: jax.Array, shape: tuple[int, ...], dtype: jax.typing.DTypeLike) -> jax.Array:
    """Standard normal numbers in any of the formats' float types."""
    return jax.random.normal(key, shape, jnp.dtype(dtype))


def pool(key: jax.Array, pages: int, heads: Heads, page_size: int, dtype: str, platform: str) -> Pages:
    """Pages of standard normal numbers, as `pages.pool_shapes` has them: zeros where it pads."""
    shapes = pool_shapes(pages, heads.kv_heads, page_size, heads.head_dim, dtype, platform)
    values = normal(key, (pages, heads.kv_heads, page_size, heads.head_dim), _float(dtype))
    data, scales = quantize(widen(values, shapes.data.shape[-1]), dtype)
    if scales is None or shapes.scales is None:
        return Pages(data)
    return Pages(data, widen(scales, shapes.scales.shape[-1]))


def page_bytes(heads: Heads, positions: int, dtype: str) -> int:
    """Bytes of that many positions of keys or of values, scales included."""
    item = jnp.dtype(dtype).itemsize
    return positions * heads.kv_heads * (heads.head_dim * item + (4 if item == 1 else 0))


def page_table(key: jax.Array, rows: int, pages_per_row: int) -> jax.Array:
    """[rows, pages_per_row] int32: a shuffle of the pages 1, 2, .. (page 0 is the null page)."""
    shuffled = jax.random.permutation(key, rows * pages_per_row).astype(jnp.int32) + 1
    return shuffled.reshape(rows, pages_per_row)


def starts(rows: int, length: int) -> jax.Array:
    """Cumulative lengths [rows + 1] int32 of rows of one length."""
    return jnp.arange(rows + 1, dtype=jnp.int32) * length


def _float(dtype: str) -> str:
    return dtype if jnp.dtype(dtype).itemsize > 1 else "bfloat16"
