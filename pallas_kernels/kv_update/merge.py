"""Putting new rows and scales into the parts of pages that the TPU kernels hold in VMEM."""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.kv_update.words import bits
from pallas_kernels.tiling import LANES, SUBLANES


def log2(x: int) -> int:
    """Of a power of two."""
    return x.bit_length() - 1


def tiles_of(pack: int, offset, count):
    """The tiles of a page that `count` rows from `offset` on touch: first, last + 1."""
    log = log2(SUBLANES * pack)
    return offset >> log, (offset + count - 1 >> log) + 1


def tile_of(index):
    """The words of a tile."""
    return pl.ds(pl.multiple_of(index * SUBLANES, SUBLANES), SUBLANES)


def merge_word(source, held, pack: int, offset, token):
    """Puts the row of one token into the words `held` [K, H]; source [T, K, H] has it in all rows of its words."""
    mask = jnp.int32(bits(1, pack)) << (offset & pack - 1) * (32 // pack)
    held[...] = source[token] & mask | held[...] & ~mask


def merge_rows(source, held, pack: int, offset, token, count):
    """Puts the rows of `count` tokens, from `token` on, at `offset` of a page.

    source refers to a block of tokens, [K, T, H] or words of it, held to the page's words, [K, S / pack, H] int32.
    """
    width, row_bits = held.shape[2], 32 // pack
    source = source if source.dtype == jnp.int32 else source.bitcast(jnp.int32)
    last = source.shape[1] // SUBLANES - 1
    place = token - offset  # in the source, of the page's first row; outside of it only where the mask is
    word, part = place >> log2(pack), place & pack - 1
    shift = word & SUBLANES - 1
    row = jax.lax.broadcasted_iota(jnp.int32, (SUBLANES, width), 0)

    def from_two(low, high, shift):
        """The 8 words from `shift` on of two tiles."""
        low, high = (pltpu.roll(x, 2 * SUBLANES - shift & SUBLANES - 1, 1) for x in (low, high))
        return jnp.where(row < SUBLANES - shift, low, high)

    @pl.loop(*tiles_of(pack, offset, count))
    def _(tile):
        tiles = (jnp.clip((word >> log2(SUBLANES)) + tile + i, 0, last) for i in range(2))
        low, high = (source[:, tile_of(at), :] for at in tiles)
        new = from_two(low, high, shift)
        if pack > 1:  # a word takes the upper rows of one and the lower rows of the next
            upper = jax.lax.shift_right_logical(new, jnp.full_like(new, part * row_bits))
            lower = from_two(low, high, shift + 1) << (32 - part * row_bits & 31)
            new = jnp.where(part == 0, new, upper | lower)
        mask = jnp.zeros((SUBLANES, width), jnp.int32)
        for i in range(pack):
            at = (tile * SUBLANES + row) * pack + i
            only = bits(i + 1, pack) & ~bits(i, pack)
            mask |= jnp.where((at >= offset) & (at < offset + count), only, 0)
        rows = (slice(None), tile_of(tile))
        held[rows] = new & mask | held[rows] & ~mask


def merge_scales(source, held, offset, token, count):
    """The same for scales, whose positions are on lanes: source [1, 1, tiles, K, LANES], a tile before and after the
    block's; held [K, LANES]."""
    place = token - offset + LANES
    tile, shift = place >> log2(LANES), place & LANES - 1
    low, high = (pltpu.roll(source[0, 0, tile + i], LANES - shift & LANES - 1, 1) for i in range(2))
    lane = jax.lax.broadcasted_iota(jnp.int32, held.shape, 1)
    new = jnp.where(lane < LANES - shift, low, high)
    held[...] = jnp.where((lane >= offset) & (lane < offset + count), new, held[...])
