"""Routing, experts and their parameters against float64 NumPy, token by token."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jinfer.config import ExpertsConfig, LayerConfig, LayoutConfig, ModelConfig
from jinfer.errors import LayoutError
from jinfer.models.activation import gate
from jinfer.models.expert_linear import ExpertLinear
from jinfer.models.expert_parameters import pairs_apart
from jinfer.models.moe import in_order
from jinfer.models.parameter import Precision, plain
from jinfer.models.router import Router
from jinfer.sharding import Layout
from tests.kernels.oracle import error
from tests.models.experts import MODEL, Tensors, activate, build, model, names, oracle, route, tensors

TOLERANCE = 2e-6
TOKENS = 24

# Options of a router, and what each of them must not be mistaken for.
GROUPED = {"groups": 4, "active_groups": 2}
ROUTERS = {
    "mixtral": ({}, {"normalise": False}),
    "deepseek-v2-lite": ({"normalise": False}, {"normalise": True}),
    "scale": ({"scale": 2.5}, {"scale": 1.0}),
    "sigmoid": ({"scoring": "sigmoid"}, {"scoring": "softmax"}),
    "groups": ({**GROUPED, "normalise": False}, {"groups": 1, "active_groups": 1}),
    "active_groups": (GROUPED, {"active_groups": 3}),
    "group_score": ({**GROUPED, "group_score": "top2"}, {"group_score": "max"}),
    "selection_bias": ({"selection_bias": True}, {"selection_bias": False}),
    "router_bias": ({"router_bias": True}, {"router_bias": False}),
    "deepseek-v3": ({**GROUPED, "group_score": "top2", "scoring": "sigmoid", "selection_bias": True, "scale": 2.5},
                    {"scoring": "softmax"}),
}
# Families' spellings of everything else.
MIXTURES = {
    "mixtral": ({}, {"projections": ("w1", "w3", "w2")}, {}),
    "gpt-oss": ({"bias": True, "router_bias": True}, {"stacked": True},
                {"activation": "clamped_swiglu", "swiglu_limit": 1.0}),
    "deepseek": ({"shared": 2, "scale": 2.5}, {}, {"activation": "gelu_tanh"}),
}


def config_of(**options) -> ExpertsConfig:
    return ExpertsConfig(**{"count": 12, "active": 3, "intermediate_size": 16, **options})


@pytest.mark.parametrize("option", ROUTERS)
def test_a_router_chooses_and_weighs(option):
    options, mutant = ROUTERS[option]
    experts = config_of(**options)
    where, rng = names(experts), np.random.default_rng(0)
    checkpoint = tensors(experts, where, rng)
    x = rng.standard_normal((TOKENS, MODEL)).astype(np.float32)
    router = Router(experts, MODEL, where.router, where.selection_bias)
    for parameter in (router.kernel, router.bias, router.selection_bias):
        if parameter is not None:
            stored = parameter.get_value()
            parameter.set_value(jnp.asarray(stored.read(checkpoint, tuple(slice(0, n) for n in stored.shape))))
    chosen, weights = (np.asarray(a) for a in jax.jit(router)(jnp.asarray(x)))

    def table(experts):
        return np.array([route(experts, where, checkpoint, token.astype(np.float64)) for token in x])

    want = table(experts)
    assert chosen.dtype == np.int32
    np.testing.assert_array_equal(chosen, want[:, :, 0])
    np.testing.assert_allclose(weights, want[:, :, 1], rtol=1e-5)
    assert np.abs(table(dataclasses.replace(experts, **mutant)) - want).max() > 1e-2


def test_equal_scores_go_to_the_lower_expert():
    router = Router(config_of(groups=4, active_groups=2), MODEL, "m.gate", None)
    router.kernel.set_value(jnp.zeros((MODEL, 12)))
    chosen, weights = router(jnp.ones((2, MODEL), jnp.bfloat16))
    assert chosen.tolist() == [[0, 1, 2]] * 2
    assert weights.dtype == jnp.float32


@pytest.mark.parametrize("family", MIXTURES)
def test_a_mixture_is_the_sum_of_its_experts(family):
    """Alone and among others, cut over devices, rounded."""
    options, spelling, rest = MIXTURES[family]
    experts = config_of(**options)
    config, where, rng = model(experts, **rest), names(experts, **spelling), np.random.default_rng(1)
    checkpoint = tensors(experts, where, rng)
    x = rng.standard_normal((TOKENS, MODEL)).astype(np.float32)
    want = oracle(config, where, checkpoint, x)
    run = build(config, where, checkpoint)
    got = run(x)
    assert error(got, want) < TOLERANCE
    for change in ({"activation": "silu"} if family != "mixtral" else {"activation": "gelu_tanh"},
                   {"experts": dataclasses.replace(experts, active=2)},
                   {"experts": dataclasses.replace(experts, shared=0, bias=False, scale=0.5)}):
        assert error(oracle(dataclasses.replace(config, **change), where, checkpoint, x), want) > 1e-2
    order = rng.permutation(TOKENS)
    np.testing.assert_allclose(run(x[order]), got[order], rtol=0, atol=1e-6)  # one's place does not matter
    alone = np.concatenate([run(x[t : t + 1]) for t in range(4)])
    np.testing.assert_allclose(alone, got[:4], rtol=0, atol=2e-6)  # nor does who else is there
    others = run(np.concatenate([x[:8], np.full((TOKENS - 8, MODEL), np.nan, np.float32)]))
    np.testing.assert_allclose(others[:8], got[:8], rtol=0, atol=1e-6)  # nor what padding holds
    for tensor in (2, 4):
        assert error(build(config, where, checkpoint, tensor=tensor)(x), want) < TOLERANCE
    assert error(build(config, where, checkpoint, quantization="int8")(x), want) < 0.03


def test_bfloat16_stays_close():
    experts = config_of()
    config, where, rng = model(experts), names(experts), np.random.default_rng(2)
    checkpoint = tensors(experts, where, rng)
    x = np.asarray(jnp.asarray(rng.standard_normal((TOKENS, MODEL)), jnp.bfloat16).astype("float32"))
    want = oracle(config, where, checkpoint, x)
    for tensor in (1, 2):
        assert error(build(config, where, checkpoint, dtype="bfloat16", tensor=tensor)(x), want) < 0.01


def test_rows_are_sorted_by_expert_and_find_their_way_back():
    chosen = jnp.asarray([[3, 1], [1, 0], [3, 0]], jnp.int32)
    order = in_order(chosen, 5)
    assert order.expert.tolist() == [0, 0, 1, 1, 3, 3]
    assert order.token.tolist() == [1, 2, 0, 1, 0, 2]
    assert order.row.tolist() == [[4, 2], [3, 0], [5, 1]]
    assert order.sizes.tolist() == [2, 2, 0, 2, 0]


def test_parameters_read_what_their_part_needs():
    """A device that holds a quarter of F and two experts reads nothing else of the checkpoint."""

    class Counting(Tensors):
        values = 0

        def read(self, name, index=()):
            part = super().read(name, index)
            self.values += part.size
            return part

    for stacked in (False, True):
        experts = config_of(bias=stacked)
        where = names(experts, stacked=stacked)
        checkpoint = Counting(tensors(experts, where, np.random.default_rng(3)))
        gate_up, down = where.weights(model(experts), 4)
        for parameter, part in ((gate_up[2], (slice(8, 16), slice(0, MODEL))), (down[2], (slice(0, MODEL), slice(4, 8)))):
            checkpoint.values = 0
            whole = parameter.read(checkpoint, tuple(slice(0, n) for n in parameter.shape))
            assert checkpoint.values == whole.size
            checkpoint.values = 0
            np.testing.assert_array_equal(parameter.read(checkpoint, part), whole[part])
            assert checkpoint.values == whole[part].size


def test_pairs_come_apart():
    """Rows g0 u0 g1 u1 .. for two devices: g0 g1 u0 u1 | g2 g3 u2 u3, whatever part is asked for."""
    rows = np.arange(8, dtype=np.float32)
    parameter = pairs_apart(plain("w", (8,), ("ffn",)), 2)
    for begin in range(8):
        for end in range(begin + 1, 9):
            got = parameter.read(Tensors(w=rows), (slice(begin, end),))
            assert got.tolist() == [0, 2, 1, 3, 4, 6, 5, 7][begin:end]


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "clamped_swiglu"])
def test_gates_are_what_they_are_called(activation):
    config = dataclasses.replace(model(config_of()), activation=activation, swiglu_limit=1.5)
    g, u = np.random.default_rng(4).standard_normal((2, 50)) * 3
    got = gate(jnp.asarray(g, jnp.float32), jnp.asarray(u, jnp.float32), config)
    np.testing.assert_allclose(got, activate(config, g, u), rtol=1e-5, atol=1e-6)
    assert gate(jnp.ones(2, jnp.bfloat16), jnp.ones(2, jnp.bfloat16), config).dtype == jnp.bfloat16


def test_widths_of_experts_must_divide():
    layout = Layout.build(LayoutConfig(mesh={"tensor": 4}, rules={"ffn": "tensor"}))

    def with_width(width: int, dense: bool, ffn: int = 50) -> ModelConfig:
        return model(config_of(intermediate_size=width), intermediate_size=ffn, layers=(LayerConfig(dense=dense),))

    layout.check(with_width(16, dense=False))  # no layer has the other width
    with pytest.raises(LayoutError, match=r"experts\.intermediate_size 18 is not divisible by 4 ranks"):
        layout.check(with_width(18, dense=False))
    with pytest.raises(LayoutError, match=r"layout: intermediate_size 50 is not divisible by 4 ranks"):
        layout.check(with_width(16, dense=True))


@pytest.mark.parametrize(("shape", "parts", "quantization", "inputs_first"), [
    ((5760, 2880), 1, None, True), ((2880, 5760), 1, None, False), ((2048, 768), 4, None, True),
    ((1024, 512), 1, None, False), ((5760, 2880), 1, "int8", False)])
def test_on_a_tpu_a_device_part_lies_along_the_axis_that_fills_lanes(monkeypatch, shape, parts, quantization, inputs_first):
    """Else XLA copies all experts of a layer for the kernel in every call."""
    monkeypatch.setattr(Layout, "platform", property(lambda layout: "tpu"))
    layout = Layout.build(LayoutConfig(mesh={"tensor": parts}))
    weight = plain("w", shape, (None, "ffn"))
    linear = ExpertLinear([weight, weight], None, layout, Precision.of("bfloat16", quantization))
    assert linear.inputs_first == inputs_first
    assert linear.kernel.get_value().shape == (2, *(shape[::-1] if inputs_first else shape))
