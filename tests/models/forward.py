"""A whole forward pass outside the engine: chunks over fresh pages, logits of every position."""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jinfer.config import LayoutConfig, ModelConfig
from jinfer.kv.groups import page_groups
from jinfer.models import build_model
from jinfer.models.context import KVPages, StepContext, rotary_tables
from jinfer.models.parameter import Precision
from jinfer.sharding import Layout
from jinfer.weights.place import check_names, place
from pallas_kernels import Pages

PAGE = 16


# Compiles in two thirds of the time. XLA's own debugging options, so for what a test asks of them only.
QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


def forward(config: ModelConfig, reader, ids: list[int], **options) -> np.ndarray:
    """Logits [T, V] float32 of a prompt seen as one chunk; options as of `compiled`."""
    return forward_all(config, reader, [ids], **options)[0]


def forward_all(config: ModelConfig, reader, prompts: Sequence[list[int]], **options) -> list[np.ndarray]:
    """Logits [T, V] float32 of each prompt, all of them packed in one call; options as of `compiled`."""
    return compiled(config, reader, [len(ids) for ids in prompts], **options)(prompts)


def compiled(config: ModelConfig, reader, lengths: Sequence[int], *, dtype: str = "float32",
             quantization: str | None = None, tensor: int = 1,
             quick: bool = False) -> Callable[[Sequence[list[int]]], list[np.ndarray]]:
    """`forward_all` of any prompts of these lengths, compiled once; quick: see QUICK."""
    layout = Layout.build(LayoutConfig(mesh={"tensor": tensor}))
    precision = Precision.of(dtype, quantization)
    graph, abstract = nnx.split(build_model(config, layout, precision))
    parameters, treedef = jax.tree.flatten(abstract)
    check_names(parameters, reader, tied_head=config.tie_embeddings)
    weights = place(parameters, reader, layout)
    width = -(-max(lengths) // PAGE)  # pages of a row of the table
    pages = len(lengths) * width
    starts = np.cumsum([0, *lengths]).astype(np.int32)
    positions = jnp.asarray(np.concatenate([np.arange(n) for n in lengths]), jnp.int32)
    table = jnp.arange(1, pages + 1, dtype=jnp.int32).reshape(len(lengths), width)

    def run(weights, tokens):
        def pool(layers: int) -> Pages:
            shape = (layers * (pages + 1), layout.kv_heads(config), PAGE, config.cache_width)
            return Pages(jnp.zeros(shape, precision.activation_dtype))

        groups = [len(group.layers) for group in page_groups(config.layer_kinds)]
        kv = tuple(KVPages(pool(layers), None if config.latent else pool(layers)) for layers in groups)
        rotary = rotary_tables(config, positions, jnp.asarray(np.repeat(lengths, lengths), jnp.int32))
        step = StepContext(rotary, (table,) * len(groups), jnp.asarray(starts), jnp.asarray(lengths, jnp.int32))
        model = nnx.merge(graph, jax.tree.unflatten(treedef, weights))
        hidden, _ = model(tokens, kv, step, decode=False)
        return model.logits(hidden)[:, : config.vocab_size]

    jitted = jax.jit(run, compiler_options=QUICK if quick else None)

    def logits(prompts: Sequence[list[int]]) -> list[np.ndarray]:
        tokens = jnp.asarray(np.concatenate(prompts), jnp.int32)
        return np.split(np.asarray(jitted(weights, tokens)), starts[1:-1])

    return logits
