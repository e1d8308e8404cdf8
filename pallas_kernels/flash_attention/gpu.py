"""flash_attention for GPUs: positions are rows of k and v themselves (pallas_kernels/gpu.py has the maths)."""

import jax

from pallas_kernels.chips import local_chip
from pallas_kernels.gpu import attend, ragged_tiles
from pallas_kernels.gpu_blocks import estimate
from pallas_kernels.pages import Pages
from pallas_kernels.tuning import tuned


def flash_attention(q: jax.Array, k: jax.Array, v: jax.Array, starts: jax.Array, *, scale: float,
                    window: int | None, soft_cap: float | None, sinks: jax.Array | None,
                    interpret: bool = False) -> jax.Array:
    """See api.flash_attention; padding gives zeros; interpret runs it on any device."""
    tokens, heads, width = q.shape
    kv_heads = k.shape[1]
    blocks = estimate(local_chip(), tuned(__file__, f"{q.dtype} N{heads} K{kv_heads} H{width}"), tokens=tokens,
                      sequences=starts.shape[0] - 1, decode=False, longest=tokens, group=heads // kv_heads,
                      kv_heads=kv_heads, head_dim=width, dtype=q.dtype, formats=(k.dtype, v.dtype))
    tiles = ragged_tiles(starts, starts[1:] - starts[:-1], tokens, blocks.queries)

    def address(starts, sequence, kv_head):
        begin = starts[sequence]

        def find(position, held):
            row = (begin + position) * kv_heads + kv_head
            return row, row

        return find

    return attend(q, Pages(k), Pages(v), tiles, starts, address, blocks=blocks, kv_heads=kv_heads, scale=scale,
                  window=window, soft_cap=soft_cap, sinks=sinks, name="flash_attention", interpret=interpret)
