"""RequestPages: which pages requests hold, group by group, and when they get, share and give back some."""

import sys
from collections.abc import Sequence
from typing import NamedTuple

from jinfer.errors import CapacityError
from jinfer.kv.host import HostTier
from jinfer.kv.moves import PageCopy, PageIn, PageOut
from jinfer.kv.pool import PagePool
from jinfer.kv.prefix import PrefixIndex
from jinfer.kv.sizing import pages_for, window_pages
from jinfer.scheduler.pins import Pins
from jinfer.scheduler.plan import NewPage, Received
from jinfer.scheduler.request import Request
from jinfer.scheduler.reserve import Reserve
from jinfer.scheduler.sharing import Found, Sharing

NEVER = sys.maxsize


class Moves(NamedTuple):
    """What a plan moves before its calls, see StepPlan."""

    outs: tuple[PageOut, ...] = ()
    ins: tuple[PageIn, ...] = ()
    received: tuple[Received, ...] = ()
    copies: tuple[PageCopy, ...] = ()


class RequestPages:
    """Gives the pages of all page groups to requests; no policy, no queue.

    A group whose queries see everything holds all pages of a request, from admission on. One with a window gets them
    as the request moves on, and gives a page back before the first call none of whose queries sees into it. Steps in
    flight may still read it: the device runs calls in the order of dispatch, so whoever gets the page writes to it
    after they are done. The page tables on the device keep naming it; what lies below a window weighs nothing there,
    whatever it is, and is never written to.

    Full pages are published in the prefix index and may be shared; a page that is written to has one holder.
    Only crossing a page's border changes anything, so a decoding row costs one comparison (`Request.due`).

    Attributes:
      index: full blocks by what is in them. sharing: how requests find and publish them. pins: prefixes that stay.
      reserve: pages active requests may still take.
    """

    def __init__(self, pools: Sequence[PagePool], decode_steps: int, host: HostTier | None = None):
        self.pools = tuple(pools)
        self.index = PrefixIndex(pools, host)
        self.page_size = pools[0].page_size
        self.sharing = Sharing(self.index)
        self.pins = Pins(pools)
        self._windows = [(g, pool.window) for g, pool in enumerate(pools) if pool.window is not None]
        self.reserve = Reserve(
            pools, [window_pages(pool.window, pool.page_size, decode_steps) or NEVER for pool in pools])
        self._ins: list[PageIn] = []
        self._received: list[Received] = []
        self._copies: list[PageCopy] = []

    @property
    def returns(self) -> int:
        """Grows whenever a page is given back."""
        return sum(pool.returns for pool in self.pools)

    def begin(self) -> None:
        """A new plan."""
        self.sharing.step += 1
        if self.index.host is not None:
            self.index.host.begin()

    def moves(self) -> Moves:
        """What has to move for this plan; asked once."""
        if not (self.index.outs or self._ins or self._received or self._copies):
            return Moves()
        moves = Moves(tuple(self.index.outs), tuple(self._ins), tuple(self._received), tuple(self._copies))
        for some in (self.index.outs, self._ins, self._received, self._copies):
            some.clear()
        return moves

    def check_fits(self, request: Request, positions: int) -> None:
        """Notes how many pages a request of so many positions will ever have in a table.

        Raises CapacityError if it could not even run alone.
        """
        limit = pages_for(positions, self.page_size)
        prompt = len(request.prompt)
        for pool, cap in zip(self.pools, self.reserve.caps, strict=True):
            need, total = min(limit, cap), pool.num_pages - 1
            if need > total:
                alone = min(pages_for(prompt, self.page_size), cap) <= total
                where = "" if pool.window is None else f" at once for a window of {pool.window}"
                raise CapacityError(
                    "max_tokens" if alone else "prompt",
                    f"{prompt} prompt tokens and up to {request.max_position - prompt} more need {need} KV pages of "
                    f"{self.page_size} tokens{where}, the pool has {total}")
        request.page_limit = request.page_goal = limit

    def lacks(self, request: Request, found: Found, share: float, alone: bool) -> list[int]:
        """Pages of each group that are missing for an admission; nothing above 0 means it can be admitted.

        Args:
          share: of the pages requests may still take, the part that must stay available.
          alone: nothing else is active, so nothing needs to.
        """
        short = []
        for g, pool in enumerate(self.pools):
            first, until, shared = self._span(request, found, g)
            count = until - first - len(shared)
            careful = self.reserve.careful(g, request)
            need = count + (len(shared) if careful else sum(not pool.references(page) for page in shared))
            if not alone:
                need += self.reserve.kept(request, g, self.reserve.owes(request, g, until, until - first), share)
            short.append(need - self.reserve.room(g, request))
        return short

    def admit(self, request: Request, found: Found) -> int:
        """Gives a request the pages of all its tokens, or of a window's worth of them; there are enough of them.

        Returns how many blocks come back from the host tier for it.
        """
        size, spans = self.page_size, [self._span(request, found, g) for g in range(len(self.pools))]
        self.sharing.enter(request, found)  # it and what it shares are held before anything is evicted to make room
        loaded: set[int] = set()  # blocks, of whichever groups
        for g, (first, _, shared) in enumerate(spans):
            self.pools[g].retain(shared)
            for node in found.nodes[first:]:
                if not node.pages[g]:
                    self.index.hold(g, node)
                    loaded.add(node.depth)
        if request.service.cache:
            self.index.host_hit += len(loaded) * size
        request.pages, request.gone = [], []
        full = found.start // size
        for g, (first, until, shared) in enumerate(spans):
            fresh = self.pools[g].allocate(until - first - len(shared))
            assert fresh is not None, "admitted without room"
            fresh.reverse()
            table = [0] * first
            if found.nodes:
                for node in found.nodes[first:]:
                    if not node.pages[g]:
                        self._ins.append(self.index.load(g, node, fresh.pop()))
                    table.append(node.pages[g])
            else:
                table += shared
                if found.sibling is not None and found.start % size:
                    self._copies.append(PageCopy(g, found.sibling.pages[g][full], fresh[-1]))
            table += reversed(fresh)
            request.pages.append(table)
            request.gone.append(first)
            self.reserve.account(request, g, 1)
        self.reserve.protected += request.protected
        if request.given is not None:
            count = pages_for(found.start, size)
            self._received.append(Received(request, tuple(tuple(table[:count]) for table in request.pages)))
        self._set_due(request)
        return len(loaded)

    def extend(self, request: Request, stop: int) -> int:
        """Pages for a chunk from request.computed to `stop`, as far as there are; returns where it can end.

        A long chunk leaves the pages that other active requests will want next; the shortest takes what it needs.
        """
        if not self._windows:
            return stop
        start, size = request.computed, self.page_size
        self.leave(request)
        for g, _ in self._windows:
            held, spare = len(request.pages[g]), self.reserve.spare(request, g)
            missing = pages_for(stop, size) - held
            others = self.reserve.wanting[g] - (self.reserve.owes_now(request, g) > 0)
            if missing > max(0, spare - others):
                least = pages_for(start + 1, size) - held
                stop = min(stop, (held + max(0, min(max(least, spare - others), spare))) * size)
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
        if not all(self.reserve.spare(request, g) > 0 for g in lacking):
            return None
        new = tuple((g, len(request.pages[g]), self._take(request, g, 1)) for g in lacking)
        self._set_due(request)
        return new

    def leave(self, request: Request) -> int:
        """Gives back the pages that no query from request.computed on sees; returns how many."""
        count = 0
        for g, window in self._windows:
            first, gone = max(0, request.computed - window + 1) // self.page_size, request.gone[g]
            if first > gone:
                self.reserve.account(request, g, -1)
                pages = request.pages[g]
                self.pools[g].release(pages[gone:first])
                pages[gone:first] = [0] * (first - gone)
                request.gone[g] = first
                count += first - gone
                self.reserve.account(request, g, 1)
        return count

    def release(self, request: Request) -> None:
        """Gives back everything; what is published stays cached, the end of a chain to be evicted before its start."""
        for g, (pool, pages, gone) in enumerate(zip(self.pools, request.pages, request.gone, strict=True)):
            self.reserve.account(request, g, -1)
            pool.release(reversed(pages[gone:]))
        self.reserve.protected -= request.protected
        self.sharing.leave(request)
        request.pages, request.gone, request.due = [], [], 0

    def pin(self, request: Request, positions: int) -> int | None:
        """Keeps the pages of the full blocks of a prompt from eviction.

        The request has ended, or does so before the next plan: what it holds of them it gives back.

        Args:
          positions: of a sequence for which there must be room beside all pins.

        Returns:
          What `pins.remove` takes; None if some of the pages are not in the pool.

        Raises:
          CapacityError: too little room would be left.
        """
        nodes = self.sharing.chain(request)
        if not nodes:
            return None
        end = len(nodes) * self.page_size
        pages = [[node.pages[g] for node in nodes[self.sharing.first(g, end):]] for g in range(len(self.pools))]
        if not all(map(all, pages)):
            return None
        for g, (pool, some) in enumerate(zip(self.pools, pages, strict=True)):
            held = {*request.pages[g], *self.pins.held(g)} if request.pages else set(self.pins.held(g))
            fresh = [page for page in some if page not in held]
            count = len(fresh) if self.reserve.careful(g, request) else sum(not pool.references(p) for p in fresh)
            if count > max(0, self.reserve.room(g, request) - self.reserve.sure[g]):
                raise CapacityError("prefix", f"its {count} KV pages are kept for requests that were preempted")
        whole = pages_for(positions, self.page_size)
        return self.pins.add(pages, [min(whole, cap) for cap in self.reserve.caps])

    def check(self, active: Sequence[Request]) -> None:
        """Asserts what must hold of the pages of the active requests and pins, which are all that hold any. O(pool)."""
        for g, pool in enumerate(self.pools):
            held = [page for request in active for page in request.pages[g][request.gone[g]:]]
            pool.check(held + self.pins.held(g))
            for request in active:
                pages, gone = request.pages[g], request.gone[g]
                assert not any(pages[:gone]), "a page that was given back is still named"
                assert 0 < len(pages) <= request.page_limit
                assert request.computed <= len(pages) * self.page_size
                below = 0 if pool.window is None else max(0, request.computed - pool.window + 1)
                assert gone * self.page_size <= below, "a page is gone that a query will see"
                for page in pages[max(gone, request.computed // self.page_size):]:
                    assert pool.references(page) == 1, "a page to be written is shared"
                    assert pool.owner(page) is None, "a page to be written is published"
        self.reserve.check(active)
        self.sharing.check(active)

    def _span(self, request: Request, found: Found, g: int) -> tuple[int, int, list[int]]:
        """Of its table at admission: where pages begin, where they end, and those of them that are there."""
        first = self.sharing.first(g, found.start)
        until = min(pages_for(request.length, self.page_size), first + self.reserve.caps[g])
        if found.sibling is not None:
            return first, until, found.sibling.pages[g][first:found.start // self.page_size]
        return first, until, [node.pages[g] for node in found.nodes[first:] if node.pages[g]]

    def _take(self, request: Request, g: int, count: int) -> int:
        self.reserve.account(request, g, -1)
        pages = self.pools[g].allocate(count)
        assert pages is not None
        request.pages[g] += pages
        self.reserve.account(request, g, 1)
        return pages[0]

    def _set_due(self, request: Request) -> None:
        size = self.page_size
        due = min(map(len, request.pages)) * size
        for g, window in self._windows:  # the first query that does not see the oldest page any more
            due = min(due, (request.gone[g] + 1) * size + window - 1)
        request.due = due

