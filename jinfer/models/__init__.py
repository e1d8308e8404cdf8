"""Model definitions: shared layers, then one file a family."""

from jinfer.config import ModelConfig
from jinfer.errors import ConfigError
from jinfer.models.decoder import Decoder
from jinfer.models.llama import llama
from jinfer.models.parameter import Precision
from jinfer.sharding import Layout

FAMILIES = {"llama": llama}


def build_model(config: ModelConfig, layout: Layout, precision: Precision) -> Decoder:
    """The module of a configuration, with a `Parameter` in the place of every array."""
    if config.family not in FAMILIES:
        raise ConfigError(f"model.family: {config.family!r} is not one of {', '.join(FAMILIES)}")
    layout.check(config)
    return FAMILIES[config.family](config, layout, precision)
