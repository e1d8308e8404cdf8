"""How many KV pages fit: plain arithmetic on bytes, tokens and pages."""

import bisect
import dataclasses
from collections.abc import Sequence

from jinfer.errors import ConfigError


def pages_for(tokens: int, page_size: int) -> int:
    """Pages that hold `tokens` positions from the start of a page."""
    return -(-tokens // page_size)


def pages_touched(tokens: int, page_size: int) -> int:
    """Most pages that `tokens` positions in a row lie in, wherever they start."""
    return (tokens + page_size - 2) // page_size + 1


def window_pages(window: int | None, page_size: int, decode_steps: int) -> int | None:
    """Most pages a decoding row needs at once where queries see `window` tokens; None: all of its sequence.

    The first query of a call sees window - 1 tokens before it, the last one writes decode_steps - 1 after it.
    """
    return None if window is None else pages_touched(window + decode_steps - 1, page_size)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """What the page groups of a model can use of a pool.

    Attributes:
      windows: of the groups, None sees everything.
      page_size: S. max_rows: B. max_context: tokens of the longest sequence.
      decode_steps: tokens of a row in a decode call. prefill_tokens, max_chunks: of a prefill call.
    """

    windows: tuple[int | None, ...]
    page_size: int
    max_rows: int
    max_context: int
    decode_steps: int
    prefill_tokens: int
    max_chunks: int

    def least(self, sequence: int) -> tuple[int, ...]:
        """P of each group with which a sequence of so many pages runs alone; the null page is one of them."""
        caps = (window_pages(window, self.page_size, self.decode_steps) for window in self.windows)
        return tuple(1 + (sequence if cap is None else min(sequence, cap)) for cap in caps)

    def most(self) -> tuple[int, ...]:
        """P of each group that B full contexts can use.

        Where old pages leave, that is what B rows need to decode, and one prefill call: its tokens, and the page in
        which each of its chunks begins.
        """
        sequence = pages_for(self.max_context, self.page_size)
        call = self.prefill_tokens // self.page_size + self.max_chunks
        return tuple(1 + min(self.max_rows * sequence, self.max_rows * (row - 1) + (call if window else 0))
                     for row, window in zip(self.least(sequence), self.windows, strict=True))

    def explicit(self, pages: int) -> tuple[int, ...]:
        """P of each group where the largest gets `pages`; one with a window needs no more than `most`."""
        return tuple(min(pages, most) if window else pages
                     for window, most in zip(self.windows, self.most(), strict=True))

    def context(self, pages: Sequence[int]) -> int:
        """Tokens of the longest sequence that fits alone into pools of P pages each."""
        needs = self.least(pages_for(self.max_context, self.page_size))
        short = [count for count, need in zip(pages, needs, strict=True) if count < need]
        return min([self.max_context, *((count - 1) * self.page_size for count in short)])


def pool_pages(free_bytes: int, page_bytes: Sequence[int], demand: Demand) -> tuple[int, ...]:
    """P of each group, the null page included: what `free_bytes` hold, but no more than the demand.

    All groups get equally many pages, but a group never more than it can use, nor less than one sequence needs.

    Args:
      free_bytes: memory for the pool on one device.
      page_bytes: bytes of a page of each group on that device, in all its layers, keys and values.

    Raises:
      ConfigError: one sequence of max_context tokens would not fit; carries both numbers.
    """
    free = max(0, free_bytes)

    def size(pages: Sequence[int]) -> int:
        return sum(count * each for count, each in zip(pages, page_bytes, strict=True))

    sequence = pages_for(demand.max_context, demand.page_size)
    least, most = demand.least(sequence), demand.most()
    if size(least) > free:
        fits = bisect.bisect_right(range(sequence), free, key=lambda n: size(demand.least(n)))  # 0: not the null pages
        held = demand.least(fits - 1) if fits else (0,) * len(least)
        raise ConfigError(
            f"max_context: {demand.max_context} tokens need {_sum(least)} KV pages ({size(least)} bytes, the null page "
            f"included), but the memory left ({free} bytes) holds {_sum(held)}; give the pool more memory or set "
            f"max_context to {max(0, fits - 1) * demand.page_size} or less")

    def level(pages: int) -> tuple[int, ...]:
        return tuple(max(low, min(pages, high)) for low, high in zip(least, most, strict=True))

    return level(bisect.bisect_right(range(max(most) + 1), free, key=lambda pages: size(level(pages))) - 1)


def _sum(pages: Sequence[int]) -> str:
    return " + ".join(map(str, pages))
