"""Attention in float64 NumPy, one query at a time: slow, and simple enough to check by eye."""

import itertools

import numpy as np


def attend(q, k, v, *, scale, soft_cap=None, sinks=None):
    """One query [N, H] over the positions it sees, k and v [K, C, ..]; sinks [N]. Returns [N, lanes of v]."""
    group = q.shape[0] // k.shape[0]
    out = np.zeros((q.shape[0], v.shape[2]))
    for n in range(q.shape[0]):
        scores = k[n // group] @ q[n] * scale
        if soft_cap is not None:
            scores = soft_cap * np.tanh(scores / soft_cap)
        logits = scores if sinks is None else np.append(scores, sinks[n])
        probs = np.exp(scores - logits.max()) / np.exp(logits - logits.max()).sum()
        out[n] = probs @ v[n // group]
    return out


def paged_attention(q, k_pages, v_pages, page_table, query_starts, kv_lengths, *, window=None, first_page=0,
                    value_lanes=None, **options):
    """The meaning of pallas_kernels.paged_attention; returns float64 [T, N, H or value_lanes], zeros for padding queries."""
    q = np.asarray(q, np.float64)
    k_pages = dequantize(k_pages)[..., : q.shape[2]]
    v_pages = k_pages[..., :value_lanes] if v_pages is None else dequantize(v_pages)[..., : q.shape[2]]
    out = np.zeros((*q.shape[:2], v_pages.shape[3]))
    for row, length in enumerate(kv_lengths):
        if length == 0:  # an unused row, which in decode has a query all the same
            continue
        pages = np.asarray(page_table[row]) + int(first_page or 0)
        k = np.concatenate([k_pages[p] for p in pages], axis=1)[:, :length]  # [K, length, H]
        v = np.concatenate([v_pages[p] for p in pages], axis=1)[:, :length]
        begin, end = query_starts[row], query_starts[row + 1]
        for t in range(begin, end):
            position = length - end + t
            seen = slice(0 if window is None else max(0, position - window + 1), position + 1)
            out[t] = attend(q[t], k[:, seen], v[:, seen], **options)
    return out


def flash_attention(q, k, v, starts, *, window=None, **options):
    """The meaning of pallas_kernels.flash_attention; returns float64 [T, N, H], zeros for padding tokens."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    out = np.zeros(q.shape)
    for begin, end in itertools.pairwise(starts):
        for t in range(begin, end):
            low = begin if window is None else max(begin, t - window + 1)
            k_seen, v_seen = (x[low : t + 1].transpose(1, 0, 2) for x in (k, v))
            out[t] = attend(q[t], k_seen, v_seen, **options)
    return out


def kv_update(k_pages, v_pages, k, v, page_table, query_starts, kv_lengths, *, first_page=0):
    """Where each new vector goes: a list of (token, page, offset)."""
    size = k_pages.data.shape[2]
    places = []
    for row, length in enumerate(kv_lengths):
        begin, end = int(query_starts[row]), int(query_starts[row + 1])
        for t in range(begin, end):
            position = int(length) - end + t
            places.append((t, int(page_table[row, position // size]) + int(first_page or 0), position % size))
    return places


def dequantize(pages):
    """float64 [P, K, S, H] of Pages in any format."""
    data = np.asarray(pages.data.astype("float32"), np.float64)
    return data if pages.scales is None else data * np.asarray(pages.scales, np.float64)[..., : data.shape[-2], None]


def error(got, want):
    """Relative error as norms."""
    return np.linalg.norm(np.asarray(got, np.float64) - want) / max(np.linalg.norm(want), 1e-30)
