"""The prefix index on its own: what is found, what is evicted first, and where it goes."""

import pytest

from jinfer.kv import HostTier, PagePool
from jinfer.kv.prefix import TRIAL, PrefixIndex

SALT = ("", 0, None)


class Chain:
    """A request as the index sees it: publishes the blocks of its tokens, one page a group each, then lets go."""

    def __init__(self, index, tokens, extra=SALT, priority=0):
        self.index, self.extra, self.keys = index, extra, []
        self.blocks = index.pack(tokens)
        self.tip = index.enter(extra, [])
        key = index.root_key(extra)
        self.pages = [pool.allocate(len(self.blocks)) for pool in index.pools]
        for i, block in enumerate(self.blocks):
            key = index.next_key(key, block)
            self.keys.append(key)
            self.tip = index.publish(self.tip, key, block, [pages[i] for pages in self.pages], priority)

    def release(self):
        for pool, pages in zip(self.index.pools, self.pages, strict=True):
            pool.release(reversed(pages))
        self.index.leave(self.tip)

    def found(self, count=None):
        nodes = self.index.usable(self.keys[:count], self.extra)
        assert self.index.confirm(nodes, self.blocks[:len(nodes)])
        return nodes


def make(pages=8, page_size=2, windows=(None,), host=None):
    pools = [PagePool(pages + 1, page_size, window) for window in windows]
    tier = None if host is None else HostTier(host, [1] * len(pools))
    return PrefixIndex(pools, tier), pools


def check(index, *holders):
    index.check([chain.tip for chain in holders])
    for g, pool in enumerate(index.pools):
        pool.check([page for chain in holders for page in chain.pages[g]])


def test_what_begins_alike_is_found_as_far_as_it_is_alike():
    index, _ = make()
    first = Chain(index, [1, 2, 3, 4, 5, 6])
    assert [node.pages for node in first.found()] == [[1], [2], [3]]
    keys = [*first.keys[:2], index.next_key(first.keys[1], index.pack([5, 7])[0])]
    assert len(index.usable(keys, SALT)) == 2
    check(index, first)


@pytest.mark.parametrize("extra", [("a", 0, None), ("", 1, None), ("", 0, "r1")])
def test_salt_regime_and_owner_are_domains_of_their_own(extra):
    index, _ = make()
    Chain(index, [1, 2, 3, 4])
    other = Chain(index, [1, 2, 3, 4], extra)
    assert [node.pages for node in other.found()] == [[3], [4]]
    assert index.usable(other.keys, SALT) == []


def test_equal_hashes_of_other_tokens_are_no_hit(monkeypatch):
    monkeypatch.setattr(PrefixIndex, "next_key", staticmethod(lambda key, tokens: hash(key) % 1000 + 1))
    index, _ = make()
    first = Chain(index, [1, 2, 3, 4])
    second = Chain(index, [5, 6, 7, 8])  # the same hashes, in the same order
    assert first.keys == second.keys
    nodes = index.usable(second.keys, SALT)
    assert not index.confirm(nodes, second.blocks[:len(nodes)])
    check(index, first, second)
    second.release()
    check(index, first)
    assert index.pools[0].free == 6  # what nobody would find is free at once
    first.release()
    check(index)


def test_a_block_computed_twice_is_known_once_and_lacks_nothing():
    index, pools = make()
    first, second = Chain(index, [1, 2, 3, 4]), Chain(index, [1, 2, 3, 4])
    assert [node.pages for node in second.found()] == [[1], [2]]
    first.release()
    second.release()
    assert (pools[0].cached, pools[0].free) == (2, 6)
    check(index)


def test_eviction_takes_the_least_important_then_the_oldest_then_the_deepest():
    index, pools = make(pages=6)
    urgent, old, young = (Chain(index, [10 * i, 1, 2, 3], priority=p) for i, p in ((1, 0), (2, 5), (3, 5)))
    for chain in (urgent, old, young):
        chain.release()
    pool = pools[0]
    order = [pool.allocate(1)[0] for _ in range(6)]
    assert order == [pages[0] for pages in ([4], [3], [6], [5], [2], [1])]
    assert pool.evictions == 6
    assert len(index) == 0


@pytest.mark.parametrize("priority", [1, 3], ids=["better class", "young again"])
def test_a_hit_makes_pages_young_again_and_takes_the_better_class(priority):
    index, pools = make(pages=4)
    a, b = Chain(index, [1, 1, 1, 1], priority=3), Chain(index, [2, 2, 2, 2], priority=3)
    a.release()
    if priority == 3:
        b.release()
    nodes = a.found()
    pools[0].retain([node.pages[0] for node in nodes])
    for node in nodes:
        index.touch(node, priority)
    pools[0].release([node.pages[0] for node in reversed(nodes)])
    if priority == 1:
        b.release()  # last, but less important
    assert {pools[0].allocate(1)[0], pools[0].allocate(1)[0]} == {3, 4}
    assert len(a.found()) == 2
    assert b.found() == []



def test_pages_go_to_the_host_and_come_back_and_the_slot_keeps_them():
    index, pools = make(pages=2, host=10)
    chain = Chain(index, [1, 2, 3, 4])
    chain.release()
    taken = pools[0].allocate(2)
    assert [(out.page, out.slot) for out in index.outs] == [(2, 1), (1, 2)]
    assert chain.found() == []  # written in this step: nobody reads it before the next
    index.host.begin()
    nodes = chain.found()
    assert [node.slots for node in nodes] == [[2], [1]]
    pools[0].release(taken)
    (page,) = pools[0].allocate(1)
    index.hold(0, nodes[0])
    assert index.load(0, nodes[0], page) == (0, 2, page)
    assert nodes[0].slots == [2]
    pools[0].release([page])
    index.outs.clear()
    pools[0].allocate(2)  # evicted again, which moves nothing: the host has it
    assert index.outs == []
    index.check([])


def test_the_host_drops_what_was_longest_unused_but_not_what_the_step_uses():
    index, pools = make(pages=4, host=2)
    chain = Chain(index, [1, 2, 3, 4, 5, 6, 7, 8])
    chain.release()
    pools[0].release(pools[0].allocate(2))  # the last two blocks are in the host now, which is full
    index.host.begin()
    nodes = chain.found()
    assert [node.slots[0] for node in nodes] == [0, 0, 2, 1]
    index.hold(0, nodes[3])
    index.outs.clear()
    pools[0].allocate(4)  # block 1 takes the slot of block 2; block 0 finds both slots in use
    assert [(out.page, out.slot) for out in index.outs] == [(2, 2)]
    assert index.host.drops == 1
    assert index.host.used == 2
    index.check([])


def test_without_worth_nothing_goes_to_the_host():
    index, pools = make(pages=2, host=10)
    Chain(index, [1, 2, 3, 4]).release()
    index.worth = False
    pools[0].allocate(2)
    assert index.outs == []
    assert len(index) == 0


def test_windows_need_what_the_next_query_sees_only():
    index, pools = make(windows=(None, 3))
    chain = Chain(index, [1, 2, 3, 4, 5, 6, 7, 8])
    windowed = chain.pages[1]
    pools[1].release(windowed[:2])  # below the window of whoever goes on
    pools[1].allocate(pools[1].free + 2)  # and evicted
    assert len(chain.found()) == 4  # the query at 8 sees 6 and 7: block 3
    assert len(chain.found(3)) == 3
    assert len(chain.found(2)) == 0  # the query at 4 would see 2 and 3


def test_a_private_chain_is_forgotten_as_a_whole():
    index, pools = make(host=10)
    chain = Chain(index, [1, 2, 3, 4, 5, 6], ("", 0, "r1"))
    chain.release()
    pools[0].release(pools[0].allocate(6))  # the last block went to the host
    index.host.begin()
    index.discard(chain.keys, chain.extra, 0)
    assert (pools[0].free, pools[0].cached, index.host.used, len(index)) == (8, 0, 0, 0)
    check(index)


def test_without_worth_the_link_is_tried_now_and_then():
    """Else a few slow copies would switch the host tier off for good."""
    index, pools = make(pages=4, host=10**6)
    index.worth = False
    for i in range(TRIAL):
        Chain(index, [2 * i, 2 * i + 1] * 4).release()
    pools[0].allocate(4)
    assert len(index.outs) == 4
