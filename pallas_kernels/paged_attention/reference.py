"""paged_attention in plain jnp: the truth in tests and the path CPUs run.

Both forms walk the pages in blocks with an online softmax, so that a gathered block stays in cache and the
work follows the real lengths: loops have dynamic trip counts. Gathers land heads-first, [.., K, C, H], where a
dot needs no transpose (docs/performance.md has the layouts that lost).
"""

import jax
import jax.numpy as jnp

from pallas_kernels.options import MASKED, capped
from pallas_kernels.pages import Pages

DECODE_PAGES = 128  # most (row, page) pairs a loop turn, decode
PAGES_A_ROW = 4  # and fewer where there are few rows
CHUNK_QUERIES = 128  # queries of one tile
CHUNK_BLOCK = 256  # positions a loop turn, chunks


def paged_attention(q, k_pages, v_pages, page_table, query_starts, kv_lengths, *, decode, **options):
    """See api.paged_attention."""
    if decode:
        return decode_attention(q, k_pages, v_pages, page_table, kv_lengths, **options)
    return chunk_attention(q, k_pages, v_pages, page_table, query_starts, kv_lengths, **options)


def decode_attention(q, k_pages, v_pages, page_table, kv_lengths, *, scale, window, soft_cap, sinks, first_page,
                     value_lanes=None):
    """One query a row: q [R, N, H], page_table [R, M], kv_lengths [R] -> [R, N, H or value_lanes].

    The work is the list of (row, page) pairs that hold something visible, W of them, walked DECODE_PAGES at a
    time: no row waits for a longer one. Each pair gives a softmax of its own; pairs are then merged into their
    rows by a product with a 0/1 matrix, the online softmax over pages instead of positions.
    """
    rows, heads, width = q.shape
    _, kv_heads, page_size, _ = k_pages.data.shape
    group, out_width = heads // kv_heads, width if v_pages is not None else value_lanes
    q = (q * jnp.asarray(scale, q.dtype)).reshape(rows, kv_heads, group, width)
    last = kv_lengths - 1
    first = jnp.zeros_like(last) if window is None else jnp.maximum(last - window + 1, 0)
    begin_page = first // page_size
    counts = jnp.where(kv_lengths > 0, last // page_size - begin_page + 1, 0)
    ends = jnp.cumsum(counts)
    begins = ends - counts
    size = min(DECODE_PAGES, PAGES_A_ROW * rows)

    def turn(index, carry):
        top, acc, broken = carry
        item = index * size + jnp.arange(size, dtype=jnp.int32)
        row = jnp.minimum(jnp.sum(ends <= item[:, None], axis=1, dtype=jnp.int32), rows - 1)
        in_row = begin_page[row] + item - begins[row]
        valid = item < ends[-1]
        pages = jnp.where(valid, page_table[row, jnp.minimum(in_row, page_table.shape[1] - 1)], 0)
        if first_page is not None:
            pages = pages + first_page
        # Fused into the gather, the index arithmetic would run once an element instead of once a page.
        pages, row = jax.lax.optimization_barrier((pages, row))
        k, k_scales = _take_pages(k_pages, pages, q.dtype)
        v, v_scales = (_take_pages(v_pages, pages, q.dtype) if v_pages is not None
                       else (k[..., :value_lanes], k_scales))
        position = in_row[:, None] * page_size + jnp.arange(page_size, dtype=jnp.int32)
        held = valid[:, None] & (position <= last[row][:, None])  # [W, S]; past it lie others' leftovers
        seen = (held & (position >= first[row][:, None]))[:, None, None]
        scores = jnp.einsum("wkgh,wksh->wkgs", q[row].astype(k.dtype), k, preferred_element_type=jnp.float32)
        if k_scales is not None:
            scores = scores * k_scales[:, :, None]
        scores = jnp.where(seen, capped(scores, soft_cap), MASKED)
        best = scores.max(-1)  # [W, K, G]
        probs = jnp.where(seen, jnp.exp(scores - best[..., None]), 0.0)
        weights = probs if v_scales is None else jnp.where(seen, probs * v_scales[:, :, None], 0.0)

        def weigh(v):
            return jnp.einsum("wkgs,wksh->wkgh", weights.astype(v.dtype), v, preferred_element_type=jnp.float32)

        values = weigh(v)  # 0 * NaN is NaN: masking V costs a copy of it, so only where that really happened
        values = jax.lax.cond(jnp.isfinite(values).all(), lambda: values,
                              lambda: weigh(jnp.where(held[:, None, :, None], v, 0)))
        values = jnp.concatenate([values, probs.sum(-1, keepdims=True)], axis=-1)  # the total rides along

        mine = (row == jnp.arange(rows, dtype=jnp.int32)[:, None]) & valid  # [R, W]
        new_top = jnp.maximum(top, jnp.where(mine[:, :, None, None], best, MASKED).max(1))
        values = values * jnp.exp(best - new_top[row])[..., None]
        # In the product 0 * NaN would carry one row's NaN into all rows; it goes round it instead.
        sound = jnp.isfinite(values).all((1, 2, 3))
        values = jnp.where(sound[:, None, None, None], values, 0.0)
        broken |= (mine & ~sound).any(1)
        merged = jnp.dot(mine.astype(jnp.float32), values.reshape(size, -1), precision="highest")
        return new_top, acc * jnp.exp(top - new_top)[..., None] + merged.reshape(acc.shape), broken

    shape = (rows, kv_heads, group)
    top, acc = jnp.full(shape, MASKED), jnp.zeros((*shape, out_width + 1))
    if sinks is not None:
        top = jnp.broadcast_to(sinks.reshape(kv_heads, group), shape)
        acc = acc.at[..., out_width].set(1.0)
    start = (top, acc, jnp.zeros(rows, bool))
    _, acc, broken = jax.lax.fori_loop(0, (ends[-1] + size - 1) // size, turn, start)
    out, total = acc[..., :out_width], acc[..., out_width:]
    out = jnp.where(broken[:, None, None, None], jnp.nan, out / jnp.where(total == 0.0, 1.0, total))
    return out.reshape(rows, heads, out_width).astype(q.dtype)


def chunk_attention(q, k_pages, v_pages, page_table, query_starts, kv_lengths, *, scale, window, soft_cap, sinks,
                    first_page, value_lanes=None):
    """Ragged chunks: q [T, N, H], page_table [Q, M], query_starts [Q + 1], kv_lengths [Q] -> [T, N, H or value_lanes].

    A tile is up to CHUNK_QUERIES consecutive queries of one sequence; tiles run in ascending order, so a tile
    that writes past its sequence's end is overwritten by the next.
    """
    tokens, heads, width = q.shape
    sequences = kv_lengths.shape[0]
    _, kv_heads, page_size, _ = k_pages.data.shape
    group, out_width = heads // kv_heads, width if v_pages is not None else value_lanes
    size = min(CHUNK_QUERIES, tokens)
    counts = query_starts[1:] - query_starts[:-1]
    tile_ends = jnp.cumsum((counts + size - 1) // size)
    per_block = max(1, min(CHUNK_BLOCK // page_size, page_table.shape[1]))
    page_table = _pad_columns(page_table, per_block)
    if first_page is not None:
        page_table = page_table + first_page
    sink = None if sinks is None else jnp.repeat(sinks.reshape(1, kv_heads, group), size, axis=2)
    padded = jnp.pad(q * jnp.asarray(scale, q.dtype), ((0, size), (0, 0), (0, 0)))

    def tile(index, out):
        row = jnp.minimum(jnp.searchsorted(tile_ends, index, side="right").astype(jnp.int32), sequences - 1)
        in_row = index - (tile_ends[row] - (counts[row] + size - 1) // size)
        begin = query_starts[row] + in_row * size
        queries = jax.lax.dynamic_slice_in_dim(padded, begin, size).reshape(size, kv_heads, group, width)
        queries = queries.transpose(1, 2, 0, 3).reshape(1, kv_heads, group * size, width)
        position = kv_lengths[row] - counts[row] + in_row * size + jnp.arange(size, dtype=jnp.int32)
        position = jnp.minimum(position, kv_lengths[row] - 1)  # the overhang repeats the last query's mask
        last = jnp.tile(position, group)[None, None, :, None]
        first = jnp.zeros_like(last) if window is None else jnp.maximum(last - window + 1, 0)
        result = _walk(queries, k_pages, v_pages, page_table[row][None], first, last,
                       jnp.min(first), position[-1] + 1, per_block, soft_cap, sink, out_width)
        result = result.reshape(kv_heads, group, size, out_width).transpose(2, 0, 1, 3)
        result = result.reshape(size, heads, out_width)
        return jax.lax.dynamic_update_slice_in_dim(out, result.astype(out.dtype), begin, 0)

    return jax.lax.fori_loop(0, tile_ends[-1], tile, jnp.zeros((*padded.shape[:2], out_width), q.dtype))[:tokens]


def _walk(q, k_pages, v_pages, page_table, first, last, begin, end, per_block, soft_cap, sink, out_width):
    """Online softmax over positions begin:end, whole blocks of pages at a time.

    q [R, K, G, H] scaled, page_table [R, M]; first, last: [R, 1, G or 1, 1], the positions each query sees,
    inclusive; begin, end: int32 scalars bounding all of them; sink: [R, K, G] or None. Returns
    [R, K, G, out_width] float32, of the keys' first lanes without v_pages; rows that see nothing give zeros.
    """
    rows, kv_heads, group, width = q.shape
    page_size = k_pages.data.shape[2]
    block = per_block * page_size
    heads = jnp.arange(kv_heads, dtype=jnp.int32)[None, :, None]
    table = page_table[:, None, :] * kv_heads + heads  # [R, K, M] rows of the pool seen as [P * K, S * H]

    def turn(index, carry):
        top, total, acc = carry
        indices = jax.lax.dynamic_slice_in_dim(table, index * per_block, per_block, axis=2).reshape(-1)
        # Fused into the gather, the index arithmetic would run once an element instead of once a page.
        indices = jax.lax.optimization_barrier(indices)
        k, k_scales = _take_blocks(k_pages, indices, (rows, kv_heads, block, width), q.dtype)
        v, v_scales = (_take_blocks(v_pages, indices, k.shape, q.dtype) if v_pages is not None
                       else (k[..., :out_width], k_scales))
        position = index * block + jnp.arange(block, dtype=jnp.int32)
        seen = (position >= first) & (position <= last)  # [R, 1, G or 1, C]
        scores = jnp.einsum("rkgh,rkch->rkgc", q, k.astype(q.dtype), preferred_element_type=jnp.float32)
        if k_scales is not None:
            scores = scores * k_scales[:, :, None]
        scores = jnp.where(seen, capped(scores, soft_cap), MASKED)
        new_top = jnp.maximum(top, scores.max(-1, keepdims=True))
        probs = jnp.where(seen, jnp.exp(scores - new_top), 0.0)
        # Past the last position and below the first lie others' leftovers.
        held = (position <= jnp.max(last, axis=2, keepdims=True)) & (position >= jnp.min(first, axis=2, keepdims=True))
        held = held[:, :, 0, :, None]
        v = jnp.where(held, v, 0).astype(q.dtype)
        weights = probs if v_scales is None else jnp.where(seen, probs * v_scales[:, :, None], 0.0)
        values = jnp.einsum("rkgc,rkch->rkgh", weights.astype(v.dtype), v, preferred_element_type=jnp.float32)
        keep = jnp.exp(top - new_top)
        return new_top, total * keep + probs.sum(-1, keepdims=True), acc * keep + values

    shape = (rows, kv_heads, group)
    top, total = jnp.full((*shape, 1), MASKED), jnp.zeros((*shape, 1))
    if sink is not None:
        top, total = sink[..., None], jnp.ones((*shape, 1))
    start = (top, total, jnp.zeros((*shape, out_width)))
    _, total, acc = jax.lax.fori_loop(begin // block, (end + block - 1) // block, turn, start)
    return acc / jnp.where(total == 0.0, 1.0, total)


def _take_rows(pages, indices):
    """Rows of an array [rows, n] by int32 index: one contiguous copy each, without jnp's bounds handling."""
    dimensions = jax.lax.GatherDimensionNumbers(
        offset_dims=(1,), collapsed_slice_dims=(0,), start_index_map=(0,))
    return jax.lax.gather(pages, indices[:, None], dimensions, (1, pages.shape[1]),
                          mode=jax.lax.GatherScatterMode.PROMISE_IN_BOUNDS)


def _take_pages(pages: Pages, indices, dtype):
    """Whole pages by int32 index [W] -> ([W, K, S, H], scales [W, K, S] or None): one contiguous copy each."""

    def take(x):
        # Kept two-dimensional: fused with its reshape, a gather computes indices for every element.
        rows = jax.lax.optimization_barrier(_take_rows(x.reshape(x.shape[0], -1), indices))
        return rows.reshape(-1, *x.shape[1:])

    if pages.scales is None:
        return take(pages.data), None
    return take(pages.data).astype(dtype), take(pages.scales)[:, :, : pages.data.shape[2]]


def _take_blocks(pages: Pages, indices, shape, dtype):
    """Parts of pages that belong to one head, by index into [P * K] -> (shape, scales or None)."""
    pool, kv_heads, page_size, width = pages.data.shape
    data = _take_rows(pages.data.reshape(pool * kv_heads, page_size * width), indices).reshape(shape)
    if pages.scales is None:
        return data, None
    scales = _take_rows(pages.scales.reshape(pool * kv_heads, -1), indices)[:, :page_size].reshape(shape[:-1])
    return data.astype(dtype), scales


def _pad_columns(page_table, multiple):
    """Page tables are walked in whole blocks; the padding names the null page."""
    return jnp.pad(page_table, ((0, 0), (0, -page_table.shape[1] % multiple)))
