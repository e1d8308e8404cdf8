"""Sharing: what requests need not compute, because others have or are about to."""

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from jinfer.kv.node import Node
from jinfer.kv.prefix import PrefixIndex
from jinfer.kv.sizing import pages_for
from jinfer.scheduler.request import Request, Status


class Found(NamedTuple):
    """What a request need not compute.

    Attributes:
      start: positions that are there already, less than it has tokens.
      nodes: blocks of the prefix index. sibling: whose pages hold it, the partly filled last one too.
    """

    start: int = 0
    nodes: Sequence[Node] = ()
    sibling: Request | None = None


class Sharing:
    """Requests and the prefix index: what they find, what others may wait for, and what they publish.

    Attributes:
      index: full blocks by what is in them. step: number of the plan in the making.
    """

    def __init__(self, index: PrefixIndex):
        self.index = index
        self.page_size = index.page_size
        self.step = 0
        self._coming: dict[int, list[Request]] = {}  # blocks, and which active requests are about to compute them

    def first(self, g: int, position: int) -> int:
        """The first block of a page group that the query at a position sees."""
        window = self.index.pools[g].window
        return 0 if window is None else max(0, position - window + 1) // self.page_size

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
        """It should wait for what an active request is about to compute, and then find it.

        One that ranks behind it may be held up by others that do, so it waits for none of these.
        """
        if found.sibling is not None or request.given is not None or request.scores_prompt:
            return False
        if not request.outputs and any(
                other is not request and (other.status is Status.PREFILLING or other.ready == self.step)
                for other in request.siblings):
            return True
        following = found.start // self.page_size
        if following >= (request.length - 1) // self.page_size:
            return False
        return any(other.rank < request.rank for other in self._coming.get(request.keys[following], ()))

    def chain(self, request: Request) -> Sequence[Node] | None:
        """All full blocks of a prompt, if they are known."""
        blocks = len(request.prompt) // self.page_size
        self._hash(request, blocks)
        nodes = self.index.usable(request.keys[:blocks], request.extra)
        known = len(nodes) == blocks and self.index.confirm(nodes, self._packed(request, 0, blocks))
        return nodes if known else None

    def enter(self, request: Request, found: Found) -> None:
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
        if not request.service.cache:
            return
        if request.given is None and found.sibling is None and not request.scores_prompt:
            self.index.queried += request.length
            self.index.hit += found.start
        promised = request.length // size
        self._hash(request, promised)
        request.promised = max(promised, request.blocks)
        for key in request.keys[request.blocks:request.promised]:
            self._coming.setdefault(key, []).append(request)

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
                self._kept_promise(key, request)
        request.tip, request.blocks = tip, blocks

    def leave(self, request: Request) -> None:
        """A request publishes no more, and keeps no more promises."""
        assert request.tip is not None
        for i in range(request.blocks, request.promised):
            self._kept_promise(request.keys[i], request)
        self.index.leave(request.tip)
        request.tip = None
        request.blocks = request.promised = 0

    def forget(self, request: Request, begin: int) -> None:
        """A request has ended that kept what it computed to itself: nobody will look for it, from a block on."""
        self._hash(request, len(request.prompt) // self.page_size)  # a sibling may have computed it
        self.index.discard(request.keys, request.extra, begin)

    def check(self, active: Sequence[Request]) -> None:
        """Asserts what must hold of promises and the index. O(index)."""
        coming: dict[int, Counter[Request]] = {}
        for request in active:
            for key in request.keys[request.blocks:request.promised]:
                coming.setdefault(key, Counter())[request] += 1
        assert coming == {key: Counter(some) for key, some in self._coming.items()}, "a promise was forgotten"
        self.index.check(request.tip for request in active if request.tip is not None)

    def _forkable(self, other: Request, last: int) -> bool:
        """Another choice of the same prompt has all of it but the last token in its pages."""
        if other.status is not Status.RUNNING or other.ready >= self.step:
            return False
        blocks = pages_for(last, self.page_size)
        return all(all(pages[self.first(g, last):blocks]) for g, pages in enumerate(other.pages))

    def _kept_promise(self, key: int, request: Request) -> None:
        some = self._coming[key]
        some.remove(request)
        if not some:
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
