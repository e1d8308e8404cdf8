"""Which tokens a row has seen, and the penalties computed from that.

State: counts [B + 1, V] int16, one row a slot (row B is scratch for padding). A cell holds twice the number
of times the token was generated, plus one if it is in the prompt; it saturates at MOST_OUTPUTS generations.
"""

import jax
import jax.numpy as jnp

MOST_OUTPUTS = 2**14 - 1


def new_counts(slots: int, vocab: int) -> jax.Array:
    """Counts for B = `slots` slots and a scratch row: zeros [B + 1, V] int16."""
    return jnp.zeros((slots + 1, vocab), jnp.int16)


def record_output(counts: jax.Array, slots: jax.Array, tokens: jax.Array, active: jax.Array) -> jax.Array:
    """Counts a generated token for each active row, in place when counts is donated; active slots differ.

    counts [B + 1, V] i16, slots [R] i32, tokens [R] i32, active [R] bool -> counts.
    """
    old = counts[slots, tokens].astype(jnp.int32)
    new = jnp.minimum(old + 2, 2 * MOST_OUTPUTS + (old & 1)).astype(counts.dtype)
    target = jnp.where(active, slots, counts.shape[0])  # out of range: dropped
    return counts.at[target, tokens].set(new, mode="drop")


def reset_row(counts: jax.Array, slot: jax.Array, tokens: jax.Array, prompt_length: jax.Array) -> jax.Array:
    """Starts a slot from a request's tokens: the first prompt_length are its prompt, later ones its output.

    counts [B + 1, V] i16, slot [] i32, tokens [C] i32 padded with -1, prompt_length [] i32 -> counts.
    Output is present when a preempted request resumes.
    """
    vocab = counts.shape[1]
    target = jnp.where(tokens < 0, vocab, tokens)
    generated = jnp.arange(tokens.shape[0], dtype=jnp.int32) >= prompt_length
    zeros = jnp.zeros(vocab, jnp.int32)
    outputs = zeros.at[target].add(generated.astype(jnp.int32), mode="drop")
    prompt = zeros.at[target].max((~generated).astype(jnp.int32), mode="drop")
    row = 2 * jnp.minimum(outputs, MOST_OUTPUTS) + prompt
    return counts.at[slot].set(row.astype(counts.dtype))


def penalise(
    logits: jax.Array, counts: jax.Array, presence: jax.Array, frequency: jax.Array, repetition: jax.Array
) -> jax.Array:
    """Logits [R, V] f32 with penalties applied; counts [R, V] i16 are the rows' own; the rest [R] f32.

    repetition (CTRL, arXiv 1909.05858): tokens of prompt or output are divided by it if positive, else
    multiplied. presence and frequency (OpenAI): over generated tokens only. Neutral values change no bit.
    """
    outputs = (counts >> 1).astype(jnp.float32)
    factor = repetition[:, None]
    repeated = jnp.where(logits > 0, logits / factor, logits * factor)
    logits = jnp.where(counts > 0, repeated, logits)
    return logits - frequency[:, None] * outputs - presence[:, None] * (outputs > 0)
