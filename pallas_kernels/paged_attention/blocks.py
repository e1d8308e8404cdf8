"""Block sizes of the TPU kernel: an estimate that always fits, improved by a table."""

import dataclasses

from pallas_kernels.chips import Chip
from pallas_kernels.tiling import LANES, SUBLANES, up

VMEM_SHARE = 0.625  # of the chip's; the rest is the compiler's for values that do not stay in registers
POSITIONS = 512  # of a block, at least: products long enough to hide their latencies
FETCH = 2**20  # bytes of K or V of a block, up to 4 * POSITIONS: a fetch takes a microsecond to begin
LATENT_FETCH = 3 * FETCH  # where keys hold the values: more to compute for each byte, a longer chain to fill
QUERIES = 128  # of a window, at most
ROWS = 2048  # query rows of a kv head in a window of more than the fewest queries, at most: pages are read for enough
PART = 256  # of them in one product, at most, where heads share their values with their keys
SCORES = 2**19  # of several kv heads computed as one array, which overlaps their products and reductions


@dataclasses.dataclass(frozen=True, slots=True)
class Sizes:
    """The static sizes of a call.

    Attributes:
      heads, kv_heads, head_dim, page_size: N, K, H, S. value_dim: lanes of a value. queries: TQ, of a window; 1 in
        decode. parts: that a kv head's group of query heads is cut into, each computed like a kv head of its own.
      pages: of a block. depth: blocks in flight or in use. splits: parts a row's context is cut into.
      scores: of stacked groups computed together, at most, where that is more than one.
      strip: pages of a strip of a block, whose strips have products of their own; 0 if there is one strip.
    """

    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    page_size: int
    queries: int
    parts: int
    pages: int
    depth: int
    splits: int
    scores: int = SCORES
    strip: int = 0

    @property
    def decode(self) -> bool:
        return self.queries == 1

    @property
    def groups(self) -> int:
        """Groups of query heads that are computed alike: K, or more where a kv head's are cut into parts."""
        return self.kv_heads * self.parts

    @property
    def group(self) -> int:
        """G: query heads of a group; in decode padded to whole sublanes."""
        group = self.heads // self.groups
        return up(group, SUBLANES) if self.decode else group

    @property
    def rows(self) -> int:
        """Query rows of a group in a window, ordered (head of the group, token)."""
        return self.group * self.queries

    @property
    def tile(self) -> tuple[int, ...]:
        """Shape of a window's queries and results but for the lanes, head_dim and value_dim."""
        return (self.groups, self.group, *(() if self.decode else (self.queries,)))

    @property
    def together(self) -> int:
        """Groups whose softmax is one: of few rows each, they hide each other's latencies."""
        return max(n for n in range(1, self.groups + 1)
                   if self.groups % n == 0 and (n == 1 or n * self.rows * self.positions <= self.scores))

    @property
    def positions(self) -> int:
        """C: positions of a block."""
        return self.pages * self.page_size

    @property
    def strips(self) -> int:
        return self.pages // self.strip if self.strip and self.pages % self.strip == 0 else 1

    @property
    def strip_positions(self) -> int:
        return self.positions // self.strips

    @property
    def strip_counts(self) -> list[int]:
        """How many strips of a block may be computed: powers of two, and all."""
        return [1 << i for i in range((self.strips - 1).bit_length())] + [self.strips]

    def vmem(self, q_bytes: int, k_bytes: int, v_bytes: int) -> int:
        """Bytes of scratch, and of the largest values, for q and pools of these bytes an element; v_bytes is 0 where
        the keys hold the values."""
        lines = up(self.groups * self.rows, SUBLANES)
        tile = lines * self.head_dim
        states = lines * (self.value_dim + 3 * LANES) * 4  # the sum of values; maximum, total, sink
        result = lines * self.value_dim
        results = 2 * (result * q_bytes if self.splits == 1 else (result + lines * LANES) * 4)
        block = self.kv_heads * self.positions * self.head_dim
        scales = sum(4 * up(self.kv_heads, SUBLANES) * self.pages * LANES for n in (k_bytes, v_bytes) if n == 1)
        values = self.together * (3 * self.rows + self.head_dim) * self.positions * 4
        return (self.depth * (tile * q_bytes + block * (k_bytes + v_bytes) + scales) + results + states + values)


def choose(*, heads: int, kv_heads: int, head_dim: int, value_dim: int, page_size: int, table_width: int,
           chunk: tuple[int, int] | None, bytes_each: tuple[int, int, int], chip: Chip,
           tuned: dict[str, int]) -> Sizes:
    """Sizes that fit the chip's VMEM.

    Args:
      table_width: M. chunk: (T, Q) of ragged chunks, None in decode. bytes_each: of an element of q, k_pages, v_pages
        (0 where the keys hold the values).
      tuned: what a table says, names of Sizes' fields; dropped where it would not fit.
    """
    budget, group = int(chip.vmem * VMEM_SHARE), heads // kv_heads
    latent = bytes_each[2] == 0
    part = PART if latent else group * QUERIES

    def sizes(queries: int, positions: int, depth: int, scores: int = SCORES) -> Sizes:
        pages = max(1, min(positions // page_size, table_width))
        strip = POSITIONS // page_size if latent and queries == 1 else 0
        pages -= pages % strip if 0 < strip < pages else 0
        return Sizes(heads, kv_heads, head_dim, value_dim, page_size, queries, _parts(group, queries, part), pages,
                     depth, chip.cores, scores, strip)

    def fits(found: Sizes) -> bool:
        return found.vmem(*bytes_each) <= budget

    if chunk is None:
        queries, depth = 1, 4
        fetched = (FETCH if not latent else LATENT_FETCH) // (kv_heads * head_dim * max(bytes_each[1:]))
        positions = min(max(power_of_two(max(fetched, 1)), POSITIONS), 4 * POSITIONS)
    else:
        # Wide windows for long chunks; many short ones would share a window and each pay for all of it.
        tokens, sequences = chunk
        wanted = power_of_two(max(16, 2 * tokens // sequences))
        most = max(16, min(QUERIES, ROWS // group // 16 * 16))
        queries, positions, depth = min(most, up(tokens, 16), wanted), POSITIONS, 2
    entry = dataclasses.replace(sizes(queries, positions, depth), **tuned)
    if tuned and fits(entry):
        return entry
    # Products of float32 are several of bfloat16: code to be compiled.
    scores = SCORES if not latent or chunk is None else SCORES * 2 // bytes_each[0]
    while not fits(found := sizes(queries, positions, depth, scores)):
        if found.together > 1:
            scores //= 2
        elif positions > max(page_size, LANES):
            positions //= 2
        elif queries > 16:
            queries = max(16, queries // 32 * 16)  # whole tiles of bfloat16
        elif depth > 2:
            depth -= 1
        elif positions > page_size:  # less than a register's lanes: slow, but it runs
            positions //= 2
        else:
            raise ValueError(f"paged_attention: {heads} query heads, {kv_heads} kv heads of {head_dim} and pages of "
                             f"{page_size} need {found.vmem(*bytes_each)} bytes of VMEM, {budget} may be used")
    return found


def _parts(group: int, queries: int, part: int) -> int:
    """Into how many parts a group is cut so that each has `part` query rows at most, or is one head."""
    return next(parts for parts in range(1, group + 1)
                if group % parts == 0 and (group // parts * queries <= part or parts == group))


def power_of_two(value: int) -> int:
    """The largest one that is not more."""
    return 1 << (value.bit_length() - 1)
