"""RequestPages: which pages requests hold, group by group, and when they get, share and give back some."""

import sys
from collections.abc import Sequence
from math import ceil
from typing import NamedTuple

from jinfer.errors import CapacityError
from jinfer.kv.host import HostTier
from jinfer.kv.moves import PageCopy, PageIn, PageOut
from jinfer.kv.node import Node
from jinfer.kv.pool import PagePool
from jinfer.kv.prefix import PrefixIndex
from jinfer.kv.sizing import pages_for, window_pages
from jinfer.scheduler.plan import NewPage, Received
from jinfer.scheduler.request import Request, Status

NEVER = sys.maxsize


class Found(NamedTuple):
    """What a request need not compute.

    Attributes:
      start: positions that are there already, less than it has tokens.
      nodes: blocks of the prefix index. sibling: whose pages hold it, the partly filled last one too.
    """

    start: int = 0
    nodes: Sequence[Node] = ()
    sibling: Request | None = None


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
      owed: pages of each group that active requests may still take; sure: of those, what is kept for protected ones.
      step: number of the plan in the making.
    """

    def __init__(self, pools: Sequence[PagePool], decode_steps: int, host: HostTier | None = None):
        self.pools = tuple(pools)
        self.index = PrefixIndex(pools, host)
        self.page_size = pools[0].page_size
        self.step = 0
        self.owed = [0] * len(pools)
        self.sure = [0] * len(pools)
        self._wanting = [0] * len(pools)  # requests that may take another page
        self._windows = [(g, pool.window) for g, pool in enumerate(pools) if pool.window is not None]
        # most pages a decoding row needs at once
        self._caps = [window_pages(pool.window, pool.page_size, decode_steps) or NEVER for pool in pools]
        self._coming: dict[int, int] = {}  # blocks that active requests are about to compute
        self._ins: list[PageIn] = []
        self._received: list[Received] = []
        self._copies: list[PageCopy] = []
        self._pins: dict[int, list[list[int]]] = {}  # pages of each group
        self._last_pin = 0

    @property
    def returns(self) -> int:
        """Grows whenever a page is given back."""
        return sum(pool.returns for pool in self.pools)

    def begin(self) -> None:
        """A new plan."""
        self.step += 1
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

    def find(self, request: Request, *, confirm: bool = True) -> Found:
        """What a waiting request need not compute, as things are.

        confirm: by the tokens; without, hashes are believed, which is good enough to compare requests.
        """
        last = request.length - 1  # the last token is computed in any case: its logits are what is wanted
        if request.given is not None:
            return Found(min(request.given.tokens, last))
        if request.scores_prompt or not last:
            return Found()
        if not request.outputs:
            for other in request.siblings:
                if other is not request and self._forkable(other, last):
                    return Found(last, (), other)
        blocks = last // self.page_size
        self._hash(request, blocks)
        keys = request.keys if len(request.keys) == blocks else request.keys[:blocks]
        nodes = self.index.usable(keys, request.extra)
        if not nodes or (confirm and not self.index.confirm(nodes, self._packed(request, 0, len(nodes)))):
            return Found()
        return Found(len(nodes) * self.page_size, nodes)

    def waits(self, request: Request, found: Found) -> bool:
        """It should wait for what an active request is about to compute, and then find it."""
        if found.sibling is not None or request.given is not None or request.scores_prompt:
            return False
        if not request.outputs and any(
                other is not request and (other.status is Status.PREFILLING or other.ready == self.step)
                for other in request.siblings):
            return True
        following = found.start // self.page_size
        return following < (request.length - 1) // self.page_size and request.keys[following] in self._coming

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
            need = count + (len(shared) if self._careful(g, request) else sum(not pool.references(p) for p in shared))
            if not alone:
                owes = self._owes(request, g, until, until - first)
                own = owes if request.protected else share * owes
                others = self.sure[g] + share * (self.owed[g] - self.sure[g])
                need += max(ceil(own + others), self._wanting[g] + (owes > 0))
            short.append(need - self._room(g, request))
        return short

    def admit(self, request: Request, found: Found) -> None:
        """Gives a request the pages of all its tokens, or of a window's worth of them; there are enough of them."""
        size, spans = self.page_size, [self._span(request, found, g) for g in range(len(self.pools))]
        self._enter(request, found)  # it and what it shares are held before anything is evicted to make room
        for g, (first, _, shared) in enumerate(spans):
            self.pools[g].retain(shared)
            for node in found.nodes[first:]:
                if not node.pages[g]:
                    self.index.hold(g, node)
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
            self._account(request, g, 1)
        if request.given is not None:
            count = pages_for(found.start, size)
            self._received.append(Received(request, tuple(tuple(table[:count]) for table in request.pages)))
        self._set_due(request)

    def publish(self, request: Request, blocks: int) -> None:
        """Makes known so many first blocks of an active request: full, and dispatched."""
        index, tip = self.index, request.tip
        assert tip is not None
        begin = request.blocks
        self._hash(request, blocks)
        for i, tokens in zip(range(begin, blocks), self._packed(request, begin, blocks), strict=True):
            key = request.keys[i]
            tip = index.publish(tip, key, tokens, [pages[i] for pages in request.pages], request.service.priority)
            if i < request.promised:
                self._kept_promise(key)
        request.tip, request.blocks = tip, blocks

    def extend(self, request: Request, stop: int) -> int:
        """Pages for a chunk from request.computed to `stop`, as far as there are; returns where it can end.

        A long chunk leaves the pages that other active requests will want next; the shortest takes what it needs.
        """
        if not self._windows:
            return stop
        start, size = request.computed, self.page_size
        self.leave(request)
        for g, _ in self._windows:
            held, spare = len(request.pages[g]), self._spare(request, g)
            missing = pages_for(stop, size) - held
            others = self._wanting[g] - (self._owes_now(request, g) > 0)
            if missing > spare - others:
                least = pages_for(start + 1, size) - held
                stop = min(stop, (held + min(missing, max(least, spare - others), spare)) * size)
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
        if not all(self._spare(request, g) > 0 for g in lacking):
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
                self._account(request, g, -1)
                pages = request.pages[g]
                self.pools[g].release(pages[gone:first])
                pages[gone:first] = [0] * (first - gone)
                request.gone[g] = first
                count += first - gone
                self._account(request, g, 1)
        return count

    def release(self, request: Request) -> None:
        """Gives back everything; what is published stays cached, the end of a chain to be evicted before its start."""
        assert request.tip is not None
        for g, (pool, pages, gone) in enumerate(zip(self.pools, request.pages, request.gone, strict=True)):
            self._account(request, g, -1)
            pool.release(reversed(pages[gone:]))
        for i in range(request.blocks, request.promised):
            self._kept_promise(request.keys[i])
        self.index.leave(request.tip)
        request.pages, request.gone, request.due, request.tip = [], [], 0, None
        request.blocks = request.promised = 0

    def forget(self, request: Request) -> None:
        """A request has ended that kept what it computed to itself: nobody will look for it."""
        nodes = self.index.usable(request.keys, request.extra)
        if nodes:
            self.index.discard(nodes[-1])

    def pin(self, request: Request, positions: int) -> int | None:
        """Holds the pages of the full blocks of a prompt, so that they are never evicted.

        Args:
          positions: of a sequence for which there must be room beside all pins.

        Returns:
          What `unpin` takes, or None if some of the pages are not there.

        Raises:
          CapacityError: too little room would be left.
        """
        blocks = len(request.prompt) // self.page_size
        self._hash(request, blocks)
        nodes = self.index.usable(request.keys[:blocks], request.extra)
        if not blocks or len(nodes) < blocks or not self.index.confirm(nodes, self._packed(request, 0, blocks)):
            return None
        pages = [[node.pages[g] for node in nodes[self._first(g, blocks * self.page_size):]]
                 for g in range(len(self.pools))]
        if not all(map(all, pages)):
            return None  # in the host tier only
        for g, (pool, cap) in enumerate(zip(self.pools, self._caps, strict=True)):
            pinned = len({page for pin in self._pins.values() for page in pin[g]} | set(pages[g]))
            need = min(pages_for(positions, self.page_size), cap)
            if pool.num_pages - 1 - pinned < need:
                raise CapacityError("prefix", f"{pinned} of {pool.num_pages - 1} KV pages would be pinned, but a "
                                              f"request may need {need}")
        for pool, some in zip(self.pools, pages, strict=True):
            pool.retain(some)
        self._last_pin += 1
        self._pins[self._last_pin] = pages
        return self._last_pin

    def unpin(self, pin: int) -> None:
        """Raises KeyError if there is no such pin."""
        for pool, pages in zip(self.pools, self._pins.pop(pin), strict=True):
            pool.release(reversed(pages))

    def check(self, active: Sequence[Request]) -> None:
        """Asserts what must hold of the pages of the active requests and pins, which are all that hold any. O(pool)."""
        for g, pool in enumerate(self.pools):
            held = [page for request in active for page in request.pages[g][request.gone[g]:]]
            pool.check(held + [page for pin in self._pins.values() for page in pin[g]])
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
            assert self.owed[g] == sum(self._owes_now(r, g) for r in active)
            assert self.sure[g] == sum(self._owes_now(r, g) for r in active if r.protected)
            assert self.sure[g] <= pool.available - (pool.shared if pool.window and self.sure[g] else 0)
            assert self._wanting[g] == sum(self._owes_now(r, g) > 0 for r in active)
        coming: dict[int, int] = {}
        for request in active:
            for key in request.keys[request.blocks:request.promised]:
                coming[key] = coming.get(key, 0) + 1
        assert coming == self._coming, "a promise was forgotten"
        self.index.check(request.tip for request in active if request.tip is not None)

    def _span(self, request: Request, found: Found, g: int) -> tuple[int, int, list[int]]:
        """Of its table at admission: where pages begin, where they end, and those of them that are there."""
        first = self._first(g, found.start)
        until = min(pages_for(request.length, self.page_size), first + self._caps[g])
        if found.sibling is not None:
            return first, until, found.sibling.pages[g][first:found.start // self.page_size]
        return first, until, [node.pages[g] for node in found.nodes[first:] if node.pages[g]]

    def _first(self, g: int, position: int) -> int:
        """The first block that the query at a position sees."""
        window = self.pools[g].window
        return 0 if window is None else max(0, position - window + 1) // self.page_size

    def _forkable(self, other: Request, last: int) -> bool:
        """Another choice of the same prompt has all of it but the last token in its pages."""
        if other.status is not Status.RUNNING or other.ready >= self.step:
            return False
        blocks = pages_for(last, self.page_size)
        return all(all(pages[self._first(g, last):blocks]) for g, pages in enumerate(other.pages))

    def _enter(self, request: Request, found: Found) -> None:
        """Where it stands in the prefix index, and what others may wait for."""
        size, nodes, full = self.page_size, found.nodes, found.start // self.page_size
        if found.sibling is not None:
            node = found.sibling.tip
            assert node is not None
            while node.depth > full:
                node = node.parent
                assert node is not None
            nodes, request.keys = ([node] if node.depth else []), found.sibling.keys[:full]
        request.tip = self.index.enter(request.extra, nodes)
        request.blocks = request.tip.depth
        for node in found.nodes:
            self.index.touch(node, request.service.priority)
        request.computed = request.cached = found.start
        if request.given is None and not request.scores_prompt:
            self.index.queried += request.length
            self.index.hit += found.start
        if request.service.cache:
            promised = request.length // size
            self._hash(request, promised)
            request.promised = max(promised, request.blocks)
            for key in request.keys[request.blocks:request.promised]:
                self._coming[key] = self._coming.get(key, 0) + 1

    def _kept_promise(self, key: int) -> None:
        count = self._coming[key] - 1
        if count:
            self._coming[key] = count
        else:
            del self._coming[key]

    def _hash(self, request: Request, blocks: int) -> None:
        """Makes request.keys as long as `blocks`."""
        keys = request.keys
        if len(keys) < blocks:
            key = keys[-1] if keys else self.index.root_key(request.extra)
            for tokens in self._packed(request, len(keys), blocks):
                key = self.index.next_key(key, tokens)
                keys.append(key)

    def _packed(self, request: Request, begin: int, end: int) -> list[bytes]:
        """Tokens of blocks begin..end-1."""
        return self.index.pack(request.tokens(begin * self.page_size, end * self.page_size))

    def _take(self, request: Request, g: int, count: int) -> int:
        self._account(request, g, -1)
        pages = self.pools[g].allocate(count)
        assert pages is not None
        request.pages[g] += pages
        self._account(request, g, 1)
        return pages[0]

    def _account(self, request: Request, g: int, sign: int) -> None:
        """Before (-1) and after (1) the pages of an active request change."""
        owes = self._owes_now(request, g)
        if owes:
            self.owed[g] += sign * owes
            self._wanting[g] += sign
            if request.protected:
                self.sure[g] += sign * owes

    def _owes_now(self, request: Request, g: int) -> int:
        count = len(request.pages[g])
        return self._owes(request, g, count, count - request.gone[g])

    def _owes(self, request: Request, g: int, count: int, held: int) -> int:
        """Pages it may still take, before it gives one back, when it has `count` in its table and holds `held`."""
        return max(0, min(request.page_limit - count, self._caps[g] - held))

    def _spare(self, request: Request, g: int) -> int:
        """Pages it may take without breaking into what is kept for protected requests."""
        own = self._owes_now(request, g) if request.protected else 0
        return self._room(g, request) - self.sure[g] + own

    def _room(self, g: int, request: Request) -> int:
        pool = self.pools[g]
        return pool.available - pool.shared if self._careful(g, request) else pool.available

    def _careful(self, g: int, request: Request) -> bool:
        """A page with several holders counts several times.

        Who moves on with a window gives pages back and takes as many. What is kept for protected requests must not
        count on pages that then stay with another holder.
        """
        return self.pools[g].window is not None and (self.sure[g] > 0 or request.protected)

    def _set_due(self, request: Request) -> None:
        size = self.page_size
        due = min(map(len, request.pages)) * size
        for g, window in self._windows:  # the first query that does not see the oldest page any more
            due = min(due, (request.gone[g] + 1) * size + window - 1)
        request.due = due

