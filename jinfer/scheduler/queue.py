"""RequestQueue: the requests that wait, the best-ranked first."""

import heapq
import itertools
import math
from bisect import bisect_left, insort
from collections.abc import Iterator
from operator import itemgetter

from jinfer.scheduler.request import Request

Entry = tuple[float, int, int, Request]  # key, order, number of the addition: entries never compare requests
SLACK = 64  # stale entries that are not worth a compaction


class RequestQueue:
    """A priority queue that any member can leave, with its first members in order.

    The best `front` requests are a sorted list, the others a heap below it. Who leaves the list is followed by the
    first of the heap. Who leaves the heap stays in it as a stale entry: one that is not the request's entry of now,
    because it has none or was added again. Stale entries are dropped when they come up, and all together once they
    outnumber the others.

    Adding and removing cost O(log n + front), amortised; memory is O(n). Nothing scans the queue but `check`.
    """

    def __init__(self, front: int = 64):
        if front < 1:
            raise ValueError(f"the front of a queue holds one request or more, got {front}")
        self._most = front
        self._entries: dict[Request, Entry] = {}
        self._front: list[Entry] = []  # sorted
        self._rest: list[Entry] = []  # a heap, all behind the front
        self._stale = 0  # entries of the heap whose request left
        self._additions = itertools.count()

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, request: Request) -> bool:
        return request in self._entries

    def __iter__(self) -> Iterator[Request]:
        """In any order."""
        return iter(self._entries)

    @property
    def first(self) -> Request | None:
        """The best-ranked request."""
        return self._front[0][-1] if self._front else None

    @property
    def front(self) -> tuple[Request, ...]:
        """The best-ranked requests in order, as many as a front holds."""
        return tuple(map(itemgetter(-1), self._front))

    def add(self, request: Request, rank: tuple[float, int]) -> None:
        """Takes a request in.

        Args:
          rank: key and order; the smallest is first, and no two requests have the same.

        Raises:
          ValueError: it is there already, or its key is not finite.
        """
        if request in self._entries:
            raise ValueError(f"request {request.id} waits already")
        if not math.isfinite(rank[0]):
            raise ValueError(f"the key of request {request.id} must be finite, got {rank[0]}")
        entry = (*rank, next(self._additions), request)
        self._entries[request] = entry
        front = self._front
        if len(front) == self._most and entry > front[-1]:
            heapq.heappush(self._rest, entry)
            return
        insort(front, entry)
        if len(front) > self._most:
            heapq.heappush(self._rest, front.pop())

    def remove(self, request: Request) -> None:
        """Lets a request go, wherever it is. Raises KeyError if it is not there."""
        entry = self._entries.pop(request)
        front = self._front
        if entry <= front[-1]:
            del front[bisect_left(front, entry)]
            self._refill()
        else:
            self._stale += 1
        if self._stale > len(self._rest) // 2 + SLACK:
            self._compact()

    def check(self) -> None:
        """Asserts what must hold of the queue. O(n log n)."""
        live = [entry for entry in self._rest if self._is_live(entry)]
        assert len(self._front) == min(self._most, len(self)), "the front has a gap"
        assert self._front + sorted(live) == sorted(self._entries.values()), "the queue is out of order"
        assert self._stale == len(self._rest) - len(live), "stale entries are miscounted"
        assert self._stale <= len(live) + 2 * SLACK, "stale entries pile up"

    def _refill(self) -> None:
        while self._rest:
            entry = heapq.heappop(self._rest)
            if self._is_live(entry):
                self._front.append(entry)
                return
            self._stale -= 1

    def _compact(self) -> None:
        self._rest = [entry for entry in self._rest if self._is_live(entry)]
        heapq.heapify(self._rest)
        self._stale = 0

    def _is_live(self, entry: Entry) -> bool:
        return self._entries.get(entry[-1]) is entry
