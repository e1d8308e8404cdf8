"""HostStore: pages in pinned memory of the host, and the copies between it and the devices."""

import itertools
import time
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal, NamedTuple

import jax

from jinfer.errors import JinferError
from jinfer.models.context import KVPages
from jinfer.scheduler.plan import PageIn, PageOut
from jinfer.sharding import Layout

STAGED = 32  # pages that may be in device memory on their way to or from the host, beyond the pool
Direction = Literal["out", "in"]


class Transfer(NamedTuple):
    """Copies between devices and host: bytes of all devices together, seconds on the link."""

    direction: Direction
    bytes: int
    seconds: float


class HostStore:
    """Slots of the host tier, each a page of its group: an array a slot (and one for v, and for scales) in the
    device's `pinned_host` memory, sharded as the pool is.

    Nothing waits for a copy. A slot that is overwritten gets new arrays, so reads of the old ones that are under way
    are not disturbed, and their memory goes when they are done; the store never holds more than the most slots ever
    used. A read of a slot whose copy has not landed is ordered behind it by the runtime. Only when STAGED pages are
    under way does the next one wait for the oldest: each of them takes device memory.

    Calls take effect in their order: a load sees what was saved before it.

    Attributes:
      verify: compare the CRC-32 of every page that is loaded with what it was; waits for the copies (tests).
    """

    def __init__(self, layout: Layout, page_bytes: Sequence[int], verify: bool = False):
        """page_bytes: of each group, see `ProgramCatalog.page_bytes`."""
        self.verify = verify
        self._page_bytes = tuple(page_bytes)
        self._device = layout.sharding(None, None, "kv_heads")
        self._host = self._device.with_memory_kind("pinned_host")
        self._slots: list[dict[int, KVPages]] = [{} for _ in page_bytes]
        self._sums: dict[tuple[int, int], int] = {}
        self._staged: deque[tuple[int, Any]] = deque()  # pages, and arrays that are ready once they have left
        self._staged_pages = 0
        self._watchers: dict[Direction, ThreadPoolExecutor] = {
            direction: ThreadPoolExecutor(1, f"pages-{direction}") for direction in ("out", "in")}
        self._ended = dict.fromkeys(self._watchers, 0.0)  # when the last copy of each direction had
        self._transfers: deque[Transfer] = deque()

    def save(self, moves: Sequence[PageOut], gather: Callable[[PageOut], KVPages]) -> int:
        """Starts copies to the host; returns bytes.

        Args:
          gather: starts to take a page from the pool: a block of one page on the devices.
        """
        total = 0
        for batch in itertools.batched(moves, STAGED // 2):
            self._make_room(len(batch))
            pages = [gather(move) for move in batch]
            began = time.perf_counter()
            landed = jax.device_put(pages, self._host)
            for move, page in zip(batch, landed, strict=True):
                self._slots[move.group][move.slot] = page
            if self.verify:
                self._sums.update({(m.group, m.slot): checksum(page) for m, page in zip(batch, pages, strict=True)})
            self._stage(len(batch), landed)
            total += self._watch("out", batch, began, pages, landed)
        return total

    def load(self, moves: Sequence[PageIn], scatter: Callable[[PageIn, KVPages], jax.Array]) -> int:
        """Starts copies to the devices and writes them to the pool; the slots keep what they hold. Returns bytes.

        Args:
          scatter: starts to write a block of one page to the pool; returns an array that is ready when it is done.

        Raises:
          JinferError: a slot was never written.
        """
        total = 0
        for batch in itertools.batched(moves, STAGED // 2):
            self._make_room(len(batch))
            sources = [self._page(move.group, move.slot) for move in batch]
            began = time.perf_counter()
            pages = jax.device_put(sources, self._device)
            if self.verify:
                for move, page in zip(batch, pages, strict=True):
                    assert checksum(page) == self._sums[move.group, move.slot], f"{move}: the page came back changed"
            done = [scatter(move, page) for move, page in zip(batch, pages, strict=True)]
            self._stage(len(batch), done)
            total += self._watch("in", batch, began, sources, pages)
        return total

    def transfers(self) -> list[Transfer]:
        """Copies that have ended since the last call."""
        found = []
        while self._transfers:
            found.append(self._transfers.popleft())
        return found

    def wait(self) -> None:
        """Returns when every copy has ended and is among `transfers` (tests, benchmarks)."""
        for watcher in self._watchers.values():
            watcher.submit(int).result()

    def close(self) -> None:
        """Waits for what is under way and frees the memory."""
        for watcher in self._watchers.values():
            watcher.shutdown()
        for array in jax.tree.leaves(self._slots):
            array.delete()
        self._slots = []
        self._staged.clear()

    def _page(self, group: int, slot: int) -> KVPages:
        page = self._slots[group].get(slot)
        if page is None:
            raise JinferError(f"host slot {slot} of page group {group} holds nothing")
        return page

    def _make_room(self, pages: int) -> None:
        staged = self._staged
        while staged and (self._staged_pages + pages > STAGED or _ready(staged[0][1])):
            count, arrays = staged.popleft()
            jax.block_until_ready(arrays)
            self._staged_pages -= count

    def _stage(self, pages: int, until: Any) -> None:
        self._staged.append((pages, until))
        self._staged_pages += pages

    def _watch(self, direction: Direction, moves: Sequence[PageOut] | Sequence[PageIn], began: float, sources: Any,
               targets: Any) -> int:
        """Has copies timed, by a thread that sleeps meanwhile; returns their bytes."""
        size = sum(self._page_bytes[move.group] for move in moves)

        def watch() -> None:
            start = max(began, self._ended[direction])
            if not _ready(sources):
                jax.block_until_ready(sources)
                start = time.perf_counter()
            jax.block_until_ready(targets)
            self._ended[direction] = time.perf_counter()
            self._transfers.append(Transfer(direction, size, self._ended[direction] - start))

        self._watchers[direction].submit(watch)
        return size


def checksum(page: Any) -> int:
    """CRC-32 of the bytes of a pytree of arrays, in order; waits for them."""
    total = 0
    for array in jax.device_get(jax.tree.leaves(page)):
        total = zlib.crc32(array.tobytes(), total)
    return total


def _ready(arrays: Any) -> bool:
    return all(x.is_ready() for x in jax.tree.leaves(arrays))
