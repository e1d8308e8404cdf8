"""Pins: prefixes whose pages are never evicted."""

from collections import Counter
from collections.abc import Sequence

from jinfer.errors import CapacityError
from jinfer.kv.pool import PagePool


class Pins:
    """Holds pages of the prefix index by one reference each, however many pins name them."""

    def __init__(self, pools: Sequence[PagePool]):
        self._pools = tuple(pools)
        self._pages: dict[int, Sequence[Sequence[int]]] = {}  # by pin, of each group
        self._counts: list[Counter[int]] = [Counter() for _ in pools]  # pins of a page, of each group
        self._last = 0

    def add(self, pages: Sequence[Sequence[int]], needs: Sequence[int]) -> int:
        """Pins pages of each group.

        Args:
          needs: pages of each group that one request may need; they must not all be pinned.

        Returns:
          What `remove` takes.

        Raises:
          CapacityError: too little room would be left.
        """
        for g, (pool, need) in enumerate(zip(self._pools, needs, strict=True)):
            pinned = len(self._counts[g].keys() | set(pages[g]))
            if pool.num_pages - 1 - pinned < need:
                raise CapacityError("prefix", f"{pinned} of {pool.num_pages - 1} KV pages would be pinned, but a "
                                              f"request may need {need}")
        for pool, counts, some in zip(self._pools, self._counts, pages, strict=True):
            pool.retain(page for page in some if page not in counts)
            counts.update(some)
        self._last += 1
        self._pages[self._last] = pages
        return self._last

    def remove(self, pin: int) -> None:
        """Raises KeyError if there is no such pin."""
        for pool, counts, pages in zip(self._pools, self._counts, self._pages.pop(pin), strict=True):
            counts.subtract(pages)
            last = [page for page in reversed(pages) if not counts[page]]
            pool.release(last)
            for page in last:
                del counts[page]

    def held(self, g: int) -> list[int]:
        """Pages of a group that are pinned."""
        return list(self._counts[g])
