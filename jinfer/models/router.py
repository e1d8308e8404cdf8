"""Which experts a token takes, and with what weights."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jinfer.config import ExpertsConfig
from jinfer.models.layers import kernel_parameters
from jinfer.models.parameter import Parameter, Precision, plain

FLOAT32 = Precision.of("float32", None)


class Router(nnx.Module):
    """Token-choice top-k routing, all of it float32: softmax over all experts (arXiv 1701.06538, 2401.04088), in groups
    (DeepSeek-V2, arXiv 2405.04434), or sigmoids chosen with a bias (DeepSeek-V3, arXiv 2412.19437).
    """

    def __init__(self, experts: ExpertsConfig, model: int, name: str, selection_bias: str | None):
        """name: prefix of the logits' weight [E, D] and bias [E]; selection_bias: name of a tensor [E]."""
        self.experts = experts
        weight = plain(f"{name}.weight", (experts.count, model), (None, None))
        self.kernel = nnx.Param(kernel_parameters(weight, FLOAT32)[0])  # [D, E]

        def vector(name: str) -> nnx.Param[Parameter]:
            return nnx.Param(plain(name, (experts.count,), (None,)))

        self.bias = vector(f"{name}.bias") if experts.router_bias else None
        assert (selection_bias is not None) == experts.selection_bias
        self.selection_bias = None if selection_bias is None else vector(selection_bias)

    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """x: [T, D] -> (experts [T, A] int32, best first, the lower of equals first; weights [T, A] float32)."""
        # A TPU would multiply float32 as bfloat16, and near ties would fall either way.
        logits = jnp.dot(x.astype(jnp.float32), self.kernel[...], precision=jax.lax.Precision.HIGHEST)
        if self.bias is not None:
            logits = logits + self.bias[...]
        scores = jax.nn.softmax(logits, axis=1) if self.experts.scoring == "softmax" else jax.nn.sigmoid(logits)
        chosen_by = scores if self.selection_bias is None else scores + self.selection_bias[...]
        chosen = jax.lax.top_k(self._in_best_groups(chosen_by), self.experts.active)[1]
        weights = jnp.take_along_axis(scores, chosen, axis=1)
        if self.experts.normalise:
            weights = weights / jnp.maximum(jnp.sum(weights, axis=1, keepdims=True), np.float32(1e-20))
        return chosen, weights * np.float32(self.experts.scale)

    def _in_best_groups(self, scores: jax.Array) -> jax.Array:
        """scores [T, E], -inf where an expert's group is not among the active ones."""
        experts = self.experts
        if experts.active_groups == experts.groups:
            return scores
        grouped = scores.reshape(scores.shape[0], experts.groups, -1)
        best = jax.lax.top_k(grouped, 1 if experts.group_score == "max" else 2)[0].sum(axis=2)
        groups = jax.lax.top_k(best, experts.active_groups)[1]
        active = (groups[:, :, None] == jnp.arange(experts.groups, dtype=jnp.int32)).any(axis=1)
        return jnp.where(active[:, :, None], grouped, -jnp.inf).reshape(scores.shape)
