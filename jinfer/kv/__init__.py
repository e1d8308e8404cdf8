"""Page accounting of the KV pool. Plain Python: nothing here imports JAX."""

from jinfer.kv.pool import PagePool
from jinfer.kv.sizing import kv_bytes_per_token, pages_for, pool_pages

__all__ = ["PagePool", "kv_bytes_per_token", "pages_for", "pool_pages"]
