"""kv_update: the one public function."""

from typing import Any

import jax

from pallas_kernels.kv_update import reference, tpu
from pallas_kernels.pages import Pages, check_pages, check_sequences, widen
from pallas_kernels.platform import Implementation, choose


def kv_update[V: Pages | None](
    k_pages: Pages,
    v_pages: V,
    k: jax.Array,
    v: jax.Array | None,
    page_table: jax.Array,
    query_starts: jax.Array,
    kv_lengths: jax.Array,
    *,
    first_page: jax.Array | None = None,
    decode: bool = False,
    implementation: Implementation | None = None,
) -> tuple[Pages, V]:
    """Writes the new keys and values of packed chunks into their pages, in place when the pools are donated.

    Sequence i owns the tokens query_starts[i]:query_starts[i+1], which are the last ones of its kv_lengths[i]
    positions: what `paged_attention` then reads. Quantised pools are quantised on the way (`pages.quantize`).

    Args:
      k_pages, v_pages: pools [P, K, S, H]; new values are converted to their formats.
      k, v: [T, K, H] float, widened with zeros to the pool's H; tokens past query_starts[Q] are padding and change no
        page but the null page. v_pages and v are both None where keys are all there is (latent attention).
      page_table: [Q, M] int32; entry j of a row holds positions j * S : (j + 1) * S. No two tokens share a position.
      query_starts: [Q + 1] int32, non-decreasing, the first is 0.
      kv_lengths: [Q] int32, the new tokens included; 0 for an unused row.
      first_page: int32 scalar added to every page: where a layer's part of the pool begins, and its null page.
      decode: every sequence has one token (T == Q, query_starts is not read); unused rows write nothing.
      implementation: tpu, gpu or reference; None takes the one of the mesh's platform.

    Returns:
      The updated (k_pages, v_pages).

    Raises:
      ValueError: shapes or dtypes do not fit together.
    """
    check_pages("k_pages", k_pages)
    if v_pages is not None:
        check_pages("v_pages", v_pages, like=k_pages)
    if (v_pages is None) != (v is None):
        raise ValueError("v must be given with v_pages and only with them")
    pool = k_pages.data.shape
    for name, new in (("k", k), ("v", v)):
        if new is not None and (new.ndim != 3 or new.shape[:2] != (k.shape[0], pool[1]) or new.shape[2] > pool[3]):
            raise ValueError(f"{name} {new.shape} does not fit {name}_pages {pool}; want [T, K, H] into [P, K, S, H]")
    check_sequences(page_table, query_starts, kv_lengths, first_page, k.shape[0], decode)
    arguments: Any = (k_pages, v_pages, widen(k, pool[3]), None if v is None else widen(v, pool[3]), page_table,
                      query_starts, kv_lengths)
    run: Any = reference.kv_update
    match choose(implementation):
        case "tpu":
            run = tpu.kv_update
        case "gpu":
            from pallas_kernels.kv_update import gpu  # here: not every jaxlib has Triton

            run = gpu.kv_update
    return run(*arguments, first_page=first_page, decode=decode)
