"""paged_attention: the one public function."""

from typing import Any

import jax

from pallas_kernels.options import check_options
from pallas_kernels.paged_attention import reference, tpu
from pallas_kernels.pages import Pages, check_pages, check_sequences, widen
from pallas_kernels.platform import Implementation, choose


def paged_attention(
    q: jax.Array,
    k_pages: Pages,
    v_pages: Pages | None,
    page_table: jax.Array,
    query_starts: jax.Array,
    kv_lengths: jax.Array,
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: jax.Array | None = None,
    first_page: jax.Array | None = None,
    decode: bool = False,
    value_lanes: int | None = None,
    implementation: Implementation | None = None,
) -> jax.Array:
    """Causal attention of packed query chunks over their sequences' pages.

    Sequence i owns the queries query_starts[i]:query_starts[i+1], which are the last ones of its kv_lengths[i]
    positions; their own keys and values are in the pages already. Cost follows kv_lengths, not M.

    Args:
      q: [T, N, H] float; queries past query_starts[Q] are padding and give unspecified finite rows.
      k_pages, v_pages: pools [P, K, S, H]; N is a multiple of K. Positions past a length may hold anything, NaN too.
        H may be more than q's: the rest holds zeros (`pages.pool_shapes`).
        v_pages None: values are the first `value_lanes` lanes of the keys (latent attention, arXiv 2405.04434).
      page_table: [Q, M] int32; entry j of a row holds positions j * S : (j + 1) * S.
      query_starts: [Q + 1] int32, non-decreasing, the first is 0.
      kv_lengths: [Q] int32; 0 for an unused row, which then has no queries (or, in decode, gives zeros).
      scale: multiplies the scores.
      window: queries see themselves and window - 1 positions before; None sees all.
      soft_cap: scores become soft_cap * tanh(scores / soft_cap).
      sinks: [N] float32, a logit a head that takes part in the softmax and has no value.
      first_page: int32 scalar added to every page: where a layer's part of the pool begins.
      decode: every sequence has exactly one query (T == Q, query_starts is 0, 1, .., Q and is not read).
      value_lanes: how many lanes of a key are its value; given without v_pages and only then.
      implementation: tpu, gpu or reference; None takes the one of the mesh's platform.

    Returns:
      [T, N, H] in q's dtype, [T, N, value_lanes] without v_pages. Scores, softmax and accumulation are float32
      (online softmax, arXiv 1805.02867).

    Raises:
      ValueError: shapes, dtypes or options do not fit together.
    """
    check_pages("k_pages", k_pages)
    if v_pages is not None:
        check_pages("v_pages", v_pages, like=k_pages)
    pool = k_pages.data.shape
    if q.ndim != 3 or q.shape[1] % pool[1] or q.shape[2] > pool[3]:
        raise ValueError(f"q {q.shape} does not fit pages [P, K, S, H] {pool}; want [T, N, H], N a multiple of K")
    if (v_pages is None) != (value_lanes is not None):
        raise ValueError("value_lanes must be given without v_pages and only then")
    if value_lanes is not None and not 1 <= value_lanes <= q.shape[2]:
        raise ValueError(f"value_lanes must be between 1 and H={q.shape[2]}, got {value_lanes}")
    check_options(q, window=window, soft_cap=soft_cap, sinks=sinks)
    check_sequences(page_table, query_starts, kv_lengths, first_page, q.shape[0], decode)
    out_width = q.shape[2] if value_lanes is None else value_lanes
    arguments = (widen(q, pool[3]), k_pages, v_pages, page_table, query_starts, kv_lengths)
    options: Any = {"scale": scale, "window": window, "soft_cap": soft_cap, "sinks": sinks, "first_page": first_page,
               "decode": decode, "value_lanes": value_lanes}
    run: Any = reference.paged_attention
    match choose(implementation):
        case "tpu":
            run = tpu.paged_attention
        case "gpu":
            from pallas_kernels.paged_attention import gpu  # here: not every jaxlib has Triton

            run = gpu.paged_attention
    return run(*arguments, **options)[..., :out_width]
