"""Page accounting of the KV pool. Plain Python: nothing here imports JAX."""

from jinfer.kv.pool import PagePool
from jinfer.kv.sizing import pages_for, pool_pages

__all__ = ["PagePool", "pages_for", "pool_pages"]
