"""DeepSeek-V2 and V3 (arXiv 2405.04434, 2412.19437): latent attention; experts behind a few dense layers."""

from jinfer.config import LayerConfig, ModelConfig
from jinfer.models.decoder import Block, Decoder, norms
from jinfer.models.expert_names import ExpertNames
from jinfer.models.latent import LatentAttention
from jinfer.models.mlp import GatedMLP
from jinfer.models.moe import Experts
from jinfer.models.parameter import Precision
from jinfer.sharding import Layout


def deepseek(config: ModelConfig, layout: Layout, precision: Precision) -> Decoder:
    norm = norms(config)

    def block(layer: LayerConfig, name: str) -> Block:
        mlp = f"{name}.mlp"
        if layer.dense or config.experts is None:
            network: GatedMLP | Experts = GatedMLP(config, layout, precision, mlp)
        else:
            bias = f"{mlp}.gate.e_score_correction_bias" if config.experts.selection_bias else None
            network = Experts(config, layout, precision, ExpertNames(
                router=f"{mlp}.gate", experts=f"{mlp}.experts", selection_bias=bias, shared=f"{mlp}.shared_experts"))
        return Block(
            layout, attention=LatentAttention(config, layout, precision, layer, f"{name}.self_attn"), mlp=network,
            before_attention=norm(f"{name}.input_layernorm"), before_mlp=norm(f"{name}.post_attention_layernorm"))

    return Decoder(config, layout, precision, block)
