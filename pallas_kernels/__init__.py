"""Operations with one public function each and an implementation per platform. Imports nothing of jinfer.

Every operation works on the local shard of a mesh: callers wrap it in `jax.shard_map`.
"""

from pallas_kernels.kv_update.api import kv_update
from pallas_kernels.paged_attention.api import paged_attention

__all__ = ["kv_update", "paged_attention"]
