"""Operations with one public function each and an implementation per platform. Imports nothing of jinfer.

Every operation works on the local shard of a mesh: callers wrap it in `jax.shard_map`.
"""

from pallas_kernels.flash_attention.api import flash_attention
from pallas_kernels.grouped_matmul.api import grouped_matmul
from pallas_kernels.kv_update.api import kv_update
from pallas_kernels.paged_attention.api import paged_attention
from pallas_kernels.pages import Pages

__all__ = ["Pages", "flash_attention", "grouped_matmul", "kv_update", "paged_attention"]
