"""OLMo 2 (arXiv 2501.00656): norms behind the sub-layers only, and over all heads of queries and of keys."""

from jinfer.config import LayerConfig, ModelConfig
from jinfer.models.attention import Attention
from jinfer.models.decoder import Block, Decoder, norms
from jinfer.models.mlp import GatedMLP
from jinfer.models.parameter import Precision
from jinfer.sharding import Layout


def olmo2(config: ModelConfig, layout: Layout, precision: Precision) -> Decoder:
    norm = norms(config)

    def block(layer: LayerConfig, name: str) -> Block:
        return Block(
            layout, attention=Attention(config, layout, precision, layer, f"{name}.self_attn"),
            mlp=GatedMLP(config, layout, precision, f"{name}.mlp"),
            after_attention=norm(f"{name}.post_attention_layernorm"),
            after_mlp=norm(f"{name}.post_feedforward_layernorm"))

    return Decoder(config, layout, precision, block)
