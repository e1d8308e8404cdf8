"""Mixtral (arXiv 2401.04088): Llama with experts in the place of the feed-forward network."""

from jinfer.config import LayerConfig, ModelConfig
from jinfer.models.attention import Attention
from jinfer.models.decoder import Block, Decoder, norms
from jinfer.models.expert_names import ExpertNames
from jinfer.models.moe import Experts
from jinfer.models.parameter import Precision
from jinfer.sharding import Layout


def mixtral(config: ModelConfig, layout: Layout, precision: Precision) -> Decoder:
    norm = norms(config)

    def block(layer: LayerConfig, name: str) -> Block:
        moe = f"{name}.block_sparse_moe"
        names = ExpertNames(router=f"{moe}.gate", experts=f"{moe}.experts", projections=("w1", "w3", "w2"))
        return Block(
            layout, attention=Attention(config, layout, precision, layer, f"{name}.self_attn"),
            mlp=Experts(config, layout, precision, names),
            before_attention=norm(f"{name}.input_layernorm"), before_mlp=norm(f"{name}.post_attention_layernorm"))

    return Decoder(config, layout, precision, block)
