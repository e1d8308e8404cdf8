"""Shapes of paged_attention to compile and to time."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.bench import (
    FORMATS,
    HEAD_DIMS,
    LATENT,
    MODELS,
    VALUE_LANES,
    Case,
    Heads,
    normal,
    page_bytes,
    page_table,
    pool,
    starts,
)
from pallas_kernels.paged_attention.api import paged_attention
from pallas_kernels.pages import widen

PAGE_SIZE = 64


def sweep(platform: str) -> list[Case]:
    """Every head_dim with every format, decode and chunks; options, mixed formats and page sizes at some of them."""
    make_case = functools.partial(case, platform=platform)
    found = []
    for head_dim in HEAD_DIMS:
        heads = Heads(f"H{head_dim}", 8, 2, head_dim)
        for dtype in ("bfloat16", "float32"):
            for kv in (dtype, *FORMATS[2:]):
                found += [make_case(heads, 8, 1, 512, dtype, kv, kv), make_case(heads, 2, 128, 512, dtype, kv, kv)]
    heads = Heads("H128", 8, 2, 128)
    for chunk in (1, 128):
        found.append(make_case(heads, 4, chunk, 512, "bfloat16", "bfloat16", "bfloat16", options=True))
        found.append(make_case(heads, 4, chunk, 512, "bfloat16", "int8", "float8_e4m3fn"))
        found += [make_case(heads, 4, chunk, 512, "bfloat16", "bfloat16", "bfloat16", page_size=size)
                  for size in (16, 128)]
    found.append(make_case(heads, 8, 4, 512, "bfloat16", "bfloat16", "bfloat16"))  # verification
    found.append(make_case(Heads("MQA H128", 16, 1, 128), 8, 1, 512, "bfloat16", "bfloat16", "bfloat16"))
    found.append(make_case(Heads("MHA H128", 8, 8, 128), 8, 1, 512, "bfloat16", "bfloat16", "bfloat16"))
    for heads in LATENT:
        for chunk in (1, 128):
            found += [make_case(heads, 4, chunk, 512, dtype, kv, None)
                      for dtype, kv in (("bfloat16", "bfloat16"), ("float32", "float32"), ("bfloat16", "int8"))]
    return found


def timing(platform: str) -> list[Case]:
    """Llama-3-8B and a TP8 shard of 70B: decode, and chunks of a prompt with what came before in the cache.

    DeepSeek-V3 and a TP8 shard of it: the same with keys only."""
    make_case = functools.partial(case, platform=platform)
    found = []
    for model in MODELS:
        for rows, context in ((8, 1024), (8, 8192), (64, 1024), (64, 8192), (256, 1024), (256, 8192)):
            found.append(make_case(model, rows, 1, context, "bfloat16", "bfloat16", "bfloat16"))
        found += [make_case(model, 1, chunk, 8192, "bfloat16", "bfloat16", "bfloat16") for chunk in (512, 2048)]
    found += [make_case(MODELS[0], 64, 1, 8192, "bfloat16", kv, kv) for kv in FORMATS[2:]]
    for model in LATENT:
        found += [make_case(model, rows, 1, context, "bfloat16", "bfloat16", None)
                  for rows in (8, 64) for context in (1024, 8192)]
        found.append(make_case(model, 1, 512, 8192, "bfloat16", "bfloat16", None))
    return found


def case(heads: Heads, rows: int, chunk: int, context: int, dtype: str, k_format: str, v_format: str | None, *,
         page_size: int = PAGE_SIZE, options: bool = False, platform: str = "cpu") -> Case:
    """`rows` sequences of `context` positions, the last `chunk` of which are queries; chunk 1 is decode.

    v_format None: keys only."""
    pages_per_row = -(-context // page_size)
    keywords: dict[str, Any] = {"scale": heads.head_dim**-0.5, "decode": chunk == 1}
    values = heads.head_dim
    if v_format is None:
        values = keywords["value_lanes"] = VALUE_LANES
    if options:
        keywords |= {"window": context // 2, "soft_cap": 30.0}

    def make(key: jax.Array) -> tuple[Any, ...]:
        keys = jax.random.split(key, 4)
        q = normal(keys[0], (rows * chunk, heads.heads, heads.head_dim), dtype)
        k_pages, v_pages = (fmt and pool(k, rows * pages_per_row + 1, heads, page_size, fmt, platform)
                            for k, fmt in ((keys[1], k_format), (keys[2], v_format)))
        arguments = (q, k_pages, v_pages, page_table(keys[3], rows, pages_per_row), starts(rows, chunk),
                     jnp.full((rows,), context, jnp.int32))
        return (*arguments, jnp.zeros((heads.heads,)), jnp.int32(0)) if options else arguments

    visible = chunk * context - chunk * (chunk - 1) // 2  # (query, position) pairs of a row
    formats = k_format if v_format in (k_format, None) else f"{k_format}/{v_format}"
    name = (f"{f'decode {rows}' if chunk == 1 else f'chunk {rows}x{chunk}'} context {context} {heads.name} {dtype}"
            + (f" kv {formats}" if formats != dtype else "") + (f" page {page_size}" if page_size != PAGE_SIZE else "")
            + (" window cap sinks first_page" if options else ""))
    return Case(name, functools.partial(_call if options else paged_attention, **keywords), make,
                lambda arguments, out: (widen(out, heads.head_dim), *arguments[1:]),
                rows * chunk * heads.heads * (heads.head_dim + values) * jnp.dtype(dtype).itemsize
                + rows * sum(page_bytes(heads, context, fmt) for fmt in (k_format, v_format) if fmt),
                2 * heads.heads * (heads.head_dim + values) * rows * visible)


def _call(q, k_pages, v_pages, table, query_starts, kv_lengths, sinks, first_page, **options):
    """paged_attention with its optional arrays by position."""
    return paged_attention(q, k_pages, v_pages, table, query_starts, kv_lengths, sinks=sinks, first_page=first_page,
                           **options)
