"""A whole forward pass outside the engine: one chunk over fresh pages, logits of every position."""

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


def forward(config: ModelConfig, reader, ids: list[int], *, dtype: str = "float32", quantization: str | None = None,
            tensor: int = 1) -> np.ndarray:
    """Logits [T, V] float32 of a prompt seen as one chunk."""
    layout = Layout.build(LayoutConfig(mesh={"tensor": tensor}))
    precision = Precision.of(dtype, quantization)
    graph, abstract = nnx.split(build_model(config, layout, precision))
    parameters, treedef = jax.tree.flatten(abstract)
    check_names(parameters, reader, tied_head=config.tie_embeddings)
    weights = place(parameters, reader, layout)
    count = len(ids)
    pages = -(-count // PAGE)
    positions = jnp.arange(count, dtype=jnp.int32)

    @jax.jit
    def run(weights, tokens):
        def pool(layers: int) -> Pages:
            shape = (layers * (pages + 1), layout.kv_heads(config), PAGE, config.cache_width)
            return Pages(jnp.zeros(shape, precision.activation_dtype))

        groups = [len(group.layers) for group in page_groups(config.layer_kinds)]
        kv = tuple(KVPages(pool(layers), None if config.latent else pool(layers)) for layers in groups)
        rotary = rotary_tables(config, positions, jnp.full(count, count, jnp.int32))
        table = jnp.arange(1, pages + 1, dtype=jnp.int32)[None]
        step = StepContext(rotary, (table,) * len(groups), jnp.array([0, count], jnp.int32), jnp.array([count], jnp.int32))
        model = nnx.merge(graph, jax.tree.unflatten(treedef, weights))
        hidden, _ = model(tokens, kv, step, decode=False)
        return model.logits(hidden)[:, : config.vocab_size]

    return np.asarray(run(weights, jnp.asarray(ids, jnp.int32)))
