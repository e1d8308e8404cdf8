"""Decoder: embedding, blocks, norm and head; a family says what its blocks are made of."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jinfer.config import LayerConfig, ModelConfig
from jinfer.kv.groups import page_groups
from jinfer.models.context import KVPages, KVPools, LayerContext, StepContext
from jinfer.models.layers import Embedding, Linear, RMSNorm
from jinfer.models.parameter import Precision, padded_rows, plain
from jinfer.sharding import Layout


class Block(nnx.Module):
    """x + after(attention(before(x))), then the same with the feed-forward network; norms that are None are absent."""

    def __init__(self, layout: Layout, *, attention: Any, mlp: nnx.Module, before_attention: RMSNorm | None = None,
                 after_attention: RMSNorm | None = None, before_mlp: RMSNorm | None = None,
                 after_mlp: RMSNorm | None = None):
        self.attention, self.mlp, self.layout = attention, mlp, layout
        self.before_attention, self.after_attention = before_attention, after_attention
        self.before_mlp, self.after_mlp = before_mlp, after_mlp

    def __call__(self, x: jax.Array, cache: KVPages, layer: LayerContext, *,
                 decode: bool) -> tuple[jax.Array, KVPages]:
        """x: [T, D] -> ([T, D], cache)."""
        attended, cache = self.attention(apply(self.before_attention, x), cache, layer, decode=decode)
        x = self.layout.whole(x + apply(self.after_attention, attended))
        return self.layout.whole(x + apply(self.after_mlp, self.mlp(apply(self.before_mlp, x)))), cache


MakeBlock = Callable[[LayerConfig, str], Block]


class Decoder(nnx.Module):
    """A decoder-only transformer.

    Attributes:
      slots: page group and place within it of each layer. ropes: which rotary table each layer reads.
    """

    def __init__(self, config: ModelConfig, layout: Layout, precision: Precision,
                 block: MakeBlock, *, embedding_scale: float = 1.0, norm_offset: float = 0.0):
        """block: makes a layer of a kind from the tensors under a name. norm_offset: see RMSNorm."""
        shape, rows = (config.vocab_size, config.hidden_size), layout.padded_vocab(config)
        axes = ("vocab", None)
        self.embedding = Embedding(padded_rows("model.embed_tokens.weight", shape, rows, axes), precision)
        self.scale, self.soft_cap, self.layout = embedding_scale, config.final_soft_cap, layout
        kinds = config.layer_kinds
        self.blocks = nnx.List([block(kind, f"model.layers.{i}") for i, kind in enumerate(kinds)])
        self.norm = norms(config, norm_offset)("model.norm")
        head = padded_rows("lm_head.weight", shape, rows, axes)
        self.head = None if config.tie_embeddings else Linear(head, precision)
        groups = page_groups(kinds)
        self.group_layers = tuple(len(group.layers) for group in groups)
        self.slots = tuple(next((g, group.layers.index(i)) for g, group in enumerate(groups) if i in group.layers)
                           for i in range(config.num_layers))
        self.ropes = tuple(int(kind.local_rope) for kind in kinds)

    def __call__(self, tokens: jax.Array, kv: KVPools, step: StepContext, *,
                 decode: bool) -> tuple[jax.Array, KVPools]:
        """tokens: [T] int32; kv: one a page group -> (hidden [T, D] after the last norm, kv)."""
        x, pools = self.layout.whole(self.embedding(tokens)), list(kv)
        if self.scale != 1.0:
            x = x * jnp.asarray(self.scale, x.dtype)
        for block, (group, place), rope in zip(self.blocks, self.slots, self.ropes, strict=True):
            pages = pools[group].k.data.shape[0] // self.group_layers[group]
            layer = LayerContext(step.rotary[rope], step.page_tables[group], step.query_starts, step.kv_lengths,
                                 jnp.int32(place * pages))
            x, pools[group] = run_block(*nnx.split(block), x, pools[group], layer, decode=decode)
        return self.norm(x), tuple(pools)

    def logits(self, hidden: jax.Array) -> jax.Array:
        """hidden: [R, D] -> [R, V padded] float32."""
        logits = self.embedding.attend(hidden) if self.head is None else self.head.project(hidden)
        return logits if self.soft_cap is None else self.soft_cap * jnp.tanh(logits / self.soft_cap)


@functools.partial(jax.jit, static_argnums=0, static_argnames="decode")
def run_block(graph: nnx.GraphDef, weights: nnx.State, x: jax.Array, cache: KVPages, layer: LayerContext, *,
              decode: bool) -> tuple[jax.Array, KVPages]:
    """One block. Blocks of a kind have equal graphs, so all of them share one trace: L times faster to lower."""
    return nnx.merge(graph, weights)(x, cache, layer, decode=decode)


def norms(config: ModelConfig, offset: float = 0.0) -> Callable[[str], RMSNorm]:
    """Makes the norms [D] of a model from their checkpoint names; offset: see RMSNorm."""
    return lambda name: RMSNorm(plain(f"{name}.weight", (config.hidden_size,), (None,)), config.norm_eps, offset)


def apply(norm: RMSNorm | None, x: jax.Array) -> jax.Array:
    return x if norm is None else norm(x)
