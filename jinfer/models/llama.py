"""Llama and what shares its shape: Llama 2 and 3, Mistral, SmolLM2."""

import functools

import jax
import jax.numpy as jnp
from flax import nnx

from jinfer.config import ModelConfig
from jinfer.models.attention import Attention, KVPages, StepContext
from jinfer.models.layers import Embedding, Linear, RMSNorm
from jinfer.models.mlp import GatedMLP
from jinfer.models.parameter import Precision, padded_rows, plain
from jinfer.sharding import Layout


class Block(nnx.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: ModelConfig, layout: Layout, precision: Precision, name: str):
        def norm(kind: str) -> RMSNorm:
            return RMSNorm(plain(f"{name}.{kind}.weight", (config.hidden_size,), (None,)), config.norm_eps)

        self.attention_norm = norm("input_layernorm")
        self.attention = Attention(config, layout, precision, f"{name}.self_attn")
        self.mlp_norm = norm("post_attention_layernorm")
        self.mlp = GatedMLP(config, layout, precision, f"{name}.mlp")
        self.layout = layout

    def __call__(self, x: jax.Array, cache: KVPages, first_page: jax.Array, step: StepContext, *,
                 decode: bool) -> tuple[jax.Array, KVPages]:
        attended, cache = self.attention(self.attention_norm(x), cache, first_page, step, decode=decode)
        x = self.layout.whole(x + attended)
        return self.layout.whole(x + self.mlp(self.mlp_norm(x))), cache


class Llama(nnx.Module):
    def __init__(self, config: ModelConfig, layout: Layout, precision: Precision):
        shape, rows = (config.vocab_size, config.hidden_size), layout.padded_vocab(config)
        axes = ("vocab", None)
        self.embedding = Embedding(padded_rows("model.embed_tokens.weight", shape, rows, axes), precision)
        self.blocks = nnx.List([
            Block(config, layout, precision, f"model.layers.{i}") for i in range(config.num_layers)])
        self.layout = layout
        self.norm = RMSNorm(plain("model.norm.weight", (config.hidden_size,), (None,)), config.norm_eps)
        head = padded_rows("lm_head.weight", shape, rows, axes)
        self.head = None if config.tie_embeddings else Linear(head, precision)

    def __call__(self, tokens: jax.Array, kv: KVPages, step: StepContext, *,
                 decode: bool) -> tuple[jax.Array, KVPages]:
        """tokens: [T] int32 -> (hidden [T, D] after the last norm, kv)."""
        x, pages = self.layout.whole(self.embedding(tokens)), kv.k.data.shape[0] // len(self.blocks)
        for layer, block in enumerate(self.blocks):
            x, kv = run_block(*nnx.split(block), x, kv, jnp.int32(layer * pages), step, decode=decode)
        return self.norm(x), kv

    def logits(self, hidden: jax.Array) -> jax.Array:
        """hidden: [R, D] -> [R, V padded] float32."""
        return self.embedding.attend(hidden) if self.head is None else self.head.project(hidden)


@functools.partial(jax.jit, static_argnums=0, static_argnames="decode")
def run_block(graph: nnx.GraphDef, weights: nnx.State, x: jax.Array, cache: KVPages, first_page: jax.Array,
              step: StepContext, *, decode: bool) -> tuple[jax.Array, KVPages]:
    """One block. Blocks have equal graphs, so all of them share one trace: L times faster to lower."""
    return nnx.merge(graph, weights)(x, cache, first_page, step, decode=decode)
