"""HostTier: which slots of host memory keep pages that the pool had no room for."""

from collections import OrderedDict
from collections.abc import Sequence

from jinfer.kv.node import Node


class HostTier:
    """Slots 1, 2, .. of each page group, within one budget of bytes; a full tier drops what was used longest ago.

    Within a step nothing is read from a slot that the step writes, nor is a slot written that it reads: copies of a
    step may run in any order.

    Attributes:
      budget, used: bytes. page_bytes: of a page of each group, on all devices together.
      most: slots ever in use at once, of each group. drops: pages dropped for lack of room.
    """

    def __init__(self, budget: int, page_bytes: Sequence[int]):
        self.budget = budget
        self.page_bytes = tuple(page_bytes)
        self.used = 0
        self.drops = 0
        self.most = [0] * len(self.page_bytes)
        self._free: list[list[int]] = [[] for _ in self.page_bytes]
        self._kept: OrderedDict[tuple[int, int], Node] = OrderedDict()  # longest unused first
        self._reading: set[tuple[int, int]] = set()
        self._written: set[tuple[int, int]] = set()

    def begin(self) -> None:
        """A new step."""
        self._reading.clear()
        self._written.clear()

    def readable(self, group: int, slot: int) -> bool:
        """Something is in the slot, and not only since this step."""
        return slot > 0 and (group, slot) not in self._written

    def read(self, group: int, slot: int) -> None:
        """This step reads the slot: it is kept for the step, and was just used."""
        self._reading.add((group, slot))
        self._kept.move_to_end((group, slot))

    def keep(self, group: int, node: Node) -> tuple[int, list[Node]]:
        """A slot for a page of the node, or 0 if there is no room; and the nodes that have lost a slot for it."""
        size = self.page_bytes[group]
        lost: list[Node] = []
        while self.used + size > self.budget:
            oldest = next(iter(self._kept), None)
            if oldest is None or oldest in self._reading or oldest in self._written:
                return 0, lost
            loser = self._kept[oldest]
            self.drop(*oldest)
            loser.slots[oldest[0]] = 0
            self.drops += 1
            lost.append(loser)
        free = self._free[group]
        if free:
            slot = free.pop()
        else:
            self.most[group] += 1
            slot = self.most[group]
        self.used += size
        self._kept[group, slot] = node
        self._written.add((group, slot))
        return slot, lost

    def drop(self, group: int, slot: int) -> None:
        """Nobody needs what is in the slot. Never one that the plan in the making reads or writes."""
        del self._kept[group, slot]
        self.used -= self.page_bytes[group]
        self._free[group].append(slot)

    def check(self, nodes: Sequence[Node]) -> None:
        """Asserts that slots and the nodes that have any agree."""
        named = {(g, slot): node for node in nodes for g, slot in enumerate(node.slots) if slot}
        assert named.keys() == self._kept.keys()
        assert all(named[key] is node for key, node in self._kept.items())
        assert self.used == sum(self.page_bytes[g] for g, _ in self._kept) <= self.budget
        for g, free in enumerate(self._free):
            kept = [slot for group, slot in self._kept if group == g]
            assert sorted(free + kept) == [*range(1, self.most[g] + 1)]
