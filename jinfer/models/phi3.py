"""Phi-3 and Phi-4 (arXiv 2404.14219): Llama with fused projections; part of a head's lanes may rotate."""

from jinfer.config import LayerConfig, ModelConfig
from jinfer.models.attention import Attention
from jinfer.models.decoder import Block, Decoder, norms
from jinfer.models.mlp import GatedMLP
from jinfer.models.parameter import Precision
from jinfer.sharding import Layout


def phi3(config: ModelConfig, layout: Layout, precision: Precision) -> Decoder:
    norm = norms(config)

    def block(layer: LayerConfig, name: str) -> Block:
        return Block(
            layout, attention=Attention(config, layout, precision, layer, f"{name}.self_attn", fused=True),
            mlp=GatedMLP(config, layout, precision, f"{name}.mlp", fused=True),
            before_attention=norm(f"{name}.input_layernorm"), before_mlp=norm(f"{name}.post_attention_layernorm"))

    return Decoder(config, layout, precision, block)
