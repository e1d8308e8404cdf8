"""Mixtures of experts for tests: random checkpoints in every spelling, and what they mean in float64 NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jinfer.config import ExpertsConfig, LayoutConfig, ModelConfig
from jinfer.models.expert_names import ExpertNames
from jinfer.models.moe import Experts
from jinfer.models.parameter import Precision
from jinfer.sharding import Layout
from jinfer.weights.place import check_names, place

MODEL = 32


class Tensors(dict):
    """A checkpoint in memory."""

    def names(self):
        return list(self)

    def shape(self, name):
        return self[name].shape

    def read(self, name, index=()):
        return self[name][index]


def model(experts: ExpertsConfig, **options) -> ModelConfig:
    return ModelConfig(**{"vocab_size": 8, "hidden_size": MODEL, "intermediate_size": 48, "num_layers": 1,
                          "num_heads": 2, "num_kv_heads": 1, "head_dim": 8, "max_context": 8, "experts": experts,
                          **options})


def names(experts: ExpertsConfig, **options) -> ExpertNames:
    return ExpertNames("m.gate", "m.experts", selection_bias="m.gate.correction" if experts.selection_bias else None,
                       shared="m.shared" if experts.shared else None, **options)


def tensors(experts: ExpertsConfig, where: ExpertNames, rng) -> Tensors:
    """Everything an ExpertsConfig may ask for, spelt as `where` says, with weights of a trained model's size."""
    count, width = experts.count, experts.intermediate_size

    def normal(*shape):
        return (rng.standard_normal(shape) / np.sqrt(shape[-1])).astype(np.float32)

    found = Tensors({f"{where.router}.weight": 3 * normal(count, MODEL)})
    if experts.router_bias:
        found[f"{where.router}.bias"] = rng.standard_normal(count).astype(np.float32)
    if where.selection_bias:
        found[where.selection_bias] = rng.standard_normal(count).astype(np.float32)
    if where.stacked:
        found |= {f"{where.experts}.gate_up_proj": normal(count, MODEL, 2 * width),
                  f"{where.experts}.down_proj": normal(count, width, MODEL),
                  f"{where.experts}.gate_up_proj_bias": rng.standard_normal((count, 2 * width)).astype(np.float32),
                  f"{where.experts}.down_proj_bias": rng.standard_normal((count, MODEL)).astype(np.float32)}
    else:
        for expert in range(count):
            found |= dict(zip((f"{where.experts}.{expert}.{name}.weight" for name in where.projections),
                              (normal(width, MODEL), normal(width, MODEL), normal(MODEL, width)), strict=True))
    if where.shared:
        wide = experts.shared * width
        found |= {f"{where.shared}.gate_proj.weight": normal(wide, MODEL),
                  f"{where.shared}.up_proj.weight": normal(wide, MODEL),
                  f"{where.shared}.down_proj.weight": normal(MODEL, wide)}
    return Tensors(found)


def build(config: ModelConfig, where: ExpertNames, checkpoint: Tensors, *, tensor: int = 1, dtype: str = "float32",
          quantization: str | None = None):
    """Experts with their arrays in place, as a jitted function of x."""
    layout = Layout.build(LayoutConfig(mesh={"tensor": tensor}))
    module = Experts(config, layout, Precision.of(dtype, quantization), where)
    graph, abstract = nnx.split(module)
    parameters, treedef = jax.tree.flatten(abstract)
    check_names(parameters, checkpoint, tied_head=False)
    arrays = place(parameters, checkpoint, layout)
    run = jax.jit(lambda arrays, x: nnx.merge(graph, jax.tree.unflatten(treedef, arrays))(x))
    return lambda x: np.asarray(run(arrays, jnp.asarray(x, dtype)).astype("float32"))


def softmax(x):
    e = np.exp(x - x.max())
    return e / e.sum()


def route(experts: ExpertsConfig, where: ExpertNames, checkpoint: Tensors, token):
    """[(expert, weight)] of one token [D], best first."""
    logits = checkpoint[f"{where.router}.weight"].astype(np.float64) @ token
    if experts.router_bias:
        logits = logits + checkpoint[f"{where.router}.bias"]
    scores = softmax(logits) if experts.scoring == "softmax" else 1 / (1 + np.exp(-logits))
    choice = scores + (checkpoint[where.selection_bias] if experts.selection_bias else 0)
    each = experts.count // experts.groups
    best = [sorted(choice[g * each : (g + 1) * each])[-1 if experts.group_score == "max" else -2 :]
            for g in range(experts.groups)]
    active = sorted(range(experts.groups), key=lambda g: (-sum(best[g]), g))[: experts.active_groups]
    allowed = [e for e in range(experts.count) if e // each in active]
    chosen = sorted(allowed, key=lambda e: (-choice[e], e))[: experts.active]
    total = sum(scores[e] for e in chosen) if experts.normalise else 1.0
    return [(e, scores[e] / total * experts.scale) for e in chosen]


def activate(config: ModelConfig, gate, up):
    if config.activation == "silu":
        return gate / (1 + np.exp(-gate)) * up
    if config.activation == "gelu_tanh":
        return 0.5 * gate * (1 + np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3))) * up
    gate, up = np.minimum(gate, config.swiglu_limit), np.clip(up, -config.swiglu_limit, config.swiglu_limit)
    return (up + 1) * gate / (1 + np.exp(-1.702 * gate))


def oracle(config: ModelConfig, where: ExpertNames, checkpoint: Tensors, x):
    """float64 [T, D]: token by token, expert by expert."""
    experts, width = config.experts, config.experts.intermediate_size
    out = np.zeros(x.shape)
    for t, token in enumerate(np.asarray(x, np.float64)):
        for expert, weight in route(experts, where, checkpoint, token):
            if where.stacked:
                gate_up = token @ checkpoint[f"{where.experts}.gate_up_proj"][expert].astype(np.float64)
                down = checkpoint[f"{where.experts}.down_proj"][expert].astype(np.float64).T
                bias = np.zeros(MODEL)
                if experts.bias:
                    gate_up = gate_up + checkpoint[f"{where.experts}.gate_up_proj_bias"][expert]
                    bias = checkpoint[f"{where.experts}.down_proj_bias"][expert]
                gate, up = gate_up[::2], gate_up[1::2]
            else:
                gate, up, down = (checkpoint[f"{where.experts}.{expert}.{name}.weight"].astype(np.float64)
                                  for name in where.projections)
                gate, up, bias = gate @ token, up @ token, np.zeros(MODEL)
                assert gate.shape == (width,)
            out[t] += weight * (down @ activate(config, gate, up) + bias)
        if experts.shared:
            gate, up, down = (checkpoint[f"{where.shared}.{name}_proj.weight"] for name in ("gate", "up", "down"))
            out[t] += down.astype(np.float64) @ activate(config, gate.astype(np.float64) @ token, up @ token)
    return out
