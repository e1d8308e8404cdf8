"""Checkpoints on disk -> configuration and lazily read tensors."""

from jinfer.weights.checkpoint import Checkpoint, TensorReader, open_checkpoint
from jinfer.weights.source import resolve_model

__all__ = ["Checkpoint", "TensorReader", "open_checkpoint", "resolve_model"]
