"""paged_attention for TPUs (Mosaic): one program walks a list of blocks of pages.

A tile is some queries of one sequence, all heads. Its pages are fetched whole, K and V of all kv heads at once, a few
blocks ahead of the products and across tiles; what a tile needs of the past is real pages only. Per kv head the
queries of its group are the rows of two products a block, joined by an online softmax (arXiv 1805.02867) in base 2,
whose exponential the chip has. On chips of two cores each takes its part of every context (`splits`), merged after.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.chips import local_chip
from pallas_kernels.options import MASKED
from pallas_kernels.paged_attention.blocks import LANES, Sizes, choose
from pallas_kernels.paged_attention.tiles import Tiles, chunk_tiles, decode_tiles
from pallas_kernels.pages import Pages
from pallas_kernels.tuning import tuned

LOG2E = float(np.log2(np.e))


def paged_attention(q, k_pages: Pages, v_pages: Pages, page_table, query_starts, kv_lengths, *, scale, window, soft_cap,
                    sinks, first_page, decode, interpret: Any = False):
    """See api.paged_attention. interpret: True or pltpu.InterpretParams to run on a CPU."""
    tokens, heads, width = q.shape
    _, kv_heads, page_size, _ = k_pages.data.shape
    chip = local_chip()
    key = (f"{'decode' if decode else 'chunk'} {q.dtype} {k_pages.data.dtype} {v_pages.data.dtype} "
           f"heads={heads}/{kv_heads} head_dim={width} page={page_size}")
    sizes = choose(
        heads=heads, kv_heads=kv_heads, head_dim=width, page_size=page_size, table_width=page_table.shape[1],
        tokens=None if decode else tokens, k_bytes=k_pages.data.dtype.itemsize, v_bytes=v_pages.data.dtype.itemsize,
        chip=chip, tuned=tuned(__file__, key))
    shared = {"page_size": page_size, "block_pages": sizes.pages, "splits": sizes.splits, "window": window}
    if decode:
        tiles = decode_tiles(kv_lengths, **shared)
        real = kv_lengths > 0
    else:
        tiles = chunk_tiles(query_starts, kv_lengths, tokens, queries=sizes.queries, **shared)
        real = jnp.arange(tokens, dtype=jnp.int32) < query_starts[-1]
    out = _call(sizes, Options(scale, window, soft_cap), q.dtype, tiles, _spread(q, sizes), k_pages, v_pages, page_table, sinks,
                first_page, int(chip.vmem * 0.9), interpret)
    # What no tile wrote is uninitialised.
    return jnp.where(real[:, None, None], _collect(out, tokens, sizes), 0.0).astype(q.dtype)


class Options(NamedTuple):
    """Static options of api.paged_attention."""

    scale: float
    window: int | None
    soft_cap: float | None

    @property
    def unit(self) -> float:
        """What q is multiplied by: scores are then in base 2, or in soft caps."""
        return self.scale * LOG2E if self.soft_cap is None else self.scale / self.soft_cap


def _spread(q, s: Sizes):
    """[T, N, H] -> [(T + TQ) * padded heads, H] float32: a tile's rows contiguous, never beyond the end."""
    tokens, heads, width = q.shape
    q = q.astype(jnp.float32)  # rows of one head are read with a stride, which packed types do not have
    if s.decode:
        q = jnp.pad(q.reshape(tokens, s.kv_heads, s.group, width), ((0, 0), (0, 0), (0, s.rows - s.group), (0, 0)))
    else:
        q = jnp.pad(q, ((0, s.queries), (0, s.padded_heads - heads), (0, 0)))
    return q.reshape(-1, width)


def _collect(out, tokens: int, s: Sizes):
    """Inverse of `_spread` -> [T, N, H] float32."""
    if s.decode:
        return out.reshape(tokens, s.kv_heads, s.rows, -1)[:, :, : s.group].reshape(tokens, s.heads, -1)
    return out.reshape(-1, s.padded_heads, s.head_dim)[:tokens, : s.heads]


def _call(s: Sizes, options: Options, dtype, tiles: Tiles, q, k_pages: Pages, v_pages: Pages, page_table, sinks, first_page,
          vmem_limit: int, interpret):
    """-> like q: float32, normalised."""
    compute = jnp.float32 if jnp.float32 in (dtype, k_pages.data.dtype, v_pages.data.dtype) else jnp.bfloat16
    if sinks is not None:
        sinks = jnp.pad(sinks.reshape(s.kv_heads, s.group), ((0, 0), (0, s.rows - s.group))) if s.decode else jnp.repeat(
            sinks.reshape(s.kv_heads, s.group), s.queries, axis=1)
        sinks = jnp.broadcast_to(sinks[..., None] * LOG2E, (s.kv_heads, s.rows, LANES))
    first_page = jnp.zeros(1, jnp.int32) if first_page is None else first_page.reshape(1)
    pools = [x for pages in (k_pages, v_pages) for x in pages if x is not None]
    scaled = k_pages.scales is not None, v_pages.scales is not None
    tile_rows = s.queries * s.padded_heads
    part = jax.ShapeDtypeStruct((s.splits, *q.shape), jnp.float32)
    logsum = jax.ShapeDtypeStruct((s.splits, q.shape[0], LANES), jnp.float32)
    scratch: dict[str, Any] = {
        "q": pltpu.VMEM((s.depth, tile_rows, s.head_dim), jnp.float32),
        "rows": pltpu.VMEM((s.kv_heads, s.rows, s.head_dim), compute),
        "k": pltpu.VMEM((s.depth, s.pages, *k_pages.data.shape[1:]), k_pages.data.dtype),
        "v": pltpu.VMEM((s.depth, s.pages, *v_pages.data.shape[1:]), v_pages.data.dtype),
        "top": pltpu.VMEM((s.kv_heads, s.rows, LANES), jnp.float32),
        "total": pltpu.VMEM((s.kv_heads, s.rows, LANES), jnp.float32),
        "acc": pltpu.VMEM((s.kv_heads, s.rows, s.head_dim), jnp.float32),
        "out": pltpu.VMEM((2, tile_rows, s.head_dim), jnp.float32),
        "fetched": pltpu.SemaphoreType.DMA((3, s.depth)),
        "written": pltpu.SemaphoreType.DMA((2, 2)),
    }
    if s.splits > 1:
        scratch["logsum"] = pltpu.VMEM((2, tile_rows, LANES), jnp.float32)
    for name, has in zip(("k_scales", "v_scales"), scaled, strict=True):
        if has:
            scratch[name] = pltpu.VMEM((s.depth, s.pages, *k_pages.data.shape[1:3]), jnp.float32)
    anywhere, whole = pl.BlockSpec(memory_space=pl.ANY), pl.BlockSpec(memory_space=pltpu.VMEM)
    scalars = (*tiles, page_table.reshape(-1), first_page)
    kernel = functools.partial(_kernel, s, options, compute, scaled, sinks is not None, page_table.shape[1])
    outs = [part] if s.splits == 1 else [part, logsum]
    result = pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars), grid=(s.splits,),
            in_specs=[anywhere, *[whole] * (sinks is not None), *[anywhere] * len(pools)],
            out_specs=[anywhere] * len(outs), scratch_shapes=[scratch]),
        out_shape=outs, interpret=interpret, name="paged_decode" if s.decode else "paged_chunks",
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",), vmem_limit_bytes=vmem_limit),
    )(*scalars, q, *[sinks] * (sinks is not None), *pools)
    if s.splits == 1:
        return result[0][0]
    parts, logs = result
    logs = logs[:, :, :1]
    weights = jnp.exp2(logs - logs.max(0))
    return jnp.sum(parts * weights, axis=0) / jnp.sum(weights, axis=0)


class Cursor(NamedTuple):
    """A place in the list of blocks: tile, and block of the split's part of it."""

    tile: jax.Array
    block: jax.Array


def _kernel(s: Sizes, options: Options, compute, scaled, has_sinks: bool, table_width: int, *refs):
    steps, rows, begins, positions, ends, pages, blocks, table, first_page = refs[:9]
    refs = list(refs[9:])
    q_hbm = refs.pop(0)
    sinks = refs.pop(0) if has_sinks else None
    k_hbm = refs.pop(0)
    k_scales_hbm = refs.pop(0) if scaled[0] else None
    v_hbm = refs.pop(0)
    v_scales_hbm = refs.pop(0) if scaled[1] else None
    out_hbm = refs.pop(0)
    logsum_hbm = refs.pop(0) if s.splits > 1 else None
    (scratch,) = refs
    split = pl.program_id(0)
    tile_rows = s.queries * s.padded_heads
    streams = [x for x in ((k_hbm, scratch["k"], 0), (v_hbm, scratch["v"], 1),
                           (k_scales_hbm, scratch.get("k_scales"), 0), (v_scales_hbm, scratch.get("v_scales"), 1))
               if x[0] is not None]

    def advance(at: Cursor) -> Cursor:
        ended = at.block + 1 == blocks[at.tile]
        return Cursor(at.tile + ended.astype(jnp.int32), jnp.where(ended, 0, at.block + 1))

    def whole_block(at: Cursor):
        """The block's index in the tile's whole context."""
        return split * blocks[at.tile] + at.block

    def held(at: Cursor):
        """How many pages the block really has."""
        last = (ends[at.tile] + s.page_size - 1) // s.page_size - pages[at.tile]
        return jnp.clip(last - whole_block(at) * s.pages, 0, s.pages)

    def each_page(count, run):
        """run(j) for the first `count` pages of a block; most blocks are full."""
        @pl.when(count == s.pages)
        def _():
            for j in range(s.pages):
                run(j)

        @pl.when(count < s.pages)
        def _():
            jax.lax.fori_loop(0, count, lambda j, _: run(j), None)

    def q_copy(at: Cursor):
        slot = at.tile % s.depth
        begin = pl.multiple_of(begins[at.tile] * s.padded_heads, 8)
        return pltpu.make_async_copy(
            q_hbm.at[pl.ds(begin, tile_rows)], scratch["q"].at[slot], scratch["fetched"].at[2, slot])

    def fetch(at: Cursor, slot):
        @pl.when(at.block == 0)
        def _():
            q_copy(at).start()

        entry = rows[at.tile] * table_width + pages[at.tile] + whole_block(at) * s.pages

        def page(j):
            number = table[entry + j] + first_page[0]
            for hbm, buffer, stream in streams:
                pltpu.make_async_copy(hbm.at[number], buffer.at[slot, j], scratch["fetched"].at[stream, slot]).start()

        each_page(held(at), page)

    def wait(at: Cursor, slot):
        def page(j):
            for hbm, buffer, stream in streams:
                pltpu.make_async_copy(hbm.at[0], buffer.at[slot, j], scratch["fetched"].at[stream, slot]).wait()

        each_page(held(at), page)

    def start_tile(at: Cursor):
        q_copy(at).wait()
        load = scratch["q"].at[at.tile % s.depth]
        for h in range(s.kv_heads):
            for g in range(1 if s.decode else s.group):
                if s.decode:
                    scratch["rows"][h] = (load[pl.ds(h * s.rows, s.rows)] * options.unit).astype(compute)
                else:
                    lines = load[pl.ds(h * s.group + g, s.queries, stride=s.padded_heads)]
                    scratch["rows"][h, pl.ds(g * s.queries, s.queries)] = (lines * options.unit).astype(compute)
        scratch["acc"][...] = jnp.zeros_like(scratch["acc"])
        if sinks is None:
            scratch["top"][...] = jnp.full_like(scratch["top"], MASKED)
            scratch["total"][...] = jnp.zeros_like(scratch["total"])
        else:
            first = split == 0
            scratch["top"][...] = jnp.where(first, sinks[...], MASKED)
            scratch["total"][...] = jnp.full_like(scratch["total"], first.astype(jnp.float32))

    def clear(at: Cursor, slot, base):
        """Zeroes V past the tile's end: another's leftovers or nothing ever written, and 0 * NaN is NaN."""
        def page(j, _):
            position = base + j * s.page_size + jax.lax.broadcasted_iota(jnp.int32, (1, s.page_size, s.head_dim), 1)
            v = scratch["v"][slot, j]
            scratch["v"][slot, j] = jnp.where(position < ends[at.tile], v.astype(jnp.float32), 0.0).astype(v.dtype)

        jax.lax.fori_loop((ends[at.tile] - base) // s.page_size, s.pages, page, None)

    def scores_and_values(h, slot, seen):
        """One block of one kv head; seen: [rows, C] bool, None where all is."""
        exact = {"precision": jax.lax.Precision.HIGHEST} if compute == jnp.float32 else {}
        k = scratch["k"][slot, :, h].reshape(s.positions, s.head_dim).astype(compute)
        scores = jax.lax.dot_general(scratch["rows"][h], k, (((1,), (1,)), ((), ())),
                                     preferred_element_type=jnp.float32, **exact)
        if scaled[0]:
            scores = scores * _line(scratch["k_scales"], slot, h, s)
        if options.soft_cap is not None:
            scores = jnp.tanh(scores) * (options.soft_cap * LOG2E)
        if seen is not None:
            scores = jnp.where(seen, scores, MASKED)
        old = scratch["top"][h][:, :1]
        top = jnp.maximum(old, scores.max(1, keepdims=True))
        probs = jnp.exp2(scores - top)
        if seen is not None:
            probs = jnp.where(seen, probs, 0.0)
        keep = jnp.exp2(old - top)
        total = scratch["total"][h][:, :1] * keep + probs.sum(1, keepdims=True)
        if scaled[1]:
            probs = probs * _line(scratch["v_scales"], slot, h, s)
            if seen is not None:
                probs = jnp.where(seen, probs, 0.0)
        v = scratch["v"][slot, :, h].reshape(s.positions, s.head_dim).astype(compute)
        values = jax.lax.dot(probs.astype(compute), v, preferred_element_type=jnp.float32, **exact)
        scratch["acc"][h] = scratch["acc"][h] * keep + values
        scratch["top"][h] = jnp.broadcast_to(top, (s.rows, LANES))
        scratch["total"][h] = jnp.broadcast_to(total, (s.rows, LANES))

    def attend(at: Cursor, slot):
        base = (pages[at.tile] + whole_block(at) * s.pages) * s.page_size
        first, end = positions[at.tile], ends[at.tile]
        edge = base + s.positions > first + 1  # the first query does not see all of the block
        if options.window is not None:
            edge |= base <= end - 1 - options.window

        def heads(masked: bool):
            seen = None
            if masked:
                column = base + jax.lax.broadcasted_iota(jnp.int32, (s.rows, s.positions), 1)
                line = jax.lax.broadcasted_iota(jnp.int32, (s.rows, s.positions), 0)
                last = first + (0 if s.decode else line % s.queries)
                seen = column <= last
                if options.window is not None:
                    seen &= column > last - options.window

            unroll = s.decode and s.kv_heads <= 8
            if unroll:
                for h in range(s.kv_heads):
                    scores_and_values(h, slot, seen)
            else:
                jax.lax.fori_loop(0, s.kv_heads, lambda h, _: scores_and_values(h, slot, seen), None)

        @pl.when(edge)
        def _():
            @pl.when(base + s.positions > end)
            def _():
                clear(at, slot, base)

            heads(masked=True)

        @pl.when(~edge)
        def _():
            heads(masked=False)

    def out_copies(tile, slot):
        begin = pl.multiple_of(begins[tile] * s.padded_heads, 8)
        copies = [pltpu.make_async_copy(scratch["out"].at[slot], out_hbm.at[split, pl.ds(begin, tile_rows)],
                                        scratch["written"].at[0, slot])]
        if logsum_hbm is not None:
            copies.append(pltpu.make_async_copy(
                scratch["logsum"].at[slot], logsum_hbm.at[split, pl.ds(begin, tile_rows)], scratch["written"].at[1, slot]))
        return copies

    def finish_tile(at: Cursor):
        slot = at.tile % 2

        # In decode tiles write different rows: the buffer must be free. In chunks a tile overhangs into the next
        # one's rows, so the one before must have landed.
        behind = 2 if s.decode else 1

        @pl.when(at.tile >= behind)
        def _():
            for copy in out_copies(at.tile - behind, (at.tile - behind) % 2):
                copy.wait()

        def place(name, h, value):
            if s.decode:
                scratch[name][slot, pl.ds(h * s.rows, s.rows)] = value
            else:
                for g in range(s.group):
                    lines = pl.ds(h * s.group + g, s.queries, stride=s.padded_heads)
                    scratch[name][slot, lines] = value[g * s.queries : (g + 1) * s.queries]

        for h in range(s.kv_heads):
            total = scratch["total"][h][:, :1]
            place("out", h, scratch["acc"][h] / jnp.where(total == 0.0, 1.0, total))
            if logsum_hbm is not None:
                log = jnp.where(total > 0.0, scratch["top"][h][:, :1] + jnp.log2(total), MASKED)
                place("logsum", h, jnp.broadcast_to(log, (s.rows, LANES)))
        for copy in out_copies(at.tile, slot):
            copy.start()

    def step(i, carry):
        at, ahead = carry

        @pl.when(i + s.depth - 1 < steps[0])
        def _():
            fetch(ahead, (i + s.depth - 1) % s.depth)

        slot = i % s.depth
        wait(at, slot)

        @pl.when(at.block == 0)
        def _():
            start_tile(at)

        attend(at, slot)

        @pl.when(at.block + 1 == blocks[at.tile])
        def _():
            finish_tile(at)

        return advance(at), advance(ahead)

    origin = Cursor(jnp.int32(0), jnp.int32(0))
    ahead = origin
    for i in range(s.depth - 1):
        @pl.when(i < steps[0])
        def _(ahead=ahead, i=i):
            fetch(ahead, i)

        ahead = advance(ahead)
    last, _ = jax.lax.fori_loop(0, steps[0], step, (origin, ahead))
    for behind in ((2, 1) if s.decode else (1,)):
        @pl.when(last.tile >= behind)
        def _(behind=behind):
            for copy in out_copies(last.tile - behind, (last.tile - behind) % 2):
                copy.wait()


def _line(scales, slot, h, s: Sizes):
    """Scales of one head, a page a line -> [1, C]."""
    return jnp.concatenate([scales[slot, j, pl.ds(h, 1)] for j in range(s.pages)], axis=1)
