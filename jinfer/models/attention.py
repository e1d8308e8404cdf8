"""Self-attention over paged KV, shared by all families but those whose keys and values are latent."""

from typing import Any

import jax
from flax import nnx
from jax.sharding import PartitionSpec

from jinfer.config import LayerConfig, ModelConfig
from jinfer.models.context import KVPages, LayerContext
from jinfer.models.layers import Linear, RMSNorm
from jinfer.models.parameter import Parameter, Precision, Rows, grouped_heads, plain, repeated_heads
from jinfer.models.rope import rotate
from jinfer.sharding import Layout
from pallas_kernels import kv_update, paged_attention


class Attention(nnx.Module):
    """Grouped-query attention (arXiv 2305.13245) with rotary positions. K counts physical kv heads."""

    def __init__(self, config: ModelConfig, layout: Layout, precision: Precision, layer: LayerConfig, name: str, *,
                 fused: bool = False, norm_offset: float = 0.0):
        """fused: the checkpoint holds the input projections as one. norm_offset: see RMSNorm."""
        heads, kv, width, model = config.num_heads, layout.kv_heads(config), config.head_dim, config.hidden_size
        self.kv_heads, self.group, self.width = kv, heads // kv, width
        self.scale = width**-0.5 if config.query_scale is None else config.query_scale
        self.window, self.soft_cap = layer.window, config.attention_soft_cap
        self.layout = layout

        def inputs(kind: str, tail: tuple[int, ...]) -> Parameter:
            sizes = [heads * width, config.num_kv_heads * width, config.num_kv_heads * width]
            if fused:
                total = sum(sizes)
                parts = [Rows(f"{name}.qkv_proj.{kind}", first, total) for first in (0, sizes[0], sizes[0] + sizes[1])]
            else:
                parts = [Rows(f"{name}.{p}_proj.{kind}", 0, size) for p, size in zip("qkv", sizes, strict=True)]
            return grouped_heads(*parts, num_heads=heads, num_kv_heads=config.num_kv_heads, kv_heads=kv,
                                 head_dim=width, tail=tail)

        self.qkv = Linear(inputs("weight", (model,)), precision,
                          bias=inputs("bias", ()) if config.qkv_bias else None)
        # [D, K * G * H]: cut on K like the heads it multiplies, and a plain matrix to every compiler's layouts.
        self.out = Linear(plain(f"{name}.o_proj.weight", (model, heads * width), (None, "kv_heads")), precision,
                          layout=layout, bias=plain(f"{name}.o_proj.bias", (model,), (None,))
                          if config.o_bias else None)

        def norm(part: str, count: int, physical: int, group: int) -> RMSNorm | None:
            weight = f"{name}.{part}_norm.weight"
            match config.qk_norm:
                case None:
                    return None
                case "head":
                    return RMSNorm(plain(weight, (width,), (None,)), config.norm_eps, norm_offset)
                case "all":
                    return RMSNorm(repeated_heads(weight, count, physical, group, width), config.norm_eps, norm_offset)

        self.q_norm, self.k_norm = norm("q", heads, kv, self.group), norm("k", config.num_kv_heads, kv, 1)
        self.norm_axes = (1, 2, 3) if config.qk_norm == "all" else (-1,)
        self.sinks = nnx.Param(plain(f"{name}.sinks", (heads,), ("kv_heads",))) if config.sinks else None

    def __call__(self, x: jax.Array, cache: KVPages, layer: LayerContext, *,
                 decode: bool) -> tuple[jax.Array, KVPages]:
        """x: [T, D] -> ([T, D], cache with this call's keys and values written into the layer's pages)."""
        qkv = self.qkv(x).reshape(x.shape[0], self.kv_heads, self.group + 2, self.width)
        q, k, v = qkv[:, :, : self.group], qkv[:, :, self.group : self.group + 1], qkv[:, :, self.group + 1]
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q, self.norm_axes), self.k_norm(k, self.norm_axes)
        q, k = rotate(q, *layer.rotary), rotate(k, *layer.rotary)[:, :, 0]
        attended, cache = self._attend(q, k, v, cache, layer, decode)
        return self.out(attended), cache

    def _attend(self, q: jax.Array, k: jax.Array, v: jax.Array, cache: KVPages, layer: LayerContext,
                decode: bool) -> tuple[jax.Array, KVPages]:
        """q [T, K, G, H], k and v [T, K, H] -> ([T, K, G, H], cache): each device works on its own kv heads."""
        options: Any = {"scale": self.scale, "window": self.window, "soft_cap": self.soft_cap}

        def local(q: jax.Array, k: jax.Array, v: jax.Array, sinks: jax.Array | None, cache: KVPages,
                  layer: LayerContext) -> tuple[jax.Array, KVPages]:
            tokens, kv_heads, group, width = q.shape
            sequences = (layer.page_table, layer.query_starts, layer.kv_lengths)
            assert cache.v is not None
            keys, values = kv_update(cache.k, cache.v, k, v, *sequences, first_page=layer.first_page, decode=decode)
            out = paged_attention(q.reshape(tokens, kv_heads * group, width), keys, values, *sequences, sinks=sinks,
                                  first_page=layer.first_page, decode=decode, **options)
            return out.reshape(q.shape), KVPages(keys, values)

        heads: Any = self.layout.spec(None, "kv_heads")
        whole = PartitionSpec()
        sinks = None if self.sinks is None else self.sinks[...]
        sharded = jax.shard_map(
            local, mesh=self.layout.mesh,
            in_specs=(heads, heads, heads, self.layout.spec("kv_heads"), KVPages(heads, heads), whole),
            out_specs=(heads, KVPages(heads, heads)), check_vma=False)
        return sharded(q, k, v, sinks, cache, layer)
