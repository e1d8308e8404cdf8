"""Frozen, validated configuration. Nothing here imports JAX."""

from jinfer.config.engine import EngineConfig, LayoutConfig
from jinfer.config.model import ModelConfig, RopeConfig
from jinfer.config.sampling import SamplingParams

__all__ = ["EngineConfig", "LayoutConfig", "ModelConfig", "RopeConfig", "SamplingParams"]
