"""Shapes of grouped_matmul to compile and to time."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.bench import Case, normal
from pallas_kernels.grouped_matmul.api import grouped_matmul


@dataclasses.dataclass(frozen=True, slots=True)
class Mixture:
    """E experts of width F in a model of width D, A of which a token takes."""

    name: str
    experts: int
    active: int
    model: int
    width: int


MIXTRAL = Mixture("mixtral-8x7b", 8, 2, 4096, 14336)
QWEN3 = Mixture("qwen3-30b-a3b", 128, 8, 2048, 768)
GPT_OSS = Mixture("gpt-oss-20b", 32, 4, 2880, 2880)


def sweep(platform: str) -> list[Case]:
    """Decode and prefill of both projections, every format."""
    found = [case(dataclasses.replace(QWEN3, experts=16), tokens, projection, dtype)
             for tokens in (8, 512) for projection in ("gate_up", "down") for dtype in ("bfloat16", "float32", "int8")]
    found += [case(mixture, 64, projection, "bfloat16") for mixture in (MIXTRAL, GPT_OSS)
              for projection in ("gate_up", "down")]
    return [*found, case(dataclasses.replace(QWEN3, experts=16), 64, "gate_up", "bfloat16", inputs_first=True)]


def timing(platform: str) -> list[Case]:
    """Decode steps and chunks of whole models' layers (gpt-oss's experts as bfloat16)."""
    return [case(mixture, tokens, projection, dtype) for mixture in (MIXTRAL, QWEN3, GPT_OSS)
            for tokens in (8, 64, 2048) for projection in ("gate_up", "down") for dtype in ("bfloat16", "int8")]


def case(mixture: Mixture, tokens: int, projection: str, dtype: str, *, inputs_first: bool = False) -> Case:
    """One projection of `tokens` tokens, whose experts are drawn evenly."""
    inputs, outputs = ((mixture.model, 2 * mixture.width) if projection == "gate_up"
                       else (mixture.width, mixture.model))
    rows, item = tokens * mixture.active, jnp.dtype(dtype).itemsize

    def make(key: jax.Array) -> tuple[Any, ...]:
        keys = jax.random.split(key, 3)
        shape = (mixture.experts, inputs, outputs) if inputs_first else (mixture.experts, outputs, inputs)
        x = normal(keys[0], (rows, inputs), "float32" if dtype == "float32" else "bfloat16")
        sizes = group_sizes(keys[2], tokens, mixture)
        if dtype == "int8":
            weights = jax.random.randint(keys[1], shape, -127, 128, jnp.int8)
            return x, weights, sizes, jnp.full((mixture.experts, outputs), inputs**-0.5 / 127)
        return x, normal(keys[1], shape, dtype) * jnp.asarray(inputs**-0.5, dtype), sizes

    hit = mixture.experts * (1 - (1 - mixture.active / mixture.experts) ** tokens)
    return Case(
        f"{tokens} tokens {mixture.name} {projection} {dtype}" + (" inputs first" if inputs_first else ""),
        functools.partial(_call, inputs_first=inputs_first), make,
        lambda arguments, out: (_next(arguments[0], out), *arguments[1:]),
        round(hit * inputs * outputs * item) + rows * (inputs * max(item, 2) + outputs * 4),
        2 * rows * inputs * outputs)


def group_sizes(key: jax.Array, tokens: int, mixture: Mixture) -> jax.Array:
    """[E] int32: rows of each expert where every token takes `active` different ones by lot."""
    drawn = jax.vmap(lambda key: jax.random.permutation(key, mixture.experts)[: mixture.active])(
        jax.random.split(key, tokens))
    return jnp.bincount(drawn.ravel(), length=mixture.experts).astype(jnp.int32)


def _next(x: jax.Array, out: jax.Array) -> jax.Array:
    """x, which waits for out and may not be told from x + out."""
    return x + (0 * out[:, :1]).astype(x.dtype)


def _call(x, weights, sizes, scales=None, **options):
    """grouped_matmul with its optional array by position."""
    return grouped_matmul(x, weights, sizes, scales=scales, **options)
