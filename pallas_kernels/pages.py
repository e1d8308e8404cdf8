"""Pages: a pool of KV pages of one kind (keys or values), in any of the formats."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.tiling import LANES, up

LARGEST = {"int8": 127.0, "float8_e4m3fn": 448.0}
QUANTIZED = tuple(LARGEST)
FORMATS = ("float32", "bfloat16", "float16", *QUANTIZED)


class Pages(NamedTuple):
    """data: [P, K, S, H], the pool. scales: [P, K, S] float32 where data is int8 or float8_e4m3fn, else None.

    A quantised position of a head holds data * scale. Keys and values may have different formats. H may be more than
    the model's head_dim and the scales' last axis more than S: TPUs lay the last axis out in lanes of 128, and an
    array that does not fill them would be kept transposed, to be copied as a whole for each kernel (`pool_shapes`).
    """

    data: jax.Array
    scales: jax.Array | None = None


def pool_shapes(pages: int, kv_heads: int, page_size: int, head_dim: int, dtype: jax.typing.DTypeLike,
                platform: str) -> Pages:
    """Shapes and dtypes (jax.ShapeDtypeStruct) of a pool P, K, S, H on a platform: tpu, gpu or cpu."""
    width, positions = (up(n, LANES if platform == "tpu" else 1) for n in (head_dim, page_size))
    data: Any = jax.ShapeDtypeStruct((pages, kv_heads, page_size, width), jnp.dtype(dtype))
    scales: Any = jax.ShapeDtypeStruct((pages, kv_heads, positions), jnp.dtype("float32"))
    return Pages(data, scales if data.dtype.name in QUANTIZED else None)


def widen(x: jax.Array, width: int) -> jax.Array:
    """x [..., H] with zeros up to a pool's `width`."""
    missing = width - x.shape[-1]
    return jnp.pad(x, ((0, 0),) * (x.ndim - 1) + ((0, missing),)) if missing else x


def quantize(x: jax.Array, dtype: jax.typing.DTypeLike) -> tuple[jax.Array, jax.Array | None]:
    """Converts x [..., H] to a pool's dtype: (data [..., H], scales [...] float32, None unless quantised).

    Symmetric, a scale for each vector: largest magnitude / 127 (int8, rounded to nearest even) or / 448
    (float8_e4m3fn). A vector with a NaN gets a NaN scale, so that it stays broken in every format.
    """
    if jnp.dtype(dtype).name not in QUANTIZED:
        return x.astype(dtype), None
    x = x.astype(jnp.float32)
    scales = jnp.max(jnp.abs(x), axis=-1) / LARGEST[jnp.dtype(dtype).name]
    scaled = x * jnp.where(scales > 0, 1.0 / scales, 0.0)[..., None]
    if jnp.dtype(dtype) == jnp.int8:
        scaled = jnp.round(scaled)
    return scaled.astype(dtype), scales


def check_pages(name: str, pages: Pages, *, like: Pages | None = None) -> None:
    """Raises ValueError, naming the field, if a pool's shapes and dtypes do not fit together (or another's shape)."""
    data, scales = pages
    if data.ndim != 4:
        raise ValueError(f"{name}.data must be [P, K, S, H], got {data.shape}")
    if data.dtype.name not in FORMATS:
        raise ValueError(f"{name}.data must be one of {', '.join(FORMATS)}, got {data.dtype}")
    if like is not None and data.shape != like.data.shape:
        raise ValueError(f"{name}.data must have the shape of the other pool, {like.data.shape}, got {data.shape}")
    if scales is not None and like is not None and like.scales is not None and scales.shape != like.scales.shape:
        raise ValueError(f"{name}.scales must have the shape of the other pool's, {like.scales.shape}, "
                         f"got {scales.shape}")
    if (data.dtype.name in QUANTIZED) != (scales is not None):
        raise ValueError(f"{name}.scales must be given with int8 and float8_e4m3fn pages and only with them")
    if scales is not None and (scales.ndim != 3 or scales.shape[:2] != data.shape[:2]
                               or scales.shape[2] < data.shape[2] or scales.dtype != "float32"):
        raise ValueError(f"{name}.scales must be float32 {list(data.shape[:-1])} or have a longer last axis, "
                         f"got {scales.dtype} {scales.shape}")


def check_tiling(name: str, pages: Pages) -> None:
    """Raises ValueError, naming the field, if a pool does not lie in whole tiles of a TPU."""
    if pages.data.dtype == jnp.float16 or pages.data.shape[2] > 128:
        raise ValueError(f"{name}.data {pages.data.shape} of {pages.data.dtype}: on a TPU S must be 128 at most, and "
                         "bfloat16 takes the place of float16")
    rows = 32 // pages.data.dtype.itemsize
    if pages.data.shape[2] % rows or pages.data.shape[3] % 128:
        raise ValueError(f"{name}.data {pages.data.shape}: on a TPU S must be a multiple of {rows} for "
                         f"{pages.data.dtype} and H one of 128 (`pages.pool_shapes` pads it)")
    if pages.scales is not None and pages.scales.shape[2] % 128:
        raise ValueError(f"{name}.scales {pages.scales.shape}: on a TPU the last axis must be a multiple of 128 "
                         "(`pages.pool_shapes` pads it)")


def check_sequences(page_table: jax.Array, query_starts: jax.Array, kv_lengths: jax.Array,
                    first_page: jax.Array | None, tokens: int, decode: bool) -> None:
    """Raises ValueError, naming the field, if what describes Q sequences of T = `tokens` does not fit together."""
    sequences = page_table.shape[0]
    wanted = [("page_table", page_table, (sequences, page_table.shape[-1])),
              ("query_starts", query_starts, (sequences + 1,)), ("kv_lengths", kv_lengths, (sequences,))]
    if first_page is not None:
        wanted.append(("first_page", first_page, ()))
    for name, array, shape in wanted:
        if array.shape != shape or array.dtype != "int32":
            raise ValueError(f"{name} must be int32 {list(shape)}, got {array.dtype} {array.shape}")
    if tokens == 0:
        raise ValueError("there must be a token at least, got T=0")
    if decode and tokens != sequences:
        raise ValueError(f"decode wants one query a sequence, got T={tokens} and Q={sequences}")
