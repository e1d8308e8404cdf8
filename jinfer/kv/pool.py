"""PagePool: which pages of a group's part of the KV pool are free, and how many references hold the others."""

from collections import Counter
from collections.abc import Iterable


class PagePool:
    """Hands out pages 1..P-1 with reference counts; page 0 is the null page and never leaves.

    Every operation costs O(pages named), none scans the pool (`check`, for tests and idle moments, does).
    A page freed last is handed out first: it is the one most likely still in a cache.

    Attributes:
      num_pages: P, the null page included.
      page_size: S, token positions in a page.
      window: tokens a query sees, itself included, in the layers these pages are of; None sees all.
      peak: most pages ever held at once.
    """

    __slots__ = ("_counts", "_free", "num_pages", "page_size", "peak", "window")

    def __init__(self, num_pages: int, page_size: int, window: int | None = None):
        """Raises ValueError if there is no page beside the null page or a page holds nothing."""
        if num_pages < 2 or page_size < 1:
            raise ValueError(f"a pool needs 2 pages of 1 position or more, got {num_pages} of {page_size}")
        self.num_pages = num_pages
        self.page_size = page_size
        self.window = window
        self.peak = 0
        self._counts = [0] * num_pages
        self._free = list(range(num_pages - 1, 0, -1))  # a stack: page 1 goes out first

    @property
    def free(self) -> int:
        """Pages nobody holds."""
        return len(self._free)

    @property
    def held(self) -> int:
        """Pages somebody holds, however many references each has."""
        return self.num_pages - 1 - len(self._free)

    def allocate(self, n: int) -> list[int] | None:
        """Takes n pages with one reference each, or none at all (None) if fewer than n are free."""
        free = self._free
        left = len(free) - n
        if n < 0:
            raise ValueError(f"cannot allocate {n} pages")
        if left < 0:
            return None
        pages = free[left:]
        pages.reverse()
        del free[left:]
        counts = self._counts
        for page in pages:
            counts[page] = 1
        self.peak = max(self.peak, self.num_pages - 1 - left)
        return pages

    def retain(self, pages: Iterable[int]) -> None:
        """Adds one reference to each page. Raises ValueError for a page nobody holds."""
        counts = self._counts
        for page in pages:
            if not 0 < page < self.num_pages or not counts[page]:
                raise ValueError(f"page {page} is not held and cannot be shared")
            counts[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """Drops one reference from each page; the last one frees it. Raises ValueError for a double free."""
        counts = self._counts
        for page in pages:
            if not 0 < page < self.num_pages or not counts[page]:
                raise ValueError(f"page {page} is not held and cannot be released")
            counts[page] -= 1
            if not counts[page]:
                self._free.append(page)

    def check(self, referenced: Iterable[int]) -> None:
        """Asserts the invariant: free + held = P - 1, and counts equal the references that exist.

        Args:
          referenced: every reference there is, a page as often as it is referenced.
        """
        expected = Counter(referenced)
        held = {page: count for page, count in enumerate(self._counts) if count}
        assert held == expected, f"reference counts {held} differ from the references {dict(expected)}"
        assert not self._counts[0], "the null page is held"
        free = set(self._free)
        assert len(free) == len(self._free), "a page is free twice"
        assert 0 not in free, "the null page is free"
        assert not free & held.keys(), f"pages both free and held: {sorted(free & held.keys())}"
        assert len(free) + len(held) == self.num_pages - 1, "a page is neither free nor held"
        assert (self.free, self.held) == (len(free), len(held))
        assert self.held <= self.peak < self.num_pages
