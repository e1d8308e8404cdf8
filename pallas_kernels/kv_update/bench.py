"""Shapes of kv_update to compile and to time."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.bench import (
    FORMATS,
    HEAD_DIMS,
    LATENT,
    MODELS,
    Case,
    Heads,
    normal,
    page_bytes,
    page_table,
    pool,
    starts,
)
from pallas_kernels.kv_update.api import kv_update

PAGE_SIZE = 64


def sweep(platform: str) -> list[Case]:
    """Every head_dim with every format, decode and chunks; mixed formats and page sizes at one of them."""
    make_case = functools.partial(case, platform=platform)
    found = [make_case(Heads(f"H{head_dim}", 8, 2, head_dim), rows, chunk, 512, "bfloat16", fmt, fmt)
             for head_dim in HEAD_DIMS for fmt in FORMATS for rows, chunk in ((8, 1), (2, 128))]
    heads = Heads("H128", 8, 2, 128)
    for rows, chunk in ((8, 1), (2, 128)):
        found.append(make_case(heads, rows, chunk, 512, "float32", "int8", "bfloat16", first_page=True))
        found += [make_case(heads, rows, chunk, 512, "bfloat16", "bfloat16", "bfloat16", page_size=size)
                  for size in (16, 128)]
        found += [make_case(LATENT[0], rows, chunk, 512, "bfloat16", fmt, None) for fmt in FORMATS]
    return found


def timing(platform: str) -> list[Case]:
    """Llama-3-8B, a TP8 shard of 70B and latent keys: a decode step of 256 rows, a chunk of 2,048 tokens."""
    make_case = functools.partial(case, platform=platform)
    return [make_case(model, rows, chunk, 2080, "bfloat16", fmt, None if model in LATENT else fmt)
            for model in (*MODELS, LATENT[0]) for rows, chunk in ((256, 1), (1, 2048)) for fmt in ("bfloat16", "int8")]


def case(heads: Heads, rows: int, chunk: int, context: int, dtype: str, k_format: str, v_format: str | None, *,
         page_size: int = PAGE_SIZE, first_page: bool = False, platform: str = "cpu") -> Case:
    """`rows` sequences that have `context` positions once their last `chunk` are written; v_format None: keys only."""
    pages_per_row = -(-context // page_size)

    def make(key: jax.Array) -> tuple[Any, ...]:
        keys = jax.random.split(key, 5)
        shape = (rows * chunk, heads.kv_heads, heads.head_dim)
        k_pages, v_pages = (fmt and pool(k, rows * pages_per_row + 1, heads, page_size, fmt, platform)
                            for k, fmt in ((keys[0], k_format), (keys[1], v_format)))
        arguments = (k_pages, v_pages, normal(keys[2], shape, dtype), v_format and normal(keys[3], shape, dtype),
                     page_table(keys[4], rows, pages_per_row), starts(rows, chunk),
                     jnp.full((rows,), context, jnp.int32))
        return (*arguments, jnp.int32(0)) if first_page else arguments

    formats = k_format if v_format in (k_format, None) else f"{k_format}/{v_format}"
    name = (f"{f'decode {rows}' if chunk == 1 else f'chunk {rows}x{chunk}'} {heads.name} {dtype} into {formats}"
            + (f" page {page_size}" if page_size != PAGE_SIZE else "") + (" first_page" if first_page else ""))
    tokens = rows * chunk
    return Case(name, functools.partial(_call if first_page else kv_update, decode=chunk == 1), make,
                lambda arguments, pools: (*pools, *arguments[2:]),
                sum(page_bytes(heads, tokens, dtype) + page_bytes(heads, tokens, fmt)
                    for fmt in (k_format, v_format) if fmt), 0)


def _call(k_pages, v_pages, k, v, table, query_starts, kv_lengths, first_page, **options):
    """kv_update with its optional array by position."""
    return kv_update(k_pages, v_pages, k, v, table, query_starts, kv_lengths, first_page=first_page, **options)
