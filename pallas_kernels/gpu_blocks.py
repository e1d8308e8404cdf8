"""Block sizes of the GPU attention kernels: an estimate of shared memory that always fits."""

import dataclasses

import jax
import jax.numpy as jnp

from pallas_kernels.chips import Chip

ROWS = 128  # most rows of a dot: two warp groups' worth
LEAST_ROWS = 16  # fewest: what a tensor core takes
TURN_BYTES = 16 * 1024  # of keys, and of values, a turn: some turns in flight hide the memory's latency
SHORT = 16  # fewer queries a sequence than this are verification, not prefill


@dataclasses.dataclass(frozen=True, slots=True)
class Blocks:
    """How one call is cut up.

    Attributes:
      queries: of one sequence, a tile. group: rows a query, its heads of one kv head and padding.
      width: lanes, H padded to a power of two; rest: lanes of a key after its value, likewise, where keys hold the
        values. positions: of keys and values a turn. parts: programs that share the heads of one kv head.
      splits: of a tile's positions. warps: a program. stages: turns in flight.
    """

    queries: int
    group: int
    width: int
    positions: int
    splits: int
    warps: int
    stages: int
    rest: int = 0
    parts: int = 1

    @property
    def rows(self) -> int:
        """Rows of the dots."""
        return self.queries * self.group


def power_of_two(number: int) -> int:
    """The smallest power of two that is not less."""
    return 1 << max(number - 1, 0).bit_length()


def shared_memory(rows: int, width: int, positions: int, stages: int, dtype: jax.typing.DTypeLike,
                  formats: tuple[jax.typing.DTypeLike, ...]) -> int:
    """Bytes a program takes at most, q in `dtype`, keys and values in `formats`."""
    held = sum(jnp.dtype(f).itemsize for f in formats) * width * positions * stages
    # What the dots read: q, the probabilities, and a turn converted to q's dtype.
    converted = sum(width * positions for f in formats if jnp.dtype(f) != jnp.dtype(dtype))
    return held + jnp.dtype(dtype).itemsize * (rows * width + rows * positions + converted)


def estimate(chip: Chip, tuned: dict[str, int], *, tokens: int, sequences: int, decode: bool, longest: int,
             group: int, kv_heads: int, head_dim: int, dtype: jax.typing.DTypeLike,
             formats: tuple[jax.typing.DTypeLike, ...], rest: int = 0) -> Blocks:
    """Blocks for T = tokens queries of Q = sequences that hold up to `longest` positions.

    Args:
      tuned: measured values of any of rows, positions, splits, warps and stages.
      group: N / K. dtype: q's. formats: of keys and of values; of one where keys hold the values, head_dim is then the
        values' and rest the number of lanes after them.
    """
    width, lanes = power_of_two(max(head_dim, 16)), power_of_two(group)
    rest = power_of_two(max(rest, 16)) if rest else 0
    item = jnp.dtype(dtype).itemsize
    # Accumulators this wide, and products without tensor cores (float32), leave registers for fewer rows.
    most = tuned.get("rows", ROWS // 2 if width * item > 256 or item > 2 else ROWS)
    each = -(-tokens // sequences)
    wanted = 1 if decode else power_of_two(each if each < SHORT else tokens)
    lanes = min(lanes, max(most, LEAST_ROWS))
    queries = max(1, min(wanted, most // lanes))
    lanes = max(lanes, LEAST_ROWS // queries)
    rows = queries * lanes
    limit = 128 if rows <= ROWS // 4 else 64 if item <= 2 else 32
    positions = tuned.get("positions", min(limit, max(16, TURN_BYTES * (2 // len(formats)) // (width * item))))
    stages = tuned.get("stages", 3)

    while shared_memory(queries * lanes, width + rest, positions, stages, dtype, formats) > chip.vmem:
        if stages > 2:
            stages -= 1
        elif positions > 16:
            positions //= 2
        elif queries > 1 and queries * lanes > LEAST_ROWS:
            queries //= 2
        elif lanes > LEAST_ROWS:
            lanes //= 2
        elif stages > 1:  # loads and products take turns
            stages -= 1
        else:
            break
    rows, parts = queries * lanes, -(-group // lanes)
    tiles = tokens if decode else (tokens + (sequences + 1) * (queries - 1)) // queries
    # Enough programs for every multiprocessor to hold several; a split of few turns is not worth its merge.
    splits = min(-(-4 * chip.cores // (tiles * kv_heads * parts)), longest // (4 * positions))
    warps = 8 if rows >= ROWS or (rows >= ROWS // 2 and most < ROWS) else 4
    return Blocks(queries, lanes, width, positions, tuned.get("splits", max(1, splits)),
                  tuned.get("warps", warps), stages, rest, parts)
