"""Block sizes of the TPU kernel: an estimate that always fits, improved by a table."""

import dataclasses
import math

from pallas_kernels.chips import Chip

LANES, SUBLANES = 128, 8
VMEM_SHARE = 0.5  # of the chip's; the rest is the compiler's for values that do not stay in registers


@dataclasses.dataclass(frozen=True, slots=True)
class Sizes:
    """The static sizes of a call.

    Attributes:
      heads, kv_heads, head_dim, page_size: N, K, H, S. queries: TQ, tokens of a tile (1 in decode).
      pages: pages of a block. depth: blocks in flight or in use. splits: parts a row's context is cut into.
    """

    heads: int
    kv_heads: int
    head_dim: int
    page_size: int
    queries: int
    pages: int
    depth: int
    splits: int

    @property
    def decode(self) -> bool:
        return self.queries == 1

    @property
    def group(self) -> int:
        """G: query heads of a kv head."""
        return self.heads // self.kv_heads

    @property
    def rows(self) -> int:
        """Query rows of a kv head in a tile, ordered (head of the group, token); in decode G padded to sublanes."""
        return up(self.group, SUBLANES) if self.decode else self.group * self.queries

    @property
    def padded_heads(self) -> int:
        """Rows a token has in the kernel's layout of q and of the output."""
        return self.kv_heads * self.rows if self.decode else up(self.heads, SUBLANES)

    @property
    def positions(self) -> int:
        """C: positions of a block."""
        return self.pages * self.page_size

    def vmem(self, k_bytes: int, v_bytes: int) -> int:
        """Bytes of scratch, and of the largest values, for pools of these bytes an element."""
        width = up(self.head_dim, LANES)
        tile = self.queries * self.padded_heads * width * 4
        states = self.kv_heads * self.rows * (width + 2 * LANES) * 4
        block = self.kv_heads * self.positions * width
        scores = self.rows * self.positions * 4
        return ((self.depth + 2) * tile + self.kv_heads * self.rows * width * 4 + states
                + self.depth * block * (k_bytes + v_bytes) + 4 * scores + 4 * self.positions * width * 4)


def choose(*, heads: int, kv_heads: int, head_dim: int, page_size: int, table_width: int, tokens: int | None,
           k_bytes: int, v_bytes: int, chip: Chip, tuned: dict[str, int]) -> Sizes:
    """Sizes that fit the chip's VMEM.

    Args:
      table_width: M. tokens: T of ragged chunks, None in decode. k_bytes, v_bytes: of an element of the pools.
      tuned: what a table says; keys are fields of Sizes. Dropped where it would not fit.
    """
    budget = int(chip.vmem * VMEM_SHARE)
    queries = 1 if tokens is None else min(128, up(tokens, 16))
    wanted = 512 if tokens is None else 512

    def sizes(queries: int, pages: int, depth: int) -> Sizes:
        return Sizes(heads, kv_heads, head_dim, page_size, queries, max(1, min(pages, table_width)), depth, chip.cores)

    if tuned:
        entry = dataclasses.replace(sizes(queries, math.ceil(wanted / page_size), 3), **tuned)
        if entry.vmem(k_bytes, v_bytes) <= budget:
            return entry
    depth = 4 if tokens is None else 2
    while True:
        found = sizes(queries, max(1, wanted // page_size), depth)
        if found.vmem(k_bytes, v_bytes) <= budget:
            return found
        if wanted > max(page_size, 128):
            wanted //= 2
        elif queries > 16:
            queries //= 2
        elif depth > 2:
            depth -= 1
        else:
            raise ValueError(f"paged_attention: {heads} query heads, {kv_heads} kv heads of {head_dim} and pages of "
                             f"{page_size} need {found.vmem(k_bytes, v_bytes)} bytes of VMEM, {budget} may be used")


def up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
