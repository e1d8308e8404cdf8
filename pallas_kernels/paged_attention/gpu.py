"""paged_attention for GPUs: the page table leads from positions to rows (pallas_kernels/gpu.py has the maths)."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.pallas import triton

from pallas_kernels.chips import local_chip
from pallas_kernels.gpu import Tiles, attend, ragged_tiles, supported
from pallas_kernels.gpu_blocks import estimate
from pallas_kernels.paged_attention import reference
from pallas_kernels.pages import Pages
from pallas_kernels.tuning import tuned


class _Places(NamedTuple):
    page_table: Any  # [Q * M]
    first_page: Any  # [1] or None


def paged_attention(q: jax.Array, k_pages: Pages, v_pages: Pages | None, page_table: jax.Array, query_starts: jax.Array,
                    kv_lengths: jax.Array, *, scale: float, window: int | None, soft_cap: float | None,
                    sinks: jax.Array | None, first_page: jax.Array | None, decode: bool,
                    value_lanes: int | None = None, interpret: bool = False) -> jax.Array:
    """See api.paged_attention; interpret runs it on any device."""
    pools = (k_pages,) if v_pages is None else (k_pages, v_pages)
    if not supported(*pools, interpret=interpret):
        return reference.paged_attention(
            q, k_pages, v_pages, page_table, query_starts, kv_lengths, scale=scale, window=window, soft_cap=soft_cap,
            sinks=sinks, first_page=first_page, decode=decode, value_lanes=value_lanes)
    tokens, heads, width = q.shape
    _, kv_heads, page_size, _ = k_pages.data.shape
    sequences, row_pages = page_table.shape
    formats = tuple(pages.data.dtype for pages in pools)
    key = f"{'decode' if decode else 'chunks'} {q.dtype} {' '.join(map(str, formats))}"
    key += f" N{heads} K{kv_heads} H{width} S{page_size}" + ("" if value_lanes is None else f" V{value_lanes}")
    out_width = width if value_lanes is None else value_lanes
    blocks = estimate(local_chip(), tuned(__file__, key), tokens=tokens, sequences=sequences, decode=decode,
                      longest=row_pages * page_size, group=heads // kv_heads, kv_heads=kv_heads, head_dim=out_width,
                      dtype=q.dtype, formats=formats, rest=width - out_width)
    if decode:
        tiles = Tiles(None, None, None, kv_lengths)
    else:
        tiles = ragged_tiles(query_starts, kv_lengths, tokens, blocks.queries)

    scale_size = next((p.scales.shape[2] for p in pools if p.scales is not None), page_size)

    def address(places, sequence, kv_head):
        first = jnp.int32(0) if places.first_page is None else places.first_page[0]

        def find(position, held):
            entry = sequence * row_pages + jax.lax.div(position, page_size)
            page = first + triton.load(places.page_table.at[entry], mask=held, other=0)
            block, offset = page * kv_heads + kv_head, jax.lax.rem(position, page_size)
            return block * page_size + offset, block * scale_size + offset

        return find

    places = _Places(page_table.reshape(-1), None if first_page is None else first_page.reshape(1))
    return attend(q, k_pages, v_pages, tiles, places, address, blocks=blocks, kv_heads=kv_heads, scale=scale,
                  window=window, soft_cap=soft_cap, sinks=sinks, name="paged_attention",
                  value_lanes=value_lanes, interpret=interpret)
