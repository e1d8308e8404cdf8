"""PagePool against a model of it, and its refusals."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from jinfer.kv import PagePool


class PoolMachine(RuleBasedStateMachine):
    """Random allocations, shares and releases; `owners` lists the references that exist."""

    @initialize(num_pages=st.integers(2, 24))
    def start(self, num_pages):
        self.pool = PagePool(num_pages, page_size=4)
        self.owners: list[list[int]] = []
        self.peak = 0

    @rule(n=st.integers(0, 12))
    def allocate(self, n):
        free = self.pool.free
        pages = self.pool.allocate(n)
        if n > free:
            assert pages is None
            assert self.pool.free == free
            return
        assert len(pages) == n == free - self.pool.free
        taken = {page for owner in self.owners for page in owner}
        assert not taken & set(pages)
        self.owners.append(pages)
        self.peak = max(self.peak, self.pool.held)

    @rule(data=st.data())
    def share(self, data):
        if self.owners:
            pages = list(data.draw(st.sampled_from(self.owners)))
            self.pool.retain(pages)
            self.owners.append(pages)

    @rule(data=st.data())
    def release(self, data):
        if self.owners:
            self.pool.release(self.owners.pop(data.draw(st.integers(0, len(self.owners) - 1))))

    @invariant()
    def accounts(self):
        if hasattr(self, "pool"):
            self.pool.check(page for owner in self.owners for page in owner)
            assert self.pool.free + self.pool.held == self.pool.num_pages - 1
            assert self.pool.peak == self.peak


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=40, stateful_step_count=50, deadline=None, derandomize=True)


def test_double_free_raises():
    pool = PagePool(4, 16)
    pages = pool.allocate(2)
    pool.release(pages)
    for bad in (pages[:1], [0], [4], [-1]):
        with pytest.raises(ValueError, match="not held"):
            pool.release(bad)
        with pytest.raises(ValueError, match="not held"):
            pool.retain(bad)
    pool.check([])


def test_shared_page_is_freed_by_its_last_reference():
    pool = PagePool(3, 16)
    (page,) = pool.allocate(1)
    pool.retain([page])
    pool.release([page])
    assert pool.held == 1
    pool.check([page])
    pool.release([page])
    assert pool.held == 0
    with pytest.raises(ValueError, match="not held"):
        pool.release([page, page])


def test_check_sees_a_lost_reference():
    pool = PagePool(4, 16)
    pages = pool.allocate(2)
    with pytest.raises(AssertionError, match="reference counts"):
        pool.check(pages[:1])
    with pytest.raises(AssertionError, match="reference counts"):
        pool.check([*pages, pages[0]])


@pytest.mark.parametrize(("num_pages", "page_size"), [(1, 16), (0, 16), (4, 0)])
def test_pool_without_pages_is_refused(num_pages, page_size):
    with pytest.raises(ValueError, match="pool needs"):
        PagePool(num_pages, page_size)


def test_negative_allocation_is_refused():
    with pytest.raises(ValueError, match="-1"):
        PagePool(4, 16).allocate(-1)
