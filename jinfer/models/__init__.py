"""Model definitions: shared layers, then one file a family."""

from jinfer.config import ModelConfig
from jinfer.errors import ConfigError
from jinfer.models.decoder import Decoder
from jinfer.models.deepseek import deepseek
from jinfer.models.gemma import gemma, gemma2
from jinfer.models.gpt_oss import gpt_oss
from jinfer.models.llama import llama
from jinfer.models.mixtral import mixtral
from jinfer.models.olmo2 import olmo2
from jinfer.models.parameter import Precision
from jinfer.models.phi3 import phi3
from jinfer.models.qwen3_moe import qwen3_moe
from jinfer.sharding import Layout

FAMILIES = {
    "llama": llama, "gemma": gemma, "gemma2": gemma2, "gemma3": gemma2, "phi3": phi3, "olmo2": olmo2,
    "mixtral": mixtral, "qwen3_moe": qwen3_moe, "gpt_oss": gpt_oss, "deepseek": deepseek,
}


def build_model(config: ModelConfig, layout: Layout, precision: Precision) -> Decoder:
    """The module of a configuration, with a `Parameter` in the place of every array."""
    if config.family not in FAMILIES:
        raise ConfigError(f"model.family: {config.family!r} is not one of {', '.join(FAMILIES)}")
    layout.check(config)
    return FAMILIES[config.family](config, layout, precision)
