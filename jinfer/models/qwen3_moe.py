"""Qwen3-MoE (arXiv 2505.09388): Qwen3 with experts in all layers that are not said to be dense."""

from jinfer.config import LayerConfig, ModelConfig
from jinfer.models.attention import Attention
from jinfer.models.decoder import Block, Decoder, norms
from jinfer.models.expert_names import ExpertNames
from jinfer.models.mlp import GatedMLP
from jinfer.models.moe import Experts
from jinfer.models.parameter import Precision
from jinfer.sharding import Layout


def qwen3_moe(config: ModelConfig, layout: Layout, precision: Precision) -> Decoder:
    norm = norms(config)

    def block(layer: LayerConfig, name: str) -> Block:
        mlp = f"{name}.mlp"
        if layer.dense or config.experts is None:
            network: GatedMLP | Experts = GatedMLP(config, layout, precision, mlp)
        else:
            network = Experts(config, layout, precision, ExpertNames(router=f"{mlp}.gate", experts=f"{mlp}.experts"))
        return Block(
            layout, attention=Attention(config, layout, precision, layer, f"{name}.self_attn"), mlp=network,
            before_attention=norm(f"{name}.input_layernorm"), before_mlp=norm(f"{name}.post_attention_layernorm"))

    return Decoder(config, layout, precision, block)
