"""Self-attention over paged KV, shared by all families."""

from typing import Any, NamedTuple

import jax
from flax import nnx
from jax.sharding import PartitionSpec

from jinfer.config import ModelConfig
from jinfer.models.layers import Linear
from jinfer.models.parameter import Parameter, Precision, grouped_heads, plain
from jinfer.models.rope import rotate
from jinfer.sharding import Layout
from pallas_kernels import Pages, kv_update, paged_attention


class StepContext(NamedTuple):
    """What every layer of a call needs to know about its T tokens and Q sequences.

    Attributes:
      cos, sin: [T, R/2] float32 rotary tables.
      page_table: [Q, M] int32. query_starts: [Q + 1] int32. kv_lengths: [Q] int32, this call's tokens included.
    """

    cos: jax.Array
    sin: jax.Array
    page_table: jax.Array
    query_starts: jax.Array
    kv_lengths: jax.Array


class KVPages(NamedTuple):
    """The pool: k, v of [L * P, K, S, H]; layer l owns the pages from l * P, the first of them its null page.

    One array for all layers, addressed by page and never sliced: two donated arguments a call instead of 2 L
    (docs/decisions.md).
    """

    k: Pages
    v: Pages


class Attention(nnx.Module):
    """Grouped-query attention (arXiv 2305.13245) with rotary positions. K counts physical kv heads."""

    def __init__(self, config: ModelConfig, layout: Layout, precision: Precision, name: str):
        heads, kv, width, model = config.num_heads, layout.kv_heads(config), config.head_dim, config.hidden_size
        self.kv_heads, self.group, self.width = kv, heads // kv, width
        self.window = config.layers[0].window
        self.layout = layout

        def fused(kind: str, tail: tuple[int, ...]) -> Parameter:
            return grouped_heads(*(f"{name}.{p}_proj.{kind}" for p in "qkv"), num_heads=heads,
                                 num_kv_heads=config.num_kv_heads, kv_heads=kv, head_dim=width, tail=tail)

        self.qkv = Linear(fused("weight", (model,)), precision,
                          bias=fused("bias", ()) if config.qkv_bias else None)
        # [D, K * G * H]: cut on K like the heads it multiplies, and a plain matrix to every compiler's layouts.
        self.out = Linear(plain(f"{name}.o_proj.weight", (model, heads * width), (None, "kv_heads")), precision,
                          layout=layout, bias=plain(f"{name}.o_proj.bias", (model,), (None,))
                          if config.o_bias else None)

    def __call__(self, x: jax.Array, cache: KVPages, first_page: jax.Array, step: StepContext, *,
                 decode: bool) -> tuple[jax.Array, KVPages]:
        """x: [T, D] -> ([T, D], cache with this call's keys and values written into the layer's pages)."""
        qkv = self.qkv(x).reshape(x.shape[0], self.kv_heads, self.group + 2, self.width)
        q = rotate(qkv[:, :, : self.group], step.cos, step.sin)
        k = rotate(qkv[:, :, self.group], step.cos, step.sin)
        attended, cache = self._attend(q, k, qkv[:, :, self.group + 1], cache, first_page, step, decode)
        return self.out(attended), cache

    def _attend(self, q: jax.Array, k: jax.Array, v: jax.Array, cache: KVPages, first_page: jax.Array,
                step: StepContext, decode: bool) -> tuple[jax.Array, KVPages]:
        """q [T, K, G, H], k and v [T, K, H] -> ([T, K, G, H], cache): each device works on its own kv heads."""
        scale = self.width**-0.5
        window = self.window

        def local(q: jax.Array, k: jax.Array, v: jax.Array, cache: KVPages, first_page: jax.Array,
                  step: StepContext) -> tuple[jax.Array, KVPages]:
            tokens, kv_heads, group, width = q.shape
            sequences = (step.page_table, step.query_starts, step.kv_lengths)
            cache = KVPages(*kv_update(*cache, k, v, *sequences, first_page=first_page, decode=decode))
            out = paged_attention(q.reshape(tokens, kv_heads * group, width), *cache, *sequences, scale=scale,
                                  window=window, first_page=first_page, decode=decode)
            return out.reshape(q.shape), cache

        heads: Any = self.layout.spec(None, "kv_heads")
        whole = PartitionSpec()
        sharded = jax.shard_map(
            local, mesh=self.layout.mesh, in_specs=(heads, heads, heads, KVPages(heads, heads), whole, whole),
            out_specs=(heads, KVPages(heads, heads)), check_vma=False)
        return sharded(q, k, v, cache, first_page, step)
