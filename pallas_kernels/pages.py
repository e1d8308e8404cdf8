"""Pages: a pool of KV pages of one kind (keys or values), in any of the formats."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

QUANTIZED = ("int8", "float8_e4m3fn")
FORMATS = ("float32", "bfloat16", "float16", *QUANTIZED)


class Pages(NamedTuple):
    """data: [P, K, S, H], the pool. scales: [P, K, S] float32 where data is int8 or float8_e4m3fn, else None.

    A quantised position of a head holds data * scale. Keys and values may have different formats.
    """

    data: jax.Array
    scales: jax.Array | None = None

    @classmethod
    def zeros(cls, pages: int, kv_heads: int, page_size: int, head_dim: int, dtype: jax.typing.DTypeLike) -> "Pages":
        """A pool of zeros: pages (P), kv_heads (K), page_size (S), head_dim (H)."""
        shape = (pages, kv_heads, page_size, head_dim)
        scales = jnp.zeros(shape[:-1], jnp.float32) if jnp.dtype(dtype).name in QUANTIZED else None
        return cls(jnp.zeros(shape, dtype), scales)


def quantize(x: jax.Array, dtype: jax.typing.DTypeLike) -> tuple[jax.Array, jax.Array | None]:
    """Converts x [..., H] to a pool's dtype: (data [..., H], scales [...] float32, None unless quantised).

    Symmetric, a scale for each vector: largest magnitude / 127 (int8, rounded to nearest even) or / 448
    (float8_e4m3fn). A vector with a NaN gets a NaN scale, so that it stays broken in every format.
    """
    if jnp.dtype(dtype).name not in QUANTIZED:
        return x.astype(dtype), None
    x = x.astype(jnp.float32)
    top = 127.0 if jnp.dtype(dtype) == jnp.int8 else 448.0
    scales = jnp.max(jnp.abs(x), axis=-1) / top
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
    if (data.dtype.name in QUANTIZED) != (scales is not None):
        raise ValueError(f"{name}.scales must be given with int8 and float8_e4m3fn pages and only with them")
    if scales is not None and (scales.shape != data.shape[:-1] or scales.dtype != "float32"):
        raise ValueError(f"{name}.scales must be float32 {list(data.shape[:-1])}, got {scales.dtype} {scales.shape}")


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
    if decode and tokens != sequences:
        raise ValueError(f"decode wants one query a sequence, got T={tokens} and Q={sequences}")
