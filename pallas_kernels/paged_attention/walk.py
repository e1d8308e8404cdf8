"""The TPU kernel of paged_attention (Mosaic): one program walks a list of blocks of pages.

Pages are fetched whole, K and V of all kv heads at once, some blocks ahead of the products and across tiles; only pages
that hold something visible are. Where the keys hold the values (latent attention) there is no V to fetch. Per kv head
the queries of its group, or of a part of it, are the rows of two products a block, joined by an online softmax (arXiv
1805.02867) in base 2. On chips of two cores each takes its part of every context.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.options import MASKED
from pallas_kernels.paged_attention.blocks import Sizes
from pallas_kernels.paged_attention.tiles import Tiles
from pallas_kernels.tiling import LANES


class Options(NamedTuple):
    """window: of the model. cap: soft cap in base 2, q being in caps. compute: of the products. table_width: M."""

    window: int | None
    cap: float | None
    compute: Any
    table_width: int


class Cursor(NamedTuple):
    """A place in the list of blocks: tile, block of the split's part of it, and how many windows there were before."""

    tile: Any
    block: Any
    turn: Any


def walk_blocks(sizes: Sizes, options: Options, *refs: Any) -> None:
    """The kernel: fields of Tiles, page table [Q * M] and first page [1] in scalar memory; q in HBM; sinks
    [groups, rows, 128] or None in VMEM; then dicts by name: pools and outputs in HBM, scratch."""
    count = len(Tiles._fields)
    table, first_page, q, sinks, pools, outputs, scratch = refs[count:]
    Walker(sizes, options, Tiles(*refs[:count]), table, first_page, q, sinks, pools, outputs, scratch,
           pl.program_id(0)).run()


@dataclasses.dataclass(frozen=True, slots=True)
class Walker:
    """All that a walk needs."""

    s: Sizes
    options: Options
    tiles: Tiles
    table: Any
    first_page: Any
    q: Any
    sinks: Any
    pools: dict[str, Any]
    outputs: dict[str, Any]
    scratch: dict[str, Any]
    split: Any

    def run(self) -> None:
        depth, steps = self.s.depth, self.tiles.steps[0]

        def step(i, carry):
            at, ahead = carry

            @pl.when(i + depth - 1 < steps)
            def _():
                self.fetch(ahead, (i + depth - 1) % depth)

            slot = i % depth
            self.wait(at, slot)

            @pl.when(at.block == 0)
            def _():
                self.start(at)

            self.attend(at, slot)

            @pl.when(at.block + 1 == self.tiles.blocks[at.tile])
            def _():
                self.finish(at)

            return self.advance(at), self.advance(ahead)

        at = ahead = Cursor(jnp.int32(0), jnp.int32(0), jnp.int32(0))
        for i in range(depth - 1):
            @pl.when(i < steps)
            def _(ahead=ahead, i=i):
                self.fetch(ahead, i)

            ahead = self.advance(ahead)
        at, _ = jax.lax.fori_loop(0, steps, step, (at, ahead))
        for behind in (2, 1):
            @pl.when(at.turn >= behind)
            def _(behind=behind):
                self.await_written(at.turn - behind)

    def advance(self, at: Cursor) -> Cursor:
        ended = at.block + 1 == self.tiles.blocks[at.tile]
        moves = ended if self.s.decode else ended & self.last_of_window(at)
        return Cursor(at.tile + ended.astype(jnp.int32), jnp.where(ended, 0, at.block + 1),
                      at.turn + moves.astype(jnp.int32))

    def last_of_window(self, at: Cursor):
        return self.tiles.window[at.tile + 1] != self.tiles.window[at.tile]

    def first_of_window(self, at: Cursor):
        before = self.tiles.window[jnp.maximum(at.tile - 1, 0)]
        return (at.tile == 0) | (before != self.tiles.window[at.tile])

    def index(self, at: Cursor):
        """The block's place in the tile's whole context."""
        return self.split * self.tiles.blocks[at.tile] + at.block

    def end(self, at: Cursor):
        """Positions before it are seen."""
        return self.tiles.origin[at.tile] + self.tiles.high[at.tile]

    # Fetching

    def each_page(self, at: Cursor, run) -> None:
        """run(j) for the pages the block really has; most have all."""
        size, pages = self.s.page_size, self.s.pages
        left = (self.end(at) + size - 1) // size - self.tiles.page[at.tile] - self.index(at) * pages

        @pl.when(left >= pages)
        def _():
            for j in range(pages):
                run(j)

        @pl.when(left < pages)
        def _():
            jax.lax.fori_loop(0, left, lambda j, _: run(j), None)

    def q_copy(self, at: Cursor):
        window, slot = self.tiles.window[at.tile], at.turn % self.s.depth
        return pltpu.make_async_copy(self.part(self.q, window), self.scratch["q"].at[slot],
                                     self.scratch["fetched"].at[1, slot])

    def part(self, hbm, window):
        """A window's queries, or results."""
        if self.s.decode:
            return hbm.at[window]
        return hbm.at[:, :, pl.ds(pl.multiple_of(window * self.s.queries, self.s.queries), self.s.queries)]

    def fetch(self, at: Cursor, slot) -> None:
        @pl.when((at.block == 0) & self.first_of_window(at))
        def _():
            self.q_copy(at).start()

        entry = (self.tiles.row[at.tile] * self.options.table_width + self.tiles.page[at.tile]
                 + self.index(at) * self.s.pages)

        def page(j):
            number = self.table[entry + j] + self.first_page[0]
            for name, pool in self.pools.items():
                pltpu.make_async_copy(pool.at[number], self.scratch[name].at[slot, j],
                                      self.scratch["fetched"].at[0, slot]).start()

        self.each_page(at, page)

    def wait(self, at: Cursor, slot) -> None:
        def page(j):
            for name, pool in self.pools.items():
                pltpu.make_async_copy(pool.at[0], self.scratch[name].at[slot, j],
                                      self.scratch["fetched"].at[0, slot]).wait()

        self.each_page(at, page)

    # A tile

    def start(self, at: Cursor) -> None:
        @pl.when(self.first_of_window(at))
        def _():
            self.q_copy(at).wait()

        state = self.scratch
        state["acc"][...] = jnp.zeros_like(state["acc"])
        if self.sinks is None:
            state["top"][...] = jnp.full_like(state["top"], MASKED)
            state["total"][...] = jnp.zeros_like(state["total"])
        else:
            first = self.split == 0
            state["top"][...] = jnp.where(first, self.sinks[...], MASKED)
            state["total"][...] = jnp.full_like(state["total"], first.astype(jnp.float32))

    def attend(self, at: Cursor, slot) -> None:
        """One block of pages."""
        s, tiles = self.s, self.tiles
        base = (tiles.page[at.tile] + self.index(at) * s.pages) * s.page_size
        first, end = tiles.origin[at.tile] + tiles.low[at.tile], self.end(at)
        edge = base + s.positions > first + 1  # the first query does not see all of it
        if self.options.window is not None:
            edge |= base < end - self.options.window  # the last one does not

        @pl.when(edge)
        def _():
            # A block that ends early costs what it holds, to the next power of two of strips.
            fewer = 0
            for strips in s.strip_counts:
                holds = True if fewer == 0 else base + fewer * s.strip_positions < end
                if strips < s.strips:
                    holds &= base + strips * s.strip_positions >= end
                pl.when(holds)(functools.partial(self.partly, at, slot, base, strips))
                fewer = strips

        @pl.when(~edge)
        def _():
            self.each_heads(lambda first: self.accumulate(first, at, slot, s.strips, None))

    def partly(self, at: Cursor, slot, base, strips: int) -> None:
        """The first strips of a block, not all of which everybody sees."""
        s, end = self.s, self.end(at)
        positions = strips * s.strip_positions

        @pl.when(base + positions > end)
        def _():
            self.clear(slot, base, end, positions // s.page_size)

        column = base + jax.lax.broadcasted_iota(jnp.int32, (s.rows, positions), 1)
        last = self.tiles.origin[at.tile] + self.line()
        seen = column <= last
        if self.options.window is not None:
            seen &= column > last - self.options.window
        self.each_heads(lambda first: self.accumulate(first, at, slot, strips, seen))

    def line(self):
        """[rows, 1] int32: the query of each row, in its window."""
        return jax.lax.broadcasted_iota(jnp.int32, (self.s.rows, 1), 0) % self.s.queries

    def each_heads(self, run) -> None:
        """run(first) for the groups, `together` at a time."""
        count = self.s.groups // self.s.together
        if count == 1:
            run(0)
        else:
            jax.lax.fori_loop(0, count, lambda i, _: run(i * self.s.together), None)

    @property
    def values(self) -> str:
        """Which pool holds the values, in its first lanes."""
        return "v" if "v" in self.pools else "k"

    def clear(self, slot, base, end, pages: int) -> None:
        """Zeroes values from `end` on: another's leftovers or nothing ever written, and 0 * NaN is NaN."""
        s = self.s
        held = self.scratch[self.values].at[slot, :, :, :, : s.value_dim]

        def page(j, _):
            position = base + j * s.page_size + jax.lax.broadcasted_iota(jnp.int32, (1, s.page_size, s.value_dim), 1)
            held[j] = jnp.where(position < end, held[j].astype(jnp.float32), 0.0).astype(held.dtype)

        # A split's block may lie wholly past the end.
        jax.lax.fori_loop(jnp.maximum(end - base, 0) // s.page_size, pages, page, None)

    def accumulate(self, first, at: Cursor, slot, count: int, seen) -> None:
        """The first `count` strips of a block join the state of groups first:first + together; seen: [rows, C] bool,
        None where all is.

        Groups are one array wherever they can be, so that their products and reductions overlap. Strips have a softmax
        of their own until they are added up: the products of one hide the latencies of another.
        """
        s, state, compute = self.s, self.scratch, self.options.compute
        groups, strips = [first + i for i in range(s.together)], range(count)
        stack = pl.ds(first, s.together)
        width, pages = s.strip_positions, s.strip_positions // s.page_size
        precision = jax.lax.Precision.HIGHEST if compute == jnp.float32 else None

        def block(name, strip, group, lanes):
            held = state[name][slot, strip * pages : (strip + 1) * pages, group // s.parts, :, :lanes]
            return held.reshape(width, lanes).astype(compute)

        def scales(name, strip, group):
            head = pl.ds(group // s.parts, 1)
            return jnp.concatenate([state[name][slot, strip * pages + j, head][:, : s.page_size] for j in range(pages)],
                                   axis=1)  # [1, width]

        def with_keys(strip, group):
            q = state["q"][at.turn % s.depth, group].reshape(s.rows, s.head_dim)
            scores = jax.lax.dot_general(q, block("k", strip, group, s.head_dim), (((1,), (1,)), ((), ())),
                                         precision=precision, preferred_element_type=jnp.float32)
            return scores * scales("k_scales", strip, group) if "k_scales" in state else scores

        def masked(x, strip, instead):
            return x if seen is None else jnp.where(seen[:, strip * width : (strip + 1) * width], x, instead)

        # [together, rows, width] each
        scores = [jnp.stack([with_keys(strip, group) for group in groups]) for strip in strips]
        if self.options.cap is not None:
            scores = [jnp.tanh(x) * self.options.cap for x in scores]
        scores = [masked(scores[strip], strip, MASKED) for strip in strips]
        old = state["top"][stack]  # [together, rows, 128], equal in all lanes: to broadcast again would cost more
        tops = [jnp.broadcast_to(x.max(-1, keepdims=True), old.shape) for x in scores]
        top = functools.reduce(jnp.maximum, tops, old)
        if count == 1:
            tops = [top]
        probs = [masked(jnp.exp2(scores[strip] - _wide(tops[strip], width)), strip, 0.0) for strip in strips]
        keep = jnp.exp2(old - top)
        value_scales = f"{self.values}_scales"

        def with_values(strip, i, group):
            weights = probs[strip][i]
            if value_scales in state:
                weights = masked(weights * scales(value_scales, strip, group), strip, 0.0)
            return jnp.dot(weights.astype(compute), block(self.values, strip, group, s.value_dim), precision=precision,
                           preferred_element_type=jnp.float32)

        totals = [x.sum(-1, keepdims=True) for x in probs]
        values = [jnp.stack([with_values(strip, i, group) for i, group in enumerate(groups)]) for strip in strips]
        if count > 1:
            shares = [jnp.exp2(own - top) for own in tops]
            totals = [x * share for x, share in zip(totals, shares, strict=True)]
            values = [x * _wide(share, s.value_dim) for x, share in zip(values, shares, strict=True)]
        state["total"][stack] = state["total"][stack] * keep + functools.reduce(jnp.add, totals)
        state["top"][stack] = top
        state["acc"][stack] = state["acc"][stack] * _wide(keep, s.value_dim) + functools.reduce(jnp.add, values)

    def finish(self, at: Cursor) -> None:
        s, state, slot = self.s, self.scratch, at.turn % 2

        @pl.when(self.first_of_window(at) & (at.turn >= 2))
        def _():
            self.await_written(at.turn - 2)

        if not s.decode:
            own = (self.line() >= self.tiles.low[at.tile]) & (self.line() < self.tiles.high[at.tile])

        def some(first):
            stack = pl.ds(first, s.together)
            total = state["total"][stack]
            results = {"out": state["acc"][stack] * _wide(1.0 / jnp.where(total == 0.0, 1.0, total), s.value_dim)}
            if "log" in self.outputs:
                results["log"] = jnp.where(total > 0.0, state["top"][stack] + jnp.log2(total), MASKED)
            for name, value in results.items():
                buffer = state[name].at[slot, stack]
                value = value.astype(buffer.dtype)
                if not s.decode:  # sequences that share the window keep theirs
                    value = jnp.where(own, value, buffer[...].reshape(value.shape))
                buffer[...] = value.reshape(buffer.shape)

        self.each_heads(some)

        @pl.when(True if s.decode else self.last_of_window(at))
        def _():
            for copy in self.out_copies(self.tiles.window[at.tile], slot):
                copy.start()

    def out_copies(self, window, slot):
        return [pltpu.make_async_copy(self.scratch[name].at[slot], self.part(hbm.at[self.split], window),
                                      self.scratch["written"].at[slot]) for name, hbm in self.outputs.items()]

    def await_written(self, turn) -> None:
        for copy in self.out_copies(0, turn % 2):
            copy.wait()


def _wide(x, width: int):
    """[.., rows, 128] of equal lanes -> [.., rows, width]."""
    if width <= LANES:
        return x[..., :width]
    return jnp.concatenate([x] * -(-width // LANES), axis=-1)[..., :width]
