"""PagePool: which pages of a group's part of the KV pool are free, cached or held, and by how many references."""

import bisect
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable

from jinfer.kv.node import Node


class PagePool:
    """Hands out pages 1..P-1 with reference counts; page 0 is the null page and never leaves.

    A page is held (by one reference or several), cached (nobody holds it, but it is known by what is in it), or free:
    free + cached + held = P - 1. Cached pages are handed out when no page is free: first those of the least important
    class (the largest `priority`), then those nobody has held for longest.

    Every operation costs O(pages named), none scans the pool (`check`, for tests and idle moments, does).
    A page freed last is handed out first: it is the one most likely still in a cache.

    Attributes:
      num_pages: P, the null page included.
      page_size: S, token positions in a page.
      window: tokens a query sees, itself included, in the layers these pages are of; None sees all.
      peak: most pages ever held at once.
      evictions: cached pages handed out.
      shared: references to pages that have one already.
      returns: references dropped so far that left a page without any; what did not fit may fit after it has grown.
      on_evict: told a page and its owner just before a cached page is handed out.
    """

    __slots__ = ("_cached", "_class_of", "_classes", "_counts", "_free", "_owners", "evictions", "num_pages",
                 "on_evict", "page_size", "peak", "returns", "shared", "window")

    def __init__(self, num_pages: int, page_size: int, window: int | None = None):
        """Raises ValueError if there is no page beside the null page or a page holds nothing."""
        if num_pages < 2 or page_size < 1:
            raise ValueError(f"a pool needs 2 pages of 1 position or more, got {num_pages} of {page_size}")
        self.num_pages = num_pages
        self.page_size = page_size
        self.window = window
        self.peak = self.evictions = self.returns = self.shared = 0
        self.on_evict: Callable[[int, Node], None] | None = None
        self._counts = [0] * num_pages
        self._owners: list[Node | None] = [None] * num_pages
        self._free = list(range(num_pages - 1, 0, -1))  # a stack: page 1 goes out first
        self._cached: dict[int, OrderedDict[int, None]] = {}  # by class, the page that was released first comes first
        self._class_of: dict[int, int] = {}  # of the cached pages; their owners' priority may change meanwhile
        self._classes: list[int] = []  # ascending

    @property
    def free(self) -> int:
        """Pages nobody holds and nobody would find anything in."""
        return len(self._free)

    @property
    def cached(self) -> int:
        """Pages nobody holds, but somebody may find."""
        return len(self._class_of)

    @property
    def available(self) -> int:
        """Pages that can be handed out, free or cached."""
        return len(self._free) + len(self._class_of)

    @property
    def held(self) -> int:
        """Pages somebody holds, however many references each has."""
        return self.num_pages - 1 - len(self._free) - self.cached

    def references(self, page: int) -> int:
        return self._counts[page]

    def owner(self, page: int) -> Node | None:
        """By what a page is known, None if it is not."""
        return self._owners[page]

    @property
    def owned(self) -> int:
        """Pages that are known by what is in them. O(pool)."""
        return self.num_pages - self._owners.count(None)

    def allocate(self, n: int) -> list[int] | None:
        """Takes n pages with one reference each, or none at all (None) if fewer than n are available."""
        if n < 0:
            raise ValueError(f"cannot allocate {n} pages")
        if n > len(self._free) + self.cached:
            return None
        free, counts = self._free, self._counts
        while len(free) < n:
            self._evict(n - len(free))
        left = len(free) - n
        pages = free[left:]
        pages.reverse()
        del free[left:]
        for page in pages:
            counts[page] = 1
        held = self.num_pages - 1 - left - self.cached
        if held > self.peak:
            self.peak = held
        return pages

    def retain(self, pages: Iterable[int]) -> None:
        """Adds one reference to each page. Raises ValueError for a page that is neither held nor cached."""
        counts = self._counts
        for page in pages:
            if not 0 < page < self.num_pages or not (counts[page] or self._owners[page]):
                raise ValueError(f"page {page} is not held and cannot be shared")
            if counts[page]:
                self.shared += 1
            else:
                self._uncache(page)
            counts[page] += 1
        self.peak = max(self.peak, self.held)

    def release(self, pages: Iterable[int]) -> None:
        """Drops one reference from each page; the last one frees it, or leaves it cached.

        Of equally important pages the ones named first are evicted first. Raises ValueError for a double free.
        """
        counts = self._counts
        for page in pages:
            if not 0 < page < self.num_pages or not counts[page]:
                raise ValueError(f"page {page} is not held and cannot be released")
            counts[page] -= 1
            if counts[page]:
                self.shared -= 1
            else:
                self.returns += 1
                owner = self._owners[page]
                if owner is None:
                    self._free.append(page)
                else:
                    self._cache(page, owner.priority)

    def own(self, page: int, owner: Node) -> None:
        """From now on a page that is held is known by what is in it."""
        assert self._counts[page], f"page {page} is not held and cannot be published"
        assert self._owners[page] is None, f"page {page} is published already"
        self._owners[page] = owner

    def disown(self, page: int) -> None:
        """Nobody will look for what is in this page any more: if it is only cached, it is free."""
        assert self._owners[page] is not None, f"page {page} is not published"
        if not self._counts[page]:
            self._uncache(page)
            self._free.append(page)
        self._owners[page] = None

    def check(self, referenced: Iterable[int]) -> None:
        """Asserts the invariant: free + cached + held = P - 1, and counts equal the references that exist.

        Args:
          referenced: every reference there is, a page as often as it is referenced.
        """
        expected = Counter(referenced)
        held = {page: count for page, count in enumerate(self._counts) if count}
        assert held == expected, f"reference counts {held} differ from the references {dict(expected)}"
        assert not self._counts[0], "the null page is held"
        assert self.shared == sum(held.values()) - len(held)
        free, cached = set(self._free), [page for pages in self._cached.values() for page in pages]
        assert len(free) == len(self._free), "a page is free twice"
        assert set(cached) == self._class_of.keys(), "the classes of cached pages are wrong"
        assert len(cached) == self.cached, "a page is cached twice"
        assert 0 not in free, "the null page is free"
        assert len(free.union(cached, held)) == len(free) + len(cached) + len(held), "a page is in two states"
        assert len(free) + len(cached) + len(held) == self.num_pages - 1, "a page is neither free, cached nor held"
        assert (self.free, self.held) == (len(free), len(held))
        assert all(self._owners[page] for page in cached), "a cached page nobody would find"
        assert not any(self._owners[page] for page in free), "a free page is still published"
        assert sorted(self._cached) == self._classes
        assert all(self._cached.values())
        assert self.held <= self.peak < self.num_pages

    def _cache(self, page: int, priority: int) -> None:
        pages = self._cached.get(priority)
        if pages is None:
            pages = self._cached[priority] = OrderedDict()
            bisect.insort(self._classes, priority)
        pages[page] = None
        self._class_of[page] = priority

    def _uncache(self, page: int) -> None:
        priority = self._class_of.pop(page)
        pages = self._cached[priority]
        del pages[page]
        if not pages:
            self._drop_class(priority)

    def _evict(self, n: int) -> None:
        """Frees up to n cached pages of the least important class."""
        priority = self._classes[-1]
        pages = self._cached[priority]
        for _ in range(min(n, len(pages))):
            page, _ = pages.popitem(last=False)
            del self._class_of[page]
            owner, self._owners[page] = self._owners[page], None
            self._free.append(page)
            self.evictions += 1
            if self.on_evict is not None and owner is not None:
                self.on_evict(page, owner)
        if not pages:
            self._drop_class(priority)

    def _drop_class(self, priority: int) -> None:
        del self._cached[priority]
        self._classes.remove(priority)
