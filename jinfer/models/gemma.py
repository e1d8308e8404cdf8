"""Gemma 1, 2 and 3 (arXiv 2403.08295, 2408.00118, 2503.19786).

All scale the embedding by sqrt(D) and store their norms' distance from one. Gemma 2 and 3 also normalise what a
sub-layer returns.
"""

from jinfer.config import LayerConfig, ModelConfig
from jinfer.models.attention import Attention
from jinfer.models.decoder import Block, Decoder, MakeBlock, norms
from jinfer.models.mlp import GatedMLP
from jinfer.models.parameter import Precision
from jinfer.sharding import Layout

OFFSET = 1.0  # of the norms


def gemma(config: ModelConfig, layout: Layout, precision: Precision) -> Decoder:
    norm = norms(config, OFFSET)

    def block(layer: LayerConfig, name: str) -> Block:
        return Block(
            layout, attention=Attention(config, layout, precision, layer, f"{name}.self_attn"),
            mlp=GatedMLP(config, layout, precision, f"{name}.mlp"),
            before_attention=norm(f"{name}.input_layernorm"), before_mlp=norm(f"{name}.post_attention_layernorm"))

    return _decoder(config, layout, precision, block)


def gemma2(config: ModelConfig, layout: Layout, precision: Precision) -> Decoder:
    """Gemma 2 and 3."""
    norm = norms(config, OFFSET)

    def block(layer: LayerConfig, name: str) -> Block:
        return Block(
            layout, attention=Attention(config, layout, precision, layer, f"{name}.self_attn", norm_offset=OFFSET),
            mlp=GatedMLP(config, layout, precision, f"{name}.mlp"),
            before_attention=norm(f"{name}.input_layernorm"),
            after_attention=norm(f"{name}.post_attention_layernorm"),
            before_mlp=norm(f"{name}.pre_feedforward_layernorm"), after_mlp=norm(f"{name}.post_feedforward_layernorm"))

    return _decoder(config, layout, precision, block)


def _decoder(config: ModelConfig, layout: Layout, precision: Precision, block: MakeBlock) -> Decoder:
    return Decoder(config, layout, precision, block, embedding_scale=config.hidden_size**0.5, norm_offset=OFFSET)
