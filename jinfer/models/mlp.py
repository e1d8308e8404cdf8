"""Gated feed-forward network, shared by all families."""

import jax
from flax import nnx

from jinfer.config import ModelConfig
from jinfer.models.activation import gate
from jinfer.models.layers import Linear
from jinfer.models.parameter import Parameter, Precision, Rows, plain, side_by_side
from jinfer.sharding import Layout


class GatedMLP(nnx.Module):
    """down(gate(gate(x), up(x))) (arXiv 2002.05202); gate and up are one matrix [2 * F, D]."""

    def __init__(self, config: ModelConfig, layout: Layout, precision: Precision, name: str, *, fused: bool = False):
        """fused: the checkpoint holds gate and up as one tensor."""
        model, width = config.hidden_size, config.intermediate_size
        self.parts = layout.degree("ffn")
        self.config = config

        def both(kind: str, tail: tuple[int, ...]) -> Parameter:
            if fused:
                pair = tuple(Rows(f"{name}.gate_up_proj.{kind}", first, 2 * width) for first in (0, width))
            else:
                pair = tuple(Rows(f"{name}.{p}_proj.{kind}", 0, width) for p in ("gate", "up"))
            return side_by_side(pair, (width, *tail), ("ffn", *(None for _ in tail)), self.parts)

        self.gate_up = Linear(both("weight", (model,)), precision, bias=both("bias", ()) if config.mlp_bias else None)
        self.down = Linear(
            plain(f"{name}.down_proj.weight", (model, width), (None, "ffn")), precision, layout=layout,
            bias=plain(f"{name}.down_proj.bias", (model,), (None,)) if config.mlp_bias else None)

    def __call__(self, x: jax.Array) -> jax.Array:
        """x: [T, D] -> [T, D]."""
        gate_up = self.gate_up(x).reshape(x.shape[0], self.parts, 2, -1)  # F lies in as many parts as it is cut into
        return self.down(gate(gate_up[:, :, 0], gate_up[:, :, 1], self.config))
