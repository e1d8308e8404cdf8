"""ModelSizes: parameters by how a layout cuts them, and the arithmetic of a token, from the configuration alone."""

import dataclasses
from typing import Self

from jinfer.config.model import ModelConfig


@dataclasses.dataclass(frozen=True, slots=True)
class ModelSizes:
    """Numbers of parameters; norms, biases and routers are `small`, and whole on every device.

    Attributes:
      attention: projections, cut with the kv heads. latent: of latent attention, whole on every device.
      dense: feed-forward networks every token takes (shared experts too), cut on ffn.
      expert: one routed expert, of all layers that have them; experts: E; active: taken by a token.
      embedding: the table; head: the output head where it is not the table. Both are cut on vocab.
    """

    attention: int
    latent: int
    dense: int
    expert: int
    experts: int
    active: int
    embedding: int
    head: int
    small: int

    @classmethod
    def of(cls, config: ModelConfig) -> Self:
        width, heads, kv, lanes = config.hidden_size, config.num_heads, config.num_kv_heads, config.head_dim
        latent = config.latent
        small = 2 * width + (heads + kv) * lanes * (config.qk_norm == "all") + 2 * lanes * (config.qk_norm == "head")
        small += config.qkv_bias * (heads + 2 * kv) * lanes + config.o_bias * width + config.sinks * heads
        whole = 0
        if latent is None:
            attention = width * (heads + 2 * kv) * lanes + heads * lanes * width
        else:
            whole = width * (latent.kv_rank + latent.rope_dim) + width * (latent.q_rank or 0)
            queries = (latent.q_rank or width) * heads * lanes
            attention = queries + latent.kv_rank * heads * (latent.nope_dim + latent.value_dim) \
                + heads * latent.value_dim * width
            small += latent.kv_rank + (latent.q_rank or 0)
        experts = config.experts
        dense = expert = 0
        for layer in config.layer_kinds:
            if experts is None or layer.dense:
                dense += 3 * width * config.intermediate_size
            else:
                expert += 3 * width * experts.intermediate_size + experts.bias * (2 * experts.intermediate_size + width)
                dense += 3 * width * experts.intermediate_size * experts.shared
        layers = config.num_layers
        routed = sum(experts is not None and not layer.dense for layer in config.layer_kinds)
        table = config.vocab_size * width
        return cls(attention=attention * layers, latent=whole * layers, dense=dense, expert=expert,
                   experts=experts.count if experts else 0, active=experts.active if experts else 0,
                   embedding=table, head=0 if config.tie_embeddings else table,
                   small=small * layers + (routed * width * experts.count if experts else 0))

    @property
    def total(self) -> int:
        """Numbers in the checkpoint."""
        return (self.attention + self.latent + self.dense + self.expert * self.experts + self.embedding + self.head
                + self.small)

    def experts_hit(self, tokens: float) -> float:
        """Experts of a layer that so many tokens take, if each takes `active` of them at random."""
        if not self.experts:
            return 0.0
        return self.experts * (1.0 - (1.0 - self.active / self.experts) ** tokens)
