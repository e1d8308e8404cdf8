"""kv_update: the one public function."""

import jax

from pallas_kernels.kv_update import reference


def kv_update(
    k_pages: jax.Array, v_pages: jax.Array, k: jax.Array, v: jax.Array, pages: jax.Array, offsets: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Writes one position a token into the pool, in place when the pool is donated.

    Args:
      k_pages, v_pages: [P, K, S, H] pools; new values are converted to their dtype.
      k, v: [T, K, H] new keys and values.
      pages: [T] int32, the page of each token; padding tokens name the null page 0, which nothing reads.
      offsets: [T] int32, position inside the page, in [0, S).

    Returns:
      The updated (k_pages, v_pages).

    Raises:
      ValueError: shapes or dtypes do not fit together.
    """
    tokens = k.shape[0]
    for name, pool, new in (("k", k_pages, k), ("v", v_pages, v)):
        if pool.ndim != 4 or new.shape != (tokens, pool.shape[1], pool.shape[3]):
            raise ValueError(
                f"{name} {new.shape} does not fit {name}_pages {pool.shape}; want [T, K, H] into [P, K, S, H]")
    for name, index in (("pages", pages), ("offsets", offsets)):
        if index.shape != (tokens,) or index.dtype != "int32":
            raise ValueError(f"{name} must be int32 [{tokens}], got {index.dtype} {index.shape}")
    return reference.kv_update(k_pages, v_pages, k, v, pages, offsets)
