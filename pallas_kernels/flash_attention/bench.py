"""Shapes of flash_attention to compile and to time."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.bench import HEAD_DIMS, MODELS, Case, Heads, normal, starts
from pallas_kernels.flash_attention.api import flash_attention


def sweep(platform: str) -> list[Case]:
    """Every head_dim and dtype, several sequences; options, MHA, MQA and one long sequence at some of them."""
    found = [case(Heads(f"H{head_dim}", 8, 2, head_dim), 4, 256, dtype)
             for head_dim in HEAD_DIMS for dtype in ("bfloat16", "float32")]
    heads = Heads("H128", 8, 2, 128)
    found += [case(heads, 4, 256, dtype, options=True) for dtype in ("bfloat16", "float32")]
    found += [case(Heads("MHA H128", 8, 8, 128), 4, 256, "bfloat16"), case(heads, 1, 8192, "bfloat16")]
    found.append(case(Heads("MQA H128", 16, 1, 128), 4, 256, "bfloat16"))
    return found


def timing(platform: str) -> list[Case]:
    """Llama-3-8B and a TP8 shard of 70B: whole prompts of 2,048 and 8,192 tokens, and eight short ones."""
    return [case(model, rows, tokens, "bfloat16") for model in MODELS
            for rows, tokens in ((1, 2048), (1, 8192), (8, 256))]


def case(heads: Heads, rows: int, tokens: int, dtype: str, *, options: bool = False) -> Case:
    """`rows` sequences of `tokens` each, packed."""
    keywords: dict[str, Any] = {"scale": heads.head_dim**-0.5}
    if options:
        keywords |= {"window": tokens // 2, "soft_cap": 30.0}

    def make(key: jax.Array) -> tuple[Any, ...]:
        q, k, v = (normal(k, (rows * tokens, count, heads.head_dim), dtype) for k, count in zip(
            jax.random.split(key, 3), (heads.heads, heads.kv_heads, heads.kv_heads), strict=True))
        arguments = (q, k, v, starts(rows, tokens))
        return (*arguments, jnp.zeros((heads.heads,))) if options else arguments

    return Case(f"prefill {rows}x{tokens} {heads.name} {dtype}" + (" window cap sinks" if options else ""),
                functools.partial(_call if options else flash_attention, **keywords), make,
                lambda arguments, out: (out, *arguments[1:]),
                2 * rows * tokens * (heads.heads + heads.kv_heads) * heads.head_dim * jnp.dtype(dtype).itemsize,
                4 * heads.heads * heads.head_dim * rows * tokens * (tokens + 1) // 2)


def _call(q, k, v, begins, sinks, **options):
    """flash_attention with its optional array by position."""
    return flash_attention(q, k, v, begins, sinks=sinks, **options)
