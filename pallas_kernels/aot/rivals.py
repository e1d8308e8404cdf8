"""JAX's own TPU kernels on the shapes of our timing cases, as targets for `Compiler.compile`."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.chips import local_chip

Target = tuple[Callable[..., Any], Any, Callable[[], Any]]


def paged(rows: int, context: int, heads: int, kv_heads: int, head_dim: int, page_size: int,
          blocks: Sequence[int]) -> Target:
    """ragged_paged_attention, one query a row, bfloat16; blocks: its (kv pages, queries) a block."""
    from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ragged_paged_attention

    row_pages = context // page_size

    def make() -> tuple[Any, ...]:
        pages = jnp.zeros((rows * row_pages + 1, page_size, 2 * kv_heads, head_dim), jnp.bfloat16)
        table = jnp.arange(rows * row_pages, dtype=jnp.int32).reshape(rows, row_pages) + 1
        return (jnp.zeros((rows, heads, head_dim), jnp.bfloat16), pages, jnp.full((rows,), context, jnp.int32), table,
                jnp.arange(rows + 1, dtype=jnp.int32), jnp.full((1,), rows, jnp.int32))

    def call(*arguments: jax.Array) -> jax.Array:
        return ragged_paged_attention(
            *arguments, sm_scale=head_dim**-0.5, num_kv_pages_per_block=blocks[0], num_queries_per_block=blocks[1],
            vmem_limit_bytes=local_chip().vmem * 3 // 4)

    return call, jax.eval_shape(make), make


def paged_blocks(device: str, rows: int, context: int, heads: int, kv_heads: int, head_dim: int,
                 page_size: int) -> tuple[tuple[int, int], str]:
    """ragged_paged_attention's own choice of (kv pages, queries) a block, and 'tuned' or 'default'.

    device: 'TPU v6', 'TPU v7', .. as its table has them.
    """
    from jax.experimental.pallas.ops.tpu.ragged_paged_attention import kernel, tuned_block_sizes

    q_heads, combined = kernel.get_min_heads_per_blk(heads, 2 * kv_heads, jnp.bfloat16, jnp.bfloat16)
    key = tuned_block_sizes.simplify_key(
        ("bfloat16", "bfloat16", q_heads, combined // 2, head_dim, page_size, rows, context // page_size))
    found = tuned_block_sizes.TUNED_BLOCK_SIZES.get(device, {}).get(key)
    pages, queries = found or (128, 32)
    return (min(context // page_size, pages), min(rows, queries)), "tuned" if found else "default"


def flash(tokens: int, heads: int, kv_heads: int, head_dim: int, block: int) -> Target:
    """flash_attention, causal, bfloat16. It wants keys and values for every query head: they are given so."""
    from jax.experimental.pallas.ops.tpu.flash_attention import BlockSizes, flash_attention

    sizes = BlockSizes(block_q=block, block_k_major=block, block_k=block, block_b=1)

    def make() -> tuple[Any, ...]:
        return (jnp.zeros((1, heads, tokens, head_dim), jnp.bfloat16),) * 3

    call = functools.partial(flash_attention, causal=True, sm_scale=head_dim**-0.5, block_sizes=sizes)
    return call, jax.eval_shape(make), make


def splash(tokens: int, heads: int, kv_heads: int, head_dim: int, block: int) -> Target:
    """splash_attention, causal, bfloat16, a kv head and its group of query heads at a time."""
    from jax.experimental.pallas.ops.tpu import splash_attention as library

    group = heads // kv_heads
    mask = library.MultiHeadMask([library.CausalMask((tokens, tokens))] * group)

    def make() -> tuple[Any, ...]:
        keys = jnp.zeros((kv_heads, tokens, head_dim), jnp.bfloat16)
        return jnp.zeros((kv_heads, group, tokens, head_dim), jnp.bfloat16), keys, keys

    def call(*arguments: jax.Array) -> jax.Array:
        sizes = library.BlockSizes(block_q=block, block_kv=block, block_kv_compute=block)
        return jax.vmap(library.make_splash_mqa_single_device(mask, block_sizes=sizes))(*arguments)

    return call, jax.eval_shape(make), make
