"""A configuration that a family's code would read past is refused, naming the option."""

import pytest

from jinfer.config import ExpertsConfig, LatentConfig, LayerConfig, LayoutConfig, ModelConfig
from jinfer.config.model import RopeConfig
from jinfer.errors import ConfigError
from jinfer.models import build_model
from jinfer.models.moe import Experts
from jinfer.models.parameter import Precision
from jinfer.sharding import Layout

LATENT = LatentConfig(q_rank=None, kv_rank=8, nope_dim=8, rope_dim=4, value_dim=8)


def experts(**options) -> ExpertsConfig:
    return ExpertsConfig(**{"count": 4, "active": 2, "intermediate_size": 8, **options})


def build(family: str, **options):
    config = ModelConfig(**{
        "family": family, "vocab_size": 32, "hidden_size": 16, "intermediate_size": 16, "num_layers": 2, "num_heads": 2,
        "num_kv_heads": 2, "head_dim": 12 if "latent" in options else 8, "max_context": 32, **options})
    return build_model(config, Layout.build(LayoutConfig()), Precision.of("float32", None))


@pytest.mark.parametrize(("family", "options", "message"), [
    ("llama", {"experts": experts()}, r"model\.experts: family 'llama' has none"),
    ("mixtral", {}, r"model\.experts: family 'mixtral' needs it"),
    ("mixtral", {"experts": experts(shared=1)}, r"model\.experts\.shared: .* has none"),
    ("qwen3_moe", {"experts": experts(selection_bias=True)}, r"model\.experts\.selection_bias: .* has none"),
    ("gpt_oss", {"experts": experts(), "layers": (LayerConfig(dense=True), LayerConfig())}, r"model\.layers\.dense"),
    ("llama", {"latent": LATENT}, r"model\.latent: family 'llama' has none"),
    ("deepseek", {"experts": experts()}, r"model\.latent: family 'deepseek' needs it"),
    ("deepseek", {"latent": LATENT, "qk_norm": "head"}, r"model\.qk_norm"),
    ("deepseek", {"latent": LATENT, "sinks": True}, r"model\.sinks"),
    ("deepseek", {"latent": LATENT, "o_bias": True}, r"model\.o_bias"),
    ("deepseek", {"latent": LATENT, "head_dim": 16}, r"model\.head_dim: 16 is not .* 8 \+ rope_dim 4"),
    ("llama", {"rope": RopeConfig(interleaved=True)}, r"model\.rope\.interleaved"),
    ("llama", {"rope": RopeConfig(partial=0.4)}, r"model\.rope\.partial: 0\.4 of 8 lanes"),
    ("llama", {"rope": RopeConfig(kind="longrope", original_context=8, short_factors=(1.0,) * 4)},
     r"model\.rope\.short_factors: 4 and 0 long_factors for 4"),
])
def test_what_a_family_does_not_have_is_refused(family, options, message):
    with pytest.raises(ConfigError, match=message):
        build(family, **options)


def test_fewer_than_no_shared_experts_are_refused():
    with pytest.raises(ConfigError, match=r"model\.experts\.shared: .* got -1"):
        experts(shared=-1)


@pytest.mark.parametrize("kind", ["dynamic", "yarn", "llama3", "longrope"])
def test_a_rope_that_depends_on_the_original_context_needs_it(kind):
    with pytest.raises(ConfigError, match=rf"model\.rope\.original_context: '{kind}' needs it"):
        RopeConfig(kind=kind, factor=2.0)


@pytest.mark.parametrize(("family", "options"), [("qwen3_moe", {}), ("deepseek", {"latent": LATENT})])
def test_a_mixture_may_have_no_layer_with_experts(family, options):
    """As the readers say of a checkpoint whose layers are all dense."""
    assert not any(isinstance(block.mlp, Experts) for block in build(family, **options).blocks)


@pytest.mark.parametrize(("make", "message"), [
    (lambda: build("llama", qk_norm="heads"), r"model\.qk_norm: 'heads' is not one of None, head, all"),
    (lambda: build("llama", activation="gelu"), r"model\.activation: 'gelu'"),
    (lambda: experts(scoring="relu"), r"model\.experts\.scoring: 'relu'"),
    (lambda: RopeConfig(kind="ntk"), r"model\.rope\.kind: 'ntk'")])
def test_a_word_that_means_nothing_is_refused(make, message):
    with pytest.raises(ConfigError, match=message):
        make()
