"""Page accounting of the KV pool. Plain Python: nothing here imports JAX."""

from jinfer.kv.host import HostTier
from jinfer.kv.pool import PagePool
from jinfer.kv.sizing import Demand, pages_for, pages_touched, pool_pages, window_pages

__all__ = ["Demand", "HostTier", "PagePool", "pages_for", "pages_touched", "pool_pages", "window_pages"]
