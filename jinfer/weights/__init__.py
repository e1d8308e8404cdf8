"""Checkpoints on disk -> configuration and lazily read tensors."""

from jinfer.weights.checkpoint import Checkpoint, TensorReader, open_checkpoint

__all__ = ["Checkpoint", "TensorReader", "open_checkpoint"]
