"""gpt-oss (arXiv 2508.10925): attention sinks, biases everywhere, experts with a clamped gate."""

from jinfer.config import LayerConfig, ModelConfig
from jinfer.models.attention import Attention
from jinfer.models.decoder import Block, Decoder, norms
from jinfer.models.expert_names import ExpertNames
from jinfer.models.moe import Experts
from jinfer.models.parameter import Precision
from jinfer.sharding import Layout


def gpt_oss(config: ModelConfig, layout: Layout, precision: Precision) -> Decoder:
    norm = norms(config)

    def block(layer: LayerConfig, name: str) -> Block:
        names = ExpertNames(router=f"{name}.mlp.router", experts=f"{name}.mlp.experts", stacked=True)
        return Block(
            layout, attention=Attention(config, layout, precision, layer, f"{name}.self_attn"),
            mlp=Experts(config, layout, precision, names),
            before_attention=norm(f"{name}.input_layernorm"), before_mlp=norm(f"{name}.post_attention_layernorm"))

    return Decoder(config, layout, precision, block)
