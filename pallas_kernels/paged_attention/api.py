"""paged_attention: the one public function."""

import jax

from pallas_kernels.paged_attention import reference


def paged_attention(
    q: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    page_table: jax.Array,
    query_starts: jax.Array,
    kv_lengths: jax.Array,
    *,
    scale: float,
    window: int | None = None,
    decode: bool = False,
) -> jax.Array:
    """Causal attention of packed query chunks over their sequences' pages.

    Sequence i owns the queries query_starts[i]:query_starts[i+1], which are the last ones of its kv_lengths[i]
    positions; their own keys and values are in the pages already. Cost follows kv_lengths, not M.

    Args:
      q: [T, N, H] float; queries past query_starts[Q] are padding and give unspecified finite rows.
      k_pages, v_pages: [P, K, S, H]; N is a multiple of K. Positions past a length may hold anything, NaN too.
      page_table: [Q, M] int32; entry j of a row holds positions j * S : (j + 1) * S.
      query_starts: [Q + 1] int32, non-decreasing, the first is 0.
      kv_lengths: [Q] int32; 0 for an unused row, which then has no queries (or, in decode, gives zeros).
      scale: multiplies the scores.
      window: queries see themselves and window - 1 positions before; None sees all.
      decode: every sequence has exactly one query (T == Q, query_starts is 0, 1, .., Q and is not read).

    Returns:
      [T, N, H] in q's dtype. Scores, softmax and accumulation are float32 (online softmax, arXiv 1805.02867).

    Raises:
      ValueError: shapes or dtypes do not fit together.
    """
    if q.ndim != 3 or k_pages.ndim != 4 or k_pages.shape != v_pages.shape:
        raise ValueError(
            f"want q [T, N, H] and equal pools [P, K, S, H], got {q.shape}, {k_pages.shape}, {v_pages.shape}")
    if q.shape[1] % k_pages.shape[1] or q.shape[2] != k_pages.shape[3]:
        raise ValueError(f"q [T, N, H] {q.shape} does not fit pages [P, K, S, H] {k_pages.shape}")
    sequences = page_table.shape[0]
    for name, array, shape in (
        ("page_table", page_table, (sequences, page_table.shape[-1])),
        ("query_starts", query_starts, (sequences + 1,)),
        ("kv_lengths", kv_lengths, (sequences,)),
    ):
        if array.shape != shape or array.dtype != "int32":
            raise ValueError(f"{name} must be int32 {list(shape)}, got {array.dtype} {array.shape}")
    if window is not None and window < 1:
        raise ValueError(f"window must be at least 1, got {window}")
    if decode:
        if q.shape[0] != sequences:
            raise ValueError(f"decode wants one query a sequence, got T={q.shape[0]} and Q={sequences}")
        return reference.decode_attention(q, k_pages, v_pages, page_table, kv_lengths, scale=scale, window=window)
    return reference.chunk_attention(
        q, k_pages, v_pages, page_table, query_starts, kv_lengths, scale=scale, window=window)
