"""PrefixIndex: full pages by what is in them, so that requests which begin alike share them."""

from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from jinfer.kv.host import HostTier
from jinfer.kv.moves import PageIn, PageOut
from jinfer.kv.node import Extra, Node
from jinfer.kv.pool import PagePool

TRIAL = 256  # evicted pages of which one goes to the host tier although it is not worth it


class PrefixIndex:
    """A hash chain over full blocks, below a root for each tuple of extra keys. A hit is confirmed by comparing tokens,
    so that equal hashes cost a hit at worst.

    A block is published when the call that completes it is planned: whoever finds it is planned later, and the device
    runs calls in the order of dispatch. A node lives as long as it has a page, a slot or a child.

    A block can be used where every page group has what the next query sees: a group that sees everything needs all
    blocks of the chain, one with a window those the window reaches.

    Attributes:
      outs: pages on their way to the host tier, for the plan in the making. host: the tier, if there is one.
      worth: loading pages is cheaper than computing them; else the host keeps none, but for a trial now and then.
      queried, hit, host_hit: tokens looked up on admission, found, and found in part in the host tier only; of requests
        that use the cache.
    """

    def __init__(self, pools: Sequence[PagePool], host: HostTier | None = None):
        self.pools = tuple(pools)
        self.page_size = pools[0].page_size
        self.host = host
        self.outs: list[PageOut] = []
        self.worth = True
        self._unkept = 0  # pages since the last trial
        self.queried = self.hit = self.host_hit = 0
        self._windows = [(g, pool.window) for g, pool in enumerate(self.pools) if pool.window is not None]
        self._whole = [g for g, pool in enumerate(self.pools) if pool.window is None]
        self._nodes: dict[int, Node] = {}
        self._roots: dict[Extra, Node] = {}
        for g, pool in enumerate(self.pools):
            pool.on_evict = self._evicting(g)

    def __len__(self) -> int:
        return len(self._nodes)

    def pack(self, tokens: Sequence[int]) -> list[bytes]:
        """Tokens of whole blocks as nodes hold them."""
        data, width = array("i", tokens).tobytes(), 4 * self.page_size
        return [data[start:start + width] for start in range(0, len(data), width)]

    @staticmethod
    def root_key(extra: Extra) -> int:
        return hash(("root", extra))

    @staticmethod
    def next_key(key: int, tokens: bytes) -> int:
        return hash((key, tokens))

    def usable(self, keys: Sequence[int], extra: Extra) -> list[Node]:
        """The longest chain with these keys that a request can go on behind; `confirm` it before it is used."""
        nodes: list[Node] = []
        parent, known = self._roots.get(extra), self._nodes
        for key in keys:
            node = known.get(key)
            if node is None or node.parent is not parent:
                break
            if not all(node.pages) and not all(self._has(node, g) for g in self._whole):  # mostly all pages are there
                break
            nodes.append(node)
            parent = node
        if self._windows and nodes:
            del nodes[self._fitting(nodes):]
        return nodes

    @staticmethod
    def confirm(nodes: Sequence[Node], blocks: Iterable[bytes]) -> bool:
        """They hold the tokens of these blocks."""
        return all(node.tokens == tokens for node, tokens in zip(nodes, blocks, strict=True))

    def hold(self, g: int, node: Node) -> None:
        """What the host tier has of the node is wanted in this plan."""
        assert self.host is not None
        self.host.read(g, node.slots[g])

    def load(self, g: int, node: Node, page: int) -> PageIn:
        """The node's block comes back from the host tier into a page that is held by whoever asked."""
        self.pools[g].own(page, node)
        node.pages[g] = page
        return PageIn(g, node.slots[g], page)

    def touch(self, node: Node, priority: int) -> None:
        """A request of that class uses the node."""
        node.priority = min(node.priority, priority)

    def enter(self, extra: Extra, nodes: Sequence[Node]) -> Node:
        """The node behind which a request publishes its next block: the last of these, or the root."""
        if nodes:
            tip = nodes[-1]
        else:
            root = self._roots.get(extra)
            if root is None:
                root = self._roots[extra] = Node(self.root_key(extra), None, b"", len(self.pools), extra)
            tip = root
        tip.users += 1
        return tip

    def leave(self, tip: Node) -> None:
        """A request publishes nothing more behind this node."""
        tip.users -= 1
        self._trim(tip)

    def publish(self, parent: Node, key: int, tokens: bytes, pages: Sequence[int], priority: int) -> Node:
        """Makes known the block behind the one a request was at; it is at the new one then, which is returned.

        If the block is known already it gets only what it lacks; the other pages stay their holder's alone.

        Args:
          pages: of each group, held by the caller; 0 for one given back already.
        """
        node = self._nodes.get(key)
        if node is None or node.parent is not parent or node.tokens != tokens:
            reachable = parent.parent is None or self._nodes.get(parent.key) is parent
            taken = node is not None  # by another block of that hash
            node = Node(key, parent, tokens, len(self.pools))
            node.priority = priority
            parent.users += 1
            if reachable and not taken:  # else it stays unknown, and so does what follows it
                self._nodes[key] = node
        node.priority = min(node.priority, priority)
        known = self._nodes.get(key) is node
        for g, page in enumerate(pages):
            if known and page and not node.pages[g]:
                node.pages[g] = page
                self.pools[g].own(page, node)
        node.users += 1
        self.leave(parent)
        return node

    def discard(self, keys: Sequence[int], extra: Extra, begin: int) -> None:
        """Forgets a chain that only its owner could find, from a block on, whatever is left of it."""
        nodes: list[Node] = []
        parent = self._roots.get(extra)
        for key in keys:
            node = self._nodes.get(key)
            if node is None or node.parent is not parent:
                break
            nodes.append(node)
            parent = node
        for node in reversed(nodes[begin:]):
            for g, page in enumerate(node.pages):
                if page:
                    self.pools[g].disown(page)
                    node.pages[g] = 0
                if node.slots[g]:
                    self._drop_slot(g, node)
            self._trim(node)

    def check(self, tips: Iterable[Node]) -> None:
        """Asserts that nodes, pages and slots agree; tips: where requests are. O(index)."""
        tips = list(tips)
        users = Counter(map(id, tips))
        for key, node in self._nodes.items():
            assert node.key == key
            assert any(node.pages) or any(node.slots) or node.users, "a node without anything"
            users[id(node.parent)] += 1
            for g, page in enumerate(node.pages):
                assert not page or self.pools[g].owner(page) is node, "a page of a node is not its own"
        unknown = {id(node): node for node in self._unknown(tips)}
        users.update(id(node.parent) for node in unknown.values())
        for node in [*self._nodes.values(), *self._roots.values(), *unknown.values()]:
            assert node.users == users[id(node)], "users lost or invented"
        for g, pool in enumerate(self.pools):
            named = sum(1 for node in self._nodes.values() if node.pages[g])
            assert named == pool.owned, "a page is published by nobody"
        if self.host is not None:
            self.host.check(list(self._nodes.values()))

    def _unknown(self, tips: Iterable[Node]) -> Iterable[Node]:
        """Nodes at or above the tips that are no part of the index: blocks whose hash was taken."""
        for tip in tips:
            node = tip
            while node.parent is not None and self._nodes.get(node.key) is not node:
                yield node
                node = node.parent

    def _has(self, node: Node, g: int) -> bool:
        """The block can be used: it is in the pool, or in the host tier and cheaper to load than to compute."""
        return node.pages[g] > 0 or (self.host is not None and self.worth and self.host.readable(g, node.slots[g]))

    def _fitting(self, nodes: Sequence[Node]) -> int:
        """How many of these blocks a request can go on behind, as far as windows are concerned."""
        size, fitting = self.page_size, 0
        holes = [0] * len(self._windows)  # behind the last block that lacks the group's page
        for count, node in enumerate(nodes, 1):
            fits = True
            for i, (g, window) in enumerate(self._windows):
                if not self._has(node, g):
                    holes[i] = count
                fits = fits and max(0, count * size - window + 1) // size >= holes[i]
            if fits:
                fitting = count
        return fitting

    def _evicting(self, g: int) -> Callable[[int, Node], None]:
        """What the pool of a group calls just before it hands out a cached page."""

        def evict(page: int, node: Node) -> None:
            node.pages[g] = 0
            host = self.host
            if host is not None and not node.slots[g] and (self.worth or self._tries()):
                slot, losers = host.keep(g, node)
                if slot:
                    node.slots[g] = slot
                    self.outs.append(PageOut(g, page, slot))
                for loser in losers:
                    self._trim(loser)
            self._trim(node)

        return evict

    def _tries(self) -> bool:
        """Now and then a page is kept although it is not worth it, for else nothing would measure the link again."""
        self._unkept = (self._unkept + 1) % TRIAL
        return not self._unkept

    def _drop_slot(self, g: int, node: Node) -> None:
        assert self.host is not None
        self.host.drop(g, node.slots[g])
        node.slots[g] = 0

    def _trim(self, node: Node) -> None:
        """Forgets nodes that have nothing, upwards."""
        while not (node.users or node.dropped or any(node.pages) or any(node.slots)):
            node.dropped = True
            parent = node.parent
            if parent is None:
                del self._roots[node.extra]
                return
            if self._nodes.get(node.key) is node:
                del self._nodes[node.key]
            parent.users -= 1
            node = parent
