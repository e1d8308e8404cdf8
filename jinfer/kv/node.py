"""Node: a block of tokens in the prefix index, and where its KV is."""

from collections.abc import Hashable

Extra = tuple[Hashable, ...]  # what else must be equal: salt, adapter, ..; the root of a chain


class Node:
    """A block of S tokens behind its parent's, and where its KV is.

    Attributes:
      key: hash of the chain up to here. tokens: S int32, packed; empty for a root.
      depth: blocks of the chain, this one included. users: nodes that name this one as parent, and requests that will
        publish the next one.
      pages: of each page group, 0 where the pool has none. slots: of the host tier, 0 likewise.
      dropped: it had nothing left and is out of the index for good.
      priority: the most important class that has used it.
    """

    __slots__ = ("depth", "dropped", "extra", "key", "pages", "parent", "priority", "slots", "tokens", "users")

    def __init__(self, key: int, parent: "Node | None", tokens: bytes, groups: int, extra: Extra = ()):
        self.key = key
        self.parent = parent
        self.tokens = tokens
        self.extra = extra
        self.depth: int = 0 if parent is None else parent.depth + 1
        self.pages = [0] * groups
        self.slots = [0] * groups
        self.users = 0
        self.dropped = False
        self.priority = 0
