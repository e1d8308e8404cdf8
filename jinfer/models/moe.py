"""Mixture of experts: a router, the routed experts, and those every token takes."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec

from jinfer.config import ModelConfig
from jinfer.models.activation import gate
from jinfer.models.expert_linear import ExpertLinear, Stack
from jinfer.models.expert_names import ExpertNames
from jinfer.models.mlp import GatedMLP
from jinfer.models.parameter import Precision
from jinfer.models.router import Router
from jinfer.sharding import Layout


class Order(NamedTuple):
    """T tokens' A choices as T * A rows sorted by expert, all int32.

    token, expert: [T * A], a row's. row: [T, A], a choice's. sizes: [E], rows of an expert.
    """

    token: jax.Array
    expert: jax.Array
    row: jax.Array
    sizes: jax.Array


class Experts(nnx.Module):
    """Sum over a token's experts of weight * down(gate(x)), plus the shared experts (arXiv 1701.06538, 2401.06066).

    Rows are sorted by expert, so that a matrix is read once a call and only if a token takes it. A device has its
    share of every expert's F, and the devices' sums meet once.
    """

    def __init__(self, config: ModelConfig, layout: Layout, precision: Precision, names: ExpertNames):
        experts, parts = config.experts, layout.degree("ffn")
        assert experts is not None
        self.config, self.layout = config, layout
        self.count = experts.count
        self.router = Router(experts, config.hidden_size, names.router, names.selection_bias)
        gate_up, down = names.weights(config, parts)
        gate_up_bias, down_bias = names.biases(config, parts) if experts.bias else (None, None)
        self.gate_up = ExpertLinear(gate_up, gate_up_bias, layout, precision)
        self.down = ExpertLinear(down, down_bias, layout, precision)
        self.shared = _shared(config, layout, precision, names.shared) if experts.shared else None

    def __call__(self, x: jax.Array) -> jax.Array:
        """x: [T, D] -> [T, D]. A token's result does not depend on the others."""
        chosen, weights = self.router(x)
        out = self._routed(x, weights, in_order(chosen, self.count))
        if self.down.bias is not None:  # here and not in each device's sum
            biases = self.down.bias[...].astype(jnp.float32).at[chosen].get(mode="promise_in_bounds")
            out = out.astype(jnp.float32) + jnp.sum(weights[:, :, None] * biases, axis=1)
        out = out.astype(x.dtype)
        return out if self.shared is None else out + self.shared(x)

    def _routed(self, x: jax.Array, weights: jax.Array, order: Order) -> jax.Array:
        """x [T, D], weights [T, A] -> [T, D] without down's bias; float32, or x's dtype where devices met."""
        cut = self.layout.degree("ffn") > 1
        axis = self.layout.mesh_axis("ffn")

        def local(x: jax.Array, weights: jax.Array, order: Order, gate_up: Stack, down: Stack) -> jax.Array:
            taken = x.at[order.token].get(mode="promise_in_bounds")
            hidden = self.gate_up.multiply(taken, gate_up, order.expert, order.sizes)
            halves = hidden.reshape(hidden.shape[0], 2, -1)
            gated = gate(halves[:, 0], halves[:, 1], self.config).astype(x.dtype)
            rows = self.down.multiply(gated, down, order.expert, order.sizes)
            # Gathered and not scattered: a token adds its experts up in its own order, whoever else is there.
            out = jnp.sum(weights[:, :, None] * rows.at[order.row].get(mode="promise_in_bounds"), axis=1)
            return jax.lax.psum(out.astype(x.dtype), axis) if cut else out

        whole: Any = PartitionSpec()
        down = self.down.arrays()._replace(bias=None)
        sharded = jax.shard_map(
            local, mesh=self.layout.mesh, out_specs=whole, check_vma=False,
            in_specs=(whole, whole, whole, self.gate_up.specs(self.layout),
                      self.down.specs(self.layout)._replace(bias=None)))
        return sharded(x, weights, order, self.gate_up.arrays(), down)


def in_order(chosen: jax.Array, experts: int) -> Order:
    """chosen [T, A] int32 -> its rows sorted by expert, those of one expert in the tokens' order."""
    flat = chosen.reshape(-1)
    order = jnp.argsort(flat, stable=True).astype(jnp.int32)
    row = jnp.zeros_like(order).at[order].set(jnp.arange(order.size, dtype=jnp.int32), unique_indices=True)
    sizes = jnp.sum(flat[:, None] == jnp.arange(experts, dtype=jnp.int32), axis=0, dtype=jnp.int32)
    return Order(order // chosen.shape[1], flat[order], row.reshape(chosen.shape), sizes)


def _shared(config: ModelConfig, layout: Layout, precision: Precision, name: str | None) -> GatedMLP:
    assert config.experts is not None
    assert name is not None
    width = config.experts.shared * config.experts.intermediate_size
    return GatedMLP(dataclasses.replace(config, intermediate_size=width), layout, precision, name)
