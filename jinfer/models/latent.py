"""Multi-head latent attention (arXiv 2405.04434, section 2.1): the cache holds one vector a token for all heads."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec

from jinfer.config import LayerConfig, ModelConfig
from jinfer.models.context import KVPages, LayerContext
from jinfer.models.layers import Linear, RMSNorm
from jinfer.models.parameter import Parameter, Precision, half_split, head_rows, plain
from jinfer.models.rope import rotate
from jinfer.sharding import Layout
from pallas_kernels import kv_update, paged_attention

NORM_EPS = 1e-6  # of the compressed queries and latents, whatever the model's norm_eps (transformers, DeepSeek)


class LatentAttention(nnx.Module):
    """Attention in the space of the latent, for prefill and decode alike.

    Keys and values of a head are projections of the latent c [R0], k = W_k c and v = W_v c. So q . k = (W_k^T q) . c:
    queries are projected instead of keys, and values after the sum over positions instead of before. What is
    cached is c and the rotated lanes all heads share; to the kernels it is one kv head of R0 + rope_dim lanes, whose
    first R0 are its value. K counts its copies: a device that has query heads has one.
    """

    def __init__(self, config: ModelConfig, layout: Layout, precision: Precision, layer: LayerConfig, name: str):
        latent, heads, model = config.latent, config.num_heads, config.hidden_size
        assert latent is not None
        self.sizes, self.heads = latent, heads
        self.scale = config.head_dim**-0.5 if config.query_scale is None else config.query_scale
        self.window, self.soft_cap, self.layout = layer.window, config.attention_soft_cap, layout

        def matrix(kind: str, shape: tuple[int, int], *, passed: int | None = None, cut: bool = False) -> Linear:
            """passed: lanes of a head before those that rotate. cut: rows are query heads."""
            weight = plain(f"{name}.{kind}.weight", shape, ("kv_heads" if cut else None, None))
            if passed is not None and config.rope.interleaved:
                weight = half_split(weight, passed, latent.rope_dim)
            return Linear(weight, precision)

        def norm(kind: str, width: int) -> RMSNorm:
            return RMSNorm(plain(f"{name}.{kind}.weight", (width,), (None,)), NORM_EPS)

        def up(first: int, lanes: int) -> nnx.Param[Parameter]:
            """[N, lanes, R0]: what makes keys or values; stored a head after the other, keys before values."""
            return nnx.Param(head_rows(
                f"{name}.kv_b_proj.weight", heads, latent.nope_dim + latent.value_dim, first, lanes, latent.kv_rank,
                precision.activation_dtype))

        queries = heads * (latent.nope_dim + latent.rope_dim)
        if latent.q_rank is None:
            self.q_down = self.q_norm = None
            self.q_up = matrix("q_proj", (queries, model), passed=latent.nope_dim, cut=True)
        else:  # NNX keeps an attribute that was ever None out of the weights
            self.q_down = matrix("q_a_proj", (latent.q_rank, model))
            self.q_norm = norm("q_a_layernorm", latent.q_rank)
            self.q_up = matrix("q_b_proj", (queries, latent.q_rank), passed=latent.nope_dim, cut=True)
        self.kv_down = matrix("kv_a_proj_with_mqa", (latent.kv_rank + latent.rope_dim, model), passed=latent.kv_rank)
        self.kv_norm = norm("kv_a_layernorm", latent.kv_rank)
        self.k_up, self.v_up = up(0, latent.nope_dim), up(latent.nope_dim, latent.value_dim)
        self.out = Linear(plain(f"{name}.o_proj.weight", (model, heads * latent.value_dim), (None, "kv_heads")),
                          precision, layout=layout)

    def __call__(self, x: jax.Array, cache: KVPages, layer: LayerContext, *,
                 decode: bool) -> tuple[jax.Array, KVPages]:
        """x: [T, D] -> ([T, D], cache with this call's latents written into the layer's pages)."""
        tokens, sizes = x.shape[0], self.sizes
        compressed = x if self.q_down is None or self.q_norm is None else self.q_norm(self.q_down(x))
        q = self.q_up(compressed).reshape(tokens, self.heads, -1)
        q_rope = rotate(q[:, :, sizes.nope_dim :], *layer.rotary)
        q_latent = _per_head("nth,nhr->ntr", q[:, :, : sizes.nope_dim], self.k_up[...])
        down = self.kv_down(x)
        latent = self.kv_norm(down[:, : sizes.kv_rank])
        k_rope = rotate(down[:, sizes.kv_rank :], *layer.rotary)
        attended, cache = self._attend(jnp.concatenate([q_latent, q_rope], axis=-1),
                                       jnp.concatenate([latent, k_rope], axis=-1), cache, layer, decode)
        values = _per_head("ntr,nhr->nth", attended, self.v_up[...])
        return self.out(values.reshape(tokens, -1)), cache

    def _attend(self, q: jax.Array, k: jax.Array, cache: KVPages, layer: LayerContext,
                decode: bool) -> tuple[jax.Array, KVPages]:
        """q [T, N, R0 + rope], k [T, R0 + rope] -> ([T, N, R0], cache): each device works on its own query heads."""
        options: Any = {"scale": self.scale, "window": self.window, "soft_cap": self.soft_cap,
                        "value_lanes": self.sizes.kv_rank}

        def local(q: jax.Array, k: jax.Array, cache: KVPages, layer: LayerContext) -> tuple[jax.Array, KVPages]:
            sequences = (layer.page_table, layer.query_starts, layer.kv_lengths)
            copies = jnp.broadcast_to(k[:, None], (k.shape[0], cache.k.data.shape[1], k.shape[1]))
            keys, _ = kv_update(cache.k, None, copies, None, *sequences, first_page=layer.first_page, decode=decode)
            out = paged_attention(q, keys, None, *sequences, first_page=layer.first_page, decode=decode, **options)
            return out, KVPages(keys, None)

        heads: Any = self.layout.spec(None, "kv_heads")
        whole: Any = PartitionSpec()
        sharded = jax.shard_map(
            local, mesh=self.layout.mesh, in_specs=(heads, whole, KVPages(heads, None), whole),
            out_specs=(heads, KVPages(heads, None)), check_vma=False)
        return sharded(q, k, cache, layer)


def _per_head(equation: str, x: jax.Array, weight: jax.Array) -> jax.Array:
    """A matrix for each head: x [T, N, .], weight [N, ., .] -> [T, N, .] in x's dtype.

    Heads lead in the product: XLA:CPU has none of bfloat16 with a batch that lies further in.
    """
    x, dtype = x.transpose(1, 0, 2), x.dtype
    y = jnp.einsum(equation, x.astype(weight.dtype), weight, preferred_element_type=jnp.float32)
    return y.astype(dtype).transpose(1, 0, 2)
