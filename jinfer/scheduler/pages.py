"""RequestPages: which pages requests hold, group by group, and when they get and give back some."""

import sys
from collections.abc import Iterable, Sequence

from jinfer.errors import CapacityError
from jinfer.kv.pool import PagePool
from jinfer.kv.sizing import pages_for, window_pages
from jinfer.scheduler.plan import NewPage
from jinfer.scheduler.request import Request

NEVER = sys.maxsize


class RequestPages:
    """Gives the pages of all page groups to requests; no policy, no queue.

    A group whose queries see everything holds all pages of a request, from admission on. One with a window gets them
    as the request moves on, and gives a page back before the first call none of whose queries sees into it. Steps in
    flight may still read it: the device runs calls in the order of dispatch, so whoever gets the page writes to it
    after they are done. The page tables on the device keep naming it; what lies below a window weighs nothing there,
    whatever it is, and is never written to.

    Only crossing a page's border changes anything, so a decoding row costs one comparison (`Request.due`).
    """

    def __init__(self, pools: Sequence[PagePool], decode_steps: int):
        self.pools = tuple(pools)
        self.page_size = pools[0].page_size
        self._windows = [(g, pool.window) for g, pool in enumerate(pools) if pool.window is not None]
        # most pages a decoding row needs at once
        self._caps = [window_pages(pool.window, pool.page_size, decode_steps) or NEVER for pool in pools]

    def check_fits(self, request: Request, positions: int) -> None:
        """Notes how many pages a request of so many positions will ever have in a table.

        Raises CapacityError if it could not even run alone.
        """
        limit = pages_for(positions, self.page_size)
        prompt = len(request.prompt)
        for pool, cap in zip(self.pools, self._caps, strict=True):
            need, total = min(limit, cap), pool.num_pages - 1
            if need > total:
                alone = min(pages_for(prompt, self.page_size), cap) <= total
                where = "" if pool.window is None else f" at once for a window of {pool.window}"
                raise CapacityError(
                    "max_tokens" if alone else "prompt",
                    f"{prompt} prompt tokens and up to {request.max_position - prompt} more need {need} KV pages of "
                    f"{self.page_size} tokens{where}, the pool has {total}")
        request.page_limit = limit

    def wanted(self, active: Iterable[Request]) -> list[int]:
        """Pages of each group that these requests will want next, one each at most."""
        counts = [0] * len(self.pools)
        for request in active:
            for g in range(len(counts)):
                counts[g] += self._wants(request, g)
        return counts

    def admit(self, request: Request, reserve: list[int]) -> bool:
        """Gives a request the pages of all its tokens, or of a window's worth of them, in every group or in none.

        reserve: pages of each group that must stay free; grows by what the request itself will want next.
        """
        tokens = pages_for(request.length, self.page_size)
        needs = [min(tokens, cap) for cap in self._caps]
        more = tokens < request.page_limit
        for pool, need, cap, kept in zip(self.pools, needs, self._caps, reserve, strict=True):
            if need + kept + (more and need < cap) > pool.free:
                return False
        request.pages, request.gone = [[] for _ in needs], [0] * len(needs)
        for g, need in enumerate(needs):
            self._take(request, g, need)
            reserve[g] += self._wants(request, g)
        self._set_due(request)
        return True

    def extend(self, request: Request, stop: int, active: Sequence[Request]) -> int:
        """Pages for a chunk from request.computed to `stop`, as far as there are; returns where it can end.

        A long chunk leaves the pages that other active requests will want next; the shortest takes what it needs.
        """
        if not self._windows:
            return stop
        start, size = request.computed, self.page_size
        self.leave(request)
        for g, _ in self._windows:
            held, free = len(request.pages[g]), self.pools[g].free
            missing = pages_for(stop, size) - held
            if missing > free - len(active):
                least, others = pages_for(start + 1, size) - held, self.wanted(active)[g] - self._wants(request, g)
                stop = min(stop, (held + min(missing, max(least, free - others), free)) * size)
        for g, _ in self._windows:
            missing = pages_for(stop, size) - len(request.pages[g])
            if missing > 0:
                self._take(request, g, missing)
        self._set_due(request)
        return stop

    def advance(self, request: Request, stop: int) -> tuple[NewPage, ...] | None:
        """Pages for a decode call from request.computed to `stop`, at most one a group; None if one is missing."""
        self.leave(request)
        lacking = [g for g, pages in enumerate(request.pages) if stop > len(pages) * self.page_size]
        if not all(self.pools[g].free for g in lacking):
            return None
        new = tuple((g, len(request.pages[g]), self._take(request, g, 1)[0]) for g in lacking)
        self._set_due(request)
        return new

    def leave(self, request: Request) -> int:
        """Gives back the pages that no query from request.computed on sees; returns how many."""
        count = 0
        for g, window in self._windows:
            first, gone = max(0, request.computed - window + 1) // self.page_size, request.gone[g]
            if first > gone:
                pages = request.pages[g]
                self.pools[g].release(pages[gone:first])
                pages[gone:first] = [0] * (first - gone)
                request.gone[g] = first
                count += first - gone
        return count

    def release(self, request: Request) -> None:
        """Gives back everything."""
        for pool, pages, gone in zip(self.pools, request.pages, request.gone, strict=True):
            pool.release(pages[gone:])
        request.pages, request.gone, request.due = [], [], 0

    def check(self, active: Sequence[Request]) -> None:
        """Asserts what must hold of the pages of the active requests, which are all that hold any. O(pool)."""
        for g, pool in enumerate(self.pools):
            held = [page for request in active for page in request.pages[g][request.gone[g]:]]
            pool.check(held)
            assert len(held) == len(set(held)), "a page is held by two requests"
            for request in active:
                pages, gone = request.pages[g], request.gone[g]
                assert not any(pages[:gone]), "a page that was given back is still named"
                assert 0 < len(pages) <= request.page_limit
                assert request.computed <= len(pages) * self.page_size
                below = 0 if pool.window is None else max(0, request.computed - pool.window + 1)
                assert gone * self.page_size <= below, "a page is gone that a query will see"

    def _take(self, request: Request, g: int, count: int) -> list[int]:
        pages = self.pools[g].allocate(count)
        assert pages is not None
        request.pages[g] += pages
        return pages

    def _wants(self, request: Request, g: int) -> bool:
        """It will want another page, before it gives one back."""
        pages = request.pages[g]
        return len(pages) < request.page_limit and len(pages) - request.gone[g] < self._caps[g]

    def _set_due(self, request: Request) -> None:
        size = self.page_size
        due = min(map(len, request.pages)) * size
        for g, window in self._windows:  # the first query that does not see the oldest page any more
            due = min(due, (request.gone[g] + 1) * size + window - 1)
        request.due = due
