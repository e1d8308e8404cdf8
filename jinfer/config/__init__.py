"""Frozen, validated configuration. Nothing here imports JAX."""

from jinfer.config.engine import EngineConfig
from jinfer.config.layout import DisaggregationConfig, LayoutConfig
from jinfer.config.model import ExpertsConfig, LatentConfig, LayerConfig, ModelConfig, RopeConfig
from jinfer.config.sampling import SamplingParams
from jinfer.config.service import ServiceParams

__all__ = ["DisaggregationConfig", "EngineConfig", "ExpertsConfig", "LatentConfig", "LayerConfig", "LayoutConfig",
           "ModelConfig", "RopeConfig", "SamplingParams", "ServiceParams"]
