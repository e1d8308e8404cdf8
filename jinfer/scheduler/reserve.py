"""Reserve: how many pages active requests may still take, and what of it is kept for them."""

from collections.abc import Sequence
from math import ceil

from jinfer.kv.pool import PagePool
from jinfer.scheduler.request import Request


class Reserve:
    """Counts, of each page group, what requests may still take; kept up whenever their pages change.

    Attributes:
      caps: most pages a decoding row needs at once, of each group.
      owed: pages that active requests may still take. sure: of those, what protected ones may.
      wanting: requests that may take another page. protected: active requests that are.
    """

    def __init__(self, pools: Sequence[PagePool], caps: Sequence[int]):
        self.caps = tuple(caps)
        self.owed = [0] * len(pools)
        self.sure = [0] * len(pools)
        self.wanting = [0] * len(pools)
        self.protected = 0
        self._pools = tuple(pools)

    def account(self, request: Request, g: int, sign: int) -> None:
        """Before (-1) and after (1) the pages of an active request change."""
        owes = self.owes_now(request, g)
        if owes:
            self.owed[g] += sign * owes
            self.wanting[g] += sign
            if request.protected:
                self.sure[g] += sign * owes

    def owes_now(self, request: Request, g: int) -> int:
        """Pages an active request may still take."""
        count = len(request.pages[g])
        return self.owes(request, g, count, count - request.gone[g])

    def owes(self, request: Request, g: int, count: int, held: int) -> int:
        """Pages it may still take, before it gives one back, when it has `count` in its table and holds `held`."""
        limit = request.page_limit if request.protected else request.page_goal
        return max(0, min(limit - count, self.caps[g] - held))

    def kept(self, request: Request, g: int, owes: int, share: float) -> int:
        """Pages that must stay available when a request is admitted that may then still take `owes`.

        share: of what requests may still take, the part that is kept; of protected ones all is.
        """
        own = owes if request.protected else share * owes
        others = self.sure[g] + share * (self.owed[g] - self.sure[g])
        return max(ceil(own + others), self.wanting[g] + (owes > 0))

    def spare(self, request: Request, g: int) -> int:
        """Pages it may take without breaking into what is kept for protected requests."""
        own = self.owes_now(request, g) if request.protected else 0
        return self.room(g, request) - self.sure[g] + own

    def room(self, g: int, request: Request) -> int:
        """Pages there are for a request."""
        pool = self._pools[g]
        return pool.available - pool.shared if self.careful(g, request) else pool.available

    def careful(self, g: int, request: Request) -> bool:
        """A page with several holders counts several times.

        Who moves on with a window gives pages back and takes as many. What is kept for protected requests must not
        count on pages that then stay with another holder.
        """
        return self._pools[g].window is not None and (self.protected > 0 or request.protected)

    def check(self, active: Sequence[Request]) -> None:
        """Asserts that the counts are right, and that what is kept is there."""
        assert self.protected == sum(request.protected for request in active)
        for g, pool in enumerate(self._pools):
            assert self.owed[g] == sum(self.owes_now(r, g) for r in active)
            assert self.wanting[g] == sum(self.owes_now(r, g) > 0 for r in active)
            assert self.sure[g] == sum(self.owes_now(r, g) for r in active if r.protected)
            assert self.sure[g] <= pool.available - (pool.shared if pool.window and self.protected else 0)
