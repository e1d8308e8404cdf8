"""kv_update for TPUs (Mosaic): work items, one a page touched, moved by DMA between the pools and VMEM.

Rows are moved as bits, in 32-bit words of 1, 2 or 4 rows as they lie in a tile: all formats take one path, nothing is
rounded, and a NaN cannot reach its neighbours.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.kv_update import words as packed
from pallas_kernels.kv_update.items import Items, work_items
from pallas_kernels.kv_update.merge import log2, merge_rows, merge_scales, merge_word, tile_of, tiles_of
from pallas_kernels.kv_update.plan import Plan, make_plan
from pallas_kernels.pages import Pages, check_tiling, quantize


def kv_update(k_pages: Pages, v_pages: Pages | None, k: jax.Array, v: jax.Array | None, page_table: jax.Array,
              query_starts: jax.Array, kv_lengths: jax.Array, *, first_page: jax.Array | None, decode: bool,
              interpret: Any = False) -> tuple[Pages, Pages | None]:
    """See api.kv_update. Padding is written nowhere, and quantising is XLA's part.

    Args:
      interpret: False compiles; True or pltpu.InterpretParams run the kernel on a CPU.

    Raises:
      ValueError: float16 pages, or pages that are no whole number of tiles.
    """
    pools = [(k_pages, k)] if v_pages is None or v is None else [(k_pages, k), (v_pages, v)]
    for name, (pages, _) in zip(("k_pages", "v_pages"), pools, strict=False):
        check_tiling(name, pages)
    plan = make_plan(__file__, [pages for pages, _ in pools], k.shape[0], decode=decode)
    items = work_items(page_table, query_starts, kv_lengths, k.shape[0], k_pages.data.shape[2], plan.block,
                       decode=decode)
    first = jnp.zeros(1, jnp.int32) if first_page is None else first_page.reshape(1)
    # The full interpreter has no bitcasts of references: it gets words.
    worded = isinstance(interpret, pltpu.InterpretParams)
    streams = [s for pages, new in pools for s in _streams(pages, new, plan, worded)]
    moved = iter(_move(items, first, streams, plan, interpret))
    k_new, *v_new = [_pages(pages, next(moved), None if pages.scales is None else next(moved)) for pages, _ in pools]
    return k_new, v_new[0] if v_new else None


@dataclasses.dataclass(frozen=True, slots=True)
class Stream:
    """A pool and what goes into it; inside a kernel, their references.

    Attributes:
      source: the new rows or scales. spec: the block of it that a grid step takes.
      pool: [P, K, S, H], or words of it, or scales [P, K, S].
      item: shape of what an item holds in VMEM, `dtype` its type. pack: rows a word; None for scales.
      buffer, read, written: VMEM of the items in flight and their semaphores (inside a kernel).
    """

    source: Any
    spec: pl.BlockSpec
    pool: Any
    item: tuple[int, ...]
    dtype: Any
    pack: int | None
    buffer: Any = None
    read: Any = None
    written: Any = None

    @property
    def words(self) -> Any:
        """The pool's reference, [P, K, S / pack, H] int32."""
        return self.pool if self.pool.dtype == jnp.int32 else self.pool.bitcast(jnp.int32)


def _streams(pages: Pages, new: jax.Array, plan: Plan, worded: bool) -> list[Stream]:
    """What a pool needs: a stream of rows, and one of scales where it has them."""
    data, scales = quantize(new, pages.data.dtype)
    _, kv_heads, size, width = pages.data.shape
    pack = packed.packing(pages.data.dtype)
    pool = packed.words(pages.data) if worded else pages.data
    if plan.decode:
        source = packed.spread(data)
        spec = pl.BlockSpec((plan.block, kv_heads, width), lambda b, h, *_: (b, 0, 0))
        item: tuple[int, ...] = (kv_heads, width)
    else:
        source = packed.head_major(data)
        block = min(plan.block, source.shape[1])
        source, block = (packed.words(source), block // pack) if worded else (source, block)
        spec = pl.BlockSpec((plan.heads, block, width), lambda b, h, *_: (h, b, 0))
        item = (plan.heads, size // pack, width)
    streams = [Stream(source, spec, pool, item, jnp.int32, pack)]
    if scales is not None and pages.scales is not None:
        lanes = packed.lane_blocks(scales, plan.block, plan.heads)
        spec = pl.BlockSpec((1, 1, *lanes.shape[2:]), lambda b, h, *_: (b, h, 0, 0, 0))
        streams.append(Stream(lanes, spec, pages.scales, (plan.heads, pages.scales.shape[2]), jnp.float32, None))
    return streams


def _pages(old: Pages, data: jax.Array, scales: jax.Array | None) -> Pages:
    return Pages(data if data.dtype == old.data.dtype else packed.rows(data, old.data.dtype), scales)


def _move(items: Items, first: jax.Array, streams: list[Stream], plan: Plan, interpret: Any) -> list[jax.Array]:
    """The pools with the items in them."""
    blocks, kv_heads = items.starts.shape[0] - 1, streams[0].pool.shape[1]
    held = plan.block if plan.decode else plan.ring
    semaphores = pltpu.SemaphoreType.DMA((len(streams),) if plan.decode else (len(streams), plan.ring))
    pools = [pl.BlockSpec(memory_space=pl.ANY)] * len(streams)
    scalars = (*items, first)
    kernel = functools.partial(_kernel, streams=streams, plan=plan)
    return pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars), grid=(blocks, kv_heads // plan.heads),
            in_specs=[s.spec for s in streams] + pools, out_specs=pools,
            scratch_shapes=[pltpu.VMEM((held, *s.item), s.dtype) for s in streams] + [semaphores] * 2),
        out_shape=[jax.ShapeDtypeStruct(s.pool.shape, s.pool.dtype) for s in streams],
        input_output_aliases={len(scalars) + len(streams) + i: i for i in range(len(streams))},
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary", "arbitrary"), vmem_limit_bytes=plan.limit,
            disable_bounds_checks=True),
        name="kv_update_decode" if plan.decode else "kv_update_chunk",
        interpret=interpret,
    )(*scalars, *(s.source for s in streams), *(s.pool for s in streams))


def _kernel(pages, offsets, tokens, counts, starts, first, *refs, streams, plan):
    """Gives the streams their references and the items their numbers."""
    n = len(streams)
    read, written = refs[-2:]
    streams = [dataclasses.replace(s, source=refs[i], pool=refs[2 * n + i], buffer=refs[3 * n + i],
                                   read=read.at[i], written=written.at[i]) for i, s in enumerate(streams)]
    block = pl.program_id(0)

    def item(i):
        return pages[i] + first[0], offsets[i], tokens[i] - block * plan.block, counts[i]

    begin, end = starts[block], starts[block + 1]
    if plan.decode:
        _decode(streams, item, begin, end)
    else:
        _chunk(streams, item, begin, end, pl.program_id(1) * plan.heads, plan)


def _decode(streams, item, begin, end):
    """All words of a block's rows in, new rows into them, out again: no item waits for another."""

    def copies(i, back=False):
        page, offset, _, _ = item(i)
        for s in streams:
            part = s.pool.at[page] if s.pack is None else s.words.at[page, :, offset >> log2(s.pack)]
            held = s.buffer.at[i - begin]
            yield pltpu.make_async_copy(held, part, s.written) if back else pltpu.make_async_copy(part, held, s.read)

    @pl.loop(begin, end)
    def _(i):
        for copy in copies(i):
            copy.start()

    _await(streams, end - begin)

    @pl.loop(begin, end)
    def _(i):
        _, offset, token, _ = item(i)
        for s in streams:
            held = s.buffer.at[i - begin]
            if s.pack is None:
                merge_scales(s.source, held, offset, token, 1)
            else:
                merge_word(s.source, held, s.pack, offset, token)
        for copy in copies(i, back=True):
            copy.start()

    _await(streams, end - begin, back=True)


def _await(streams, count, back=False):
    """Waits for the copies of `count` items, a power of two of them at a time: a semaphore counts what has moved."""
    for s in streams:
        for log in range(s.buffer.shape[0].bit_length()):
            @pl.when(count >> log & 1 == 1)
            def _(s=s, log=log):
                held = s.buffer.at[pl.ds(0, 1 << log)]
                pltpu.make_async_copy(held, held, s.written if back else s.read).wait()


def _chunk(streams, item, begin, end, first_head, plan):
    """Items through a ring of buffers: reads run half a ring ahead, writes are awaited when a buffer is needed again.

    The ring is empty between grid steps: a page that a block of tokens cuts in two is written before it is read.
    """
    ahead = plan.ring // 2

    def each_copy(i, act, back=False):
        page, offset, _, count = item(i)
        slot = i & plan.ring - 1
        for s in streams:
            heads = pl.ds(first_head, plan.heads)
            held = s.buffer.at[slot]
            part = (s.pool if s.pack is None else s.words).at[page, heads]

            def copy(held, part, s=s):
                act(pltpu.make_async_copy(held, part, s.written.at[slot]) if back
                    else pltpu.make_async_copy(part, held, s.read.at[slot]))

            if s.pack is None:
                copy(held, part)
                continue
            size = s.item[1] * s.pack

            @pl.when(count < size)
            def _(s=s, held=held, part=part, copy=copy):
                @pl.loop(*tiles_of(s.pack, offset, count))
                def _(tile):
                    copy(held.at[:, tile_of(tile)], part.at[:, tile_of(tile)])

            if back:
                @pl.when(count == size)
                def _(held=held, part=part, copy=copy):
                    copy(held, part)

    def start(i, back=False):
        each_copy(i, lambda copy: copy.start(), back)

    def wait(i, back=False):
        each_copy(i, lambda copy: copy.wait(), back)

    @pl.loop(begin, jnp.minimum(begin + ahead, end))
    def _(i):
        start(i)

    @pl.loop(begin, end)
    def _(i):
        @pl.when(i + ahead < end)
        def _():
            @pl.when(i + ahead - plan.ring >= begin)
            def _():
                wait(i + ahead - plan.ring, back=True)

            start(i + ahead)

        wait(i)
        _, offset, token, count = item(i)
        for s in streams:
            held = s.buffer.at[i & plan.ring - 1]
            if s.pack is None:
                merge_scales(s.source, held, offset, token, count)
            else:
                merge_rows(s.source, held, s.pack, offset, token, count)
        start(i, back=True)

    @pl.loop(jnp.maximum(begin, end - plan.ring), end)
    def _(i):
        wait(i, back=True)
