"""kv_update: the one public function."""

import jax

from pallas_kernels.kv_update import reference, tpu
from pallas_kernels.pages import Pages, check_pages, check_sequences, widen
from pallas_kernels.platform import Implementation, choose


def kv_update(
    k_pages: Pages,
    v_pages: Pages,
    k: jax.Array,
    v: jax.Array,
    page_table: jax.Array,
    query_starts: jax.Array,
    kv_lengths: jax.Array,
    *,
    first_page: jax.Array | None = None,
    decode: bool = False,
    implementation: Implementation | None = None,
) -> tuple[Pages, Pages]:
    """Writes the new keys and values of packed chunks into their pages, in place when the pools are donated.

    Sequence i owns the tokens query_starts[i]:query_starts[i+1], which are the last ones of its kv_lengths[i]
    positions: what `paged_attention` then reads. Quantised pools are quantised on the way (`pages.quantize`).

    Args:
      k_pages, v_pages: pools [P, K, S, H]; new values are converted to their formats.
      k, v: [T, K, H] float, widened with zeros to the pool's H; tokens past query_starts[Q] are padding and change no
        page but the null page.
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
    check_pages("v_pages", v_pages, like=k_pages)
    pool = k_pages.data.shape
    for name, new in (("k", k), ("v", v)):
        if new.ndim != 3 or new.shape[:2] != (k.shape[0], pool[1]) or new.shape[2] > pool[3]:
            raise ValueError(f"{name} {new.shape} does not fit {name}_pages {pool}; want [T, K, H] into [P, K, S, H]")
    check_sequences(page_table, query_starts, kv_lengths, first_page, k.shape[0], decode)
    arguments = (k_pages, v_pages, widen(k, pool[3]), widen(v, pool[3]), page_table, query_starts, kv_lengths)
    match choose(implementation):
        case "tpu":
            return tpu.kv_update(*arguments, first_page=first_page, decode=decode)
        case _:
            return reference.kv_update(*arguments, first_page=first_page, decode=decode)
