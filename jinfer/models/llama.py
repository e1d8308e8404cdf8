"""Llama 2 and 3, and what is Llama with other options: Mistral, SmolLM2, Qwen2 (biases), Qwen3 (norms of q and k)."""

from jinfer.config import LayerConfig, ModelConfig
from jinfer.models.attention import Attention
from jinfer.models.decoder import Block, Decoder, norms
from jinfer.models.mlp import GatedMLP
from jinfer.models.parameter import Precision
from jinfer.sharding import Layout


def llama(config: ModelConfig, layout: Layout, precision: Precision) -> Decoder:
    norm = norms(config)

    def block(layer: LayerConfig, name: str) -> Block:
        return Block(
            layout, attention=Attention(config, layout, precision, layer, f"{name}.self_attn"),
            mlp=GatedMLP(config, layout, precision, f"{name}.mlp"),
            before_attention=norm(f"{name}.input_layernorm"), before_mlp=norm(f"{name}.post_attention_layernorm"))

    return Decoder(config, layout, precision, block)
