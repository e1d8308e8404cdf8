"""Sizes of the TPU kernels' blocks, from what VMEM holds."""

import dataclasses
from collections.abc import Sequence

from pallas_kernels.chips import local_chip
from pallas_kernels.pages import Pages
from pallas_kernels.tiling import LANES, SUBLANES, up
from pallas_kernels.tuning import tuned


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """Sizes that fit half of the chip's VMEM.

    Attributes:
      decode: one token an item. block: tokens a grid step takes. heads: kv heads it takes.
      ring: items in flight (chunks), a power of two. limit: bytes of VMEM the compiler may use.
    """

    decode: bool
    block: int
    heads: int
    ring: int
    limit: int


def make_plan(module: str, pools: Sequence[Pages], tokens: int, *, decode: bool) -> Plan:
    """The largest block of T = `tokens` tokens that fits, or what the table beside `module` (a `__file__`) says; pools:
    of keys and, if there is one, of values."""
    vmem = local_chip().vmem
    _, kv_heads, size, width = pools[0].data.shape
    names = " ".join(pages.data.dtype.name for pages in pools)
    entry = tuned(module, f"{names} heads={kv_heads} width={width} page={size} {'decode' if decode else 'chunk'}")
    least = SUBLANES if decode else LANES
    block, heads, ring = min(entry.get("block", tokens), tokens), kv_heads, entry.get("ring", 4)
    block = up(block, least)
    while True:
        plan = Plan(decode, block, heads, ring, vmem * 5 // 8)
        if sum(vmem_bytes(pages, plan) for pages in pools) <= vmem // 2:
            return plan
        if block > least:
            block = up(block // 2, least)
        elif not decode and ring > 2:
            ring //= 2
        elif not decode and heads > 1:
            heads = max(h for h in range(1, heads) if kv_heads % h == 0)
        else:
            needed = sum(vmem_bytes(pages, plan) for pages in pools)
            raise ValueError(f"kv_update: {kv_heads} kv heads of {width} and pages of {size} need {needed} bytes of "
                             f"VMEM, {vmem // 2} may be used")


def vmem_bytes(pages: Pages, plan: Plan) -> int:
    """Bytes one pool needs: a block of new rows (of words, in decode), twice from the pipeline, and what is held."""
    block, heads = plan.block, plan.heads
    lanes = 0 if pages.scales is None else up(heads, SUBLANES) * pages.scales.shape[2] * 4  # of an item
    blocks = 0 if pages.scales is None else 2 * (up(block, LANES) + 2 * LANES) * up(heads, SUBLANES) * 4
    width, size = pages.data.shape[3], pages.data.shape[2]
    if plan.decode:
        return 3 * block * up(heads, SUBLANES) * width * 4 + block * lanes + blocks
    return (2 * block + plan.ring * size) * heads * width * pages.data.dtype.itemsize + plan.ring * lanes + blocks
