"""Arrays as the TPU kernels take them: rows packed in 32-bit words, tokens in blocks."""

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.tiling import LANES, SUBLANES, up


def packing(dtype: jax.typing.DTypeLike) -> int:
    """Rows a word holds."""
    return 4 // jnp.dtype(dtype).itemsize


def bits(rows: int, pack: int) -> int:
    """The bits of the first `rows` rows of a word, as an int32."""
    return int(np.array((1 << (32 // pack * rows)) - 1, np.uint32).view(np.int32))


def words(x: jax.Array) -> jax.Array:
    """[.., S, H] as it lies in tiles: [.., S / pack, H] int32, the first row in the lowest bits."""
    pack = packing(x.dtype)
    if pack == 1:
        return jax.lax.bitcast_convert_type(x, jnp.int32)
    x = x.reshape(*x.shape[:-2], x.shape[-2] // pack, pack, x.shape[-1])
    return jax.lax.bitcast_convert_type(jnp.moveaxis(x, -2, -1), jnp.int32)


def rows(x: jax.Array, dtype: jax.typing.DTypeLike) -> jax.Array:
    """The inverse of `words`."""
    pack = packing(dtype)
    x = jax.lax.bitcast_convert_type(x, dtype)
    return x if pack == 1 else jnp.moveaxis(x, -1, -2).reshape(*x.shape[:-3], -1, x.shape[-2])


def spread(x: jax.Array) -> jax.Array:
    """x of any shape as int32 words that hold each value in all their rows."""
    pack = packing(x.dtype)
    if pack == 1:
        return jax.lax.bitcast_convert_type(x, jnp.int32)
    unsigned = jax.lax.bitcast_convert_type(x, jnp.uint16 if pack == 2 else jnp.uint8).astype(jnp.uint32)
    return jax.lax.bitcast_convert_type(unsigned * jnp.uint32(0x10001 if pack == 2 else 0x1010101), jnp.int32)


def head_major(x: jax.Array) -> jax.Array:
    """[T, K, H] -> [K, T, H], with zeros to whole tiles of tokens."""
    x = x.swapaxes(0, 1)
    return jnp.pad(x, ((0, 0), (0, -x.shape[1] % (SUBLANES * packing(x.dtype))), (0, 0)))


def lane_blocks(x: jax.Array, block: int, heads: int) -> jax.Array:
    """[T, K] -> [T / block, K / heads, tiles, heads, LANES]: tokens on lanes, a tile of zeros before and after."""
    x = jnp.pad(x, ((0, -x.shape[0] % block), (0, 0))).reshape(-1, block, *x.shape[1:]).swapaxes(1, 2)
    x = jnp.pad(x, ((0, 0), (0, 0), (LANES, LANES + up(block, LANES) - block)))
    return x.reshape(x.shape[0], x.shape[1] // heads, heads, -1, LANES).swapaxes(2, 3)
