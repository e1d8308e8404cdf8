"""Random inputs of the operations, with NaN wherever nothing may be read."""

import dataclasses

import jax.numpy as jnp
import numpy as np

from pallas_kernels.pages import Pages, quantize

# Relative error as norms, by the dtype of q; quantised pages are compared with what they hold, not with what was
# written into them, and their products are made in q's dtype.
BOUND = {"float32": 1e-5, "bfloat16": 1e-2}


@dataclasses.dataclass
class Paged:
    """Arguments of paged_attention: sequences that hold starts[i] positions already and chunks[i] queries."""

    q: jnp.ndarray
    k_pages: Pages
    v_pages: Pages | None
    page_table: jnp.ndarray
    query_starts: jnp.ndarray
    kv_lengths: jnp.ndarray

    def __iter__(self):
        return iter((self.q, self.k_pages, self.v_pages, self.page_table, self.query_starts, self.kv_lengths))

    def forget(self, window):
        """Pages below the window of a sequence's first query are given back: its table names page 0, which holds NaN."""
        if window is not None:
            page_size, counts = self.k_pages.data.shape[2], self.query_starts[1:] - self.query_starts[:-1]
            below = jnp.maximum(self.kv_lengths - counts - window + 1, 0) // page_size
            self.page_table = jnp.where(jnp.arange(self.page_table.shape[1]) < below[:, None], 0, self.page_table)

    @property
    def used(self):
        return int(self.query_starts[-1])

    @property
    def sequences(self):
        return self.page_table, self.query_starts, self.kv_lengths


def paged(rng, starts, chunks, *, heads=4, kv_heads=2, width=8, page_size=4, pages_per_row=6, dtype="float32",
          k_format=None, v_format=None, tokens=None, first_page=0, lanes=1, latent=False):
    """Pages with NaN wherever no sequence wrote, a shuffled page table, packed queries padded to `tokens`.

    Table entries past a sequence's pages name page 0. `first_page` pages of NaN lie before the pool's own page 0. The
    pools' last axes are multiples of `lanes`. latent: there are keys only.
    """
    rows, tokens = len(starts), sum(chunks) if tokens is None else tokens
    pool = first_page + rows * pages_per_row + 1
    lengths = np.array([s + c for s, c in zip(starts, chunks, strict=True)], np.int32)
    table = (1 + rng.permutation(rows * pages_per_row)).reshape(rows, pages_per_row).astype(np.int32)
    table[np.arange(pages_per_row) >= -(-lengths[:, None] // page_size)] = 0
    pools = [fill(rng, (pool, kv_heads, page_size, width), table, lengths, fmt or dtype, first_page, lanes)
             for fmt in ((k_format,) if latent else (k_format, v_format))]
    q = jnp.asarray(rng.standard_normal((tokens, heads, width)), dtype)
    query_starts = np.concatenate([[0], np.cumsum(chunks)]).astype(np.int32)
    return Paged(q, pools[0], None if latent else pools[1], jnp.asarray(table), jnp.asarray(query_starts), jnp.asarray(lengths))


def fill(rng, shape, table, lengths, dtype, first_page=0, lanes=1):
    """Pages [P, K, S, H] that hold normal numbers where a sequence wrote; elsewhere NaN, or the largest number of a
    type that has no NaN, with a NaN for scale."""
    page_size = shape[2]
    values = np.full(shape, np.nan, np.float32)
    for row, length in enumerate(lengths):
        for position in range(length):
            values[first_page + table[row, position // page_size], :, position % page_size] = rng.standard_normal(
                (shape[1], shape[3]))
    data, scales = quantize(jnp.asarray(values), dtype)
    if dtype == "int8":
        data = jnp.where(jnp.isnan(values), jnp.int8(127), data)
    data = jnp.pad(data, ((0, 0),) * 3 + ((0, -shape[3] % lanes),))
    if scales is not None:
        scales = jnp.pad(scales, ((0, 0), (0, 0), (0, -page_size % lanes)), constant_values=np.nan)
    return Pages(data, scales)
