"""Log-probabilities of chosen tokens and of the best alternatives, from raw logits."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from jinfer.sampling.blocks import at, top


def logprobs(
    logits: jax.Array, tokens: jax.Array, *, max_logprobs: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """log_softmax of each row at `tokens`, and its best max_logprobs (C) entries, best first.

    logits [R, V] f32, tokens [R] i32 -> [R] f32, ids [R, C] i32, values [R, C] f32. A token of logit -inf has
    -inf: whoever writes JSON must replace it.
    """
    values, ids = top(logits, max(max_logprobs, 1))
    best = jnp.max(logits, axis=1, keepdims=True)
    normaliser = best + jnp.log(jnp.sum(jnp.exp(logits - best), axis=1, keepdims=True))
    chosen = at(logits, tokens[:, None]) - normaliser
    return chosen[:, 0], ids[:, :max_logprobs], values[:, :max_logprobs] - normaliser


def in_blocks(
    hidden: jax.Array, targets: jax.Array, score: Callable[[jax.Array, jax.Array], jax.Array], *, block: int = 64
) -> jax.Array:
    """score(hidden, targets) of a prompt, a block of positions at a time, so that [T, V] never exists.

    hidden [T, D]; targets [T] i32, the token after each position; score maps [t, D] and [t] to [t, ...], each
    row alone -> [T, ...].
    """
    length, width = hidden.shape
    block = min(block, length)
    count = -(-length // block)
    padding = count * block - length
    blocks = jnp.pad(hidden, ((0, padding), (0, 0))).reshape(count, block, width)
    wanted = jnp.pad(targets, (0, padding)).reshape(count, block)
    scores = lax.map(lambda args: score(*args), (blocks, wanted))
    return scores.reshape(count * block, *scores.shape[2:])[:length]
