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

MIXTURES = ("mixtral", "qwen3_moe", "gpt_oss", "deepseek")


def build_model(config: ModelConfig, layout: Layout, precision: Precision) -> Decoder:
    """The module of a configuration, with a `Parameter` in the place of every array."""
    if config.family not in FAMILIES:
        raise ConfigError(f"model.family: {config.family!r} is not one of {', '.join(FAMILIES)}")
    _check_options(config)
    layout.check(config)
    return FAMILIES[config.family](config, layout, precision)


def _check_options(config: ModelConfig) -> None:
    """Raises ConfigError naming an option that the family's code would read past, or one that it cannot do without."""
    family, experts, latent = config.family, config.experts, config.family == "deepseek"
    needed = {"experts": experts is None and family in ("mixtral", "gpt_oss"), "latent": latent and not config.latent}
    absent = {
        "experts": experts is not None and family not in MIXTURES,
        "experts.shared": experts is not None and experts.shared and not latent,
        "experts.selection_bias": experts is not None and experts.selection_bias and not latent,
        "layers.dense": any(layer.dense for layer in config.layers) and family not in ("qwen3_moe", "deepseek"),
        "latent": config.latent is not None and not latent,
        "qk_norm": latent and config.qk_norm,
        "qkv_bias": latent and config.qkv_bias,
        "o_bias": latent and config.o_bias,
        "sinks": latent and config.sinks,
        "rope.interleaved": config.rope.interleaved and not latent,
    }
    for options, what in ((needed, "needs it"), (absent, "has none")):
        for name, wrong in options.items():
            if wrong:
                raise ConfigError(f"model.{name}: family {family!r} {what}")
