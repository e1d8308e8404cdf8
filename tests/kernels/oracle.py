"""Attention over pages in float64 NumPy, one query at a time: slow, and simple enough to check by eye."""

import numpy as np


def paged_attention(q, k_pages, v_pages, page_table, query_starts, kv_lengths, *, scale, window=None):
    """The meaning of pallas_kernels.paged_attention; returns float64 [T, N, H], zeros for padding queries."""
    q, k_pages, v_pages = (np.asarray(a, np.float64) for a in (q, k_pages, v_pages))
    group = q.shape[1] // k_pages.shape[1]
    out = np.zeros(q.shape)
    for row, length in enumerate(kv_lengths):
        k = np.concatenate([k_pages[p] for p in page_table[row]], axis=1)[:, :length]  # [K, length, H]
        v = np.concatenate([v_pages[p] for p in page_table[row]], axis=1)[:, :length]
        begin, end = query_starts[row], query_starts[row + 1]
        for t in range(begin, end):
            position = length - end + t
            low = 0 if window is None else max(0, position - window + 1)
            for n in range(q.shape[1]):
                scores = k[n // group, low : position + 1] @ q[t, n] * scale
                probs = np.exp(scores - scores.max())
                out[t, n] = probs / probs.sum() @ v[n // group, low : position + 1]
    return out
