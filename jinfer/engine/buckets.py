"""The declared sizes of programs. Warm-up and run time ask the same functions."""

import bisect
import dataclasses

SMALLEST_PREFILL = 16  # tokens


def ramp(smallest: int, largest: int) -> tuple[int, ...]:
    """Powers of two up to a quarter of the largest, then quarters of it: padding stays under a half, then a quarter."""
    sizes = {largest}
    size = smallest
    while size <= largest // 4:
        sizes.add(size)
        size *= 2
    sizes.update(largest * part // 4 for part in (1, 2, 3) if largest * part // 4 >= smallest)
    return tuple(sorted(sizes))


@dataclasses.dataclass(frozen=True, slots=True)
class Buckets:
    """Attributes:
      prefill: T, tokens of a prefill call. decode: R, rows of a decode call. chunks: most chunks of a prefill
      call of each size in `prefill`.
    """

    prefill: tuple[int, ...]
    decode: tuple[int, ...]
    max_chunks: int

    @classmethod
    def build(cls, *, prefill_tokens: int, max_rows: int, smallest_rows: int) -> "Buckets":
        """smallest_rows: 2 where a product with a single row is slow (narrow types on XLA:CPU), else 1."""
        prefill = ramp(min(SMALLEST_PREFILL, prefill_tokens), prefill_tokens)
        decode = ramp(smallest_rows, max(max_rows, smallest_rows))
        return cls(prefill, decode, max_chunks=max(smallest_rows, min(max_rows, prefill_tokens // 16)))

    def prefill_size(self, tokens: int) -> int:
        return self.prefill[bisect.bisect_left(self.prefill, tokens)]

    def decode_size(self, rows: int) -> int:
        return self.decode[bisect.bisect_left(self.decode, rows)]
