"""Meshes, logical-axis rules and their checks."""

from jinfer.sharding.layout import Layout

__all__ = ["Layout"]
