"""Layouts: rules to specs, replication of kv heads, refusals."""

import pytest
from jax.sharding import PartitionSpec

from jinfer.config import LayoutConfig, ModelConfig
from jinfer.errors import ConfigError, LayoutError
from jinfer.sharding import Layout


def _model(heads: int, kv: int, **changes) -> ModelConfig:
    return ModelConfig(**{"vocab_size": 275, "hidden_size": 32, "intermediate_size": 48, "num_layers": 1, "num_heads": heads,
                          "num_kv_heads": kv, "head_dim": 8, "max_context": 64, **changes})


def _layout(tensor: int, **rules) -> Layout:
    base = {"vocab": "tensor", "kv_heads": "tensor", "ffn": "tensor"}
    return Layout.build(LayoutConfig(mesh={"tensor": tensor}, rules=base | rules))


def test_rules_become_specs():
    layout = _layout(2, vocab=None)
    assert layout.spec(None, "kv_heads", None) == PartitionSpec(None, "tensor", None)
    assert layout.spec("vocab", None) == PartitionSpec(None, None)
    assert layout.spec("unknown") == PartitionSpec(None)


@pytest.mark.parametrize(("heads", "kv", "tensor", "physical"), [(8, 4, 2, 4), (8, 2, 4, 4), (8, 1, 8, 8), (9, 3, 3, 3)])
def test_each_rank_has_whole_kv_heads(heads, kv, tensor, physical):
    layout, model = _layout(tensor), _model(heads, kv)
    layout.check(model)
    assert layout.kv_heads(model) == physical


@pytest.mark.parametrize(("heads", "kv", "tensor", "fits"), [(4, 2, 3, "1, 2, 4"), (4, 2, 8, "1, 2, 4"), (9, 3, 2, "1, 3, 9"),
                                                             (12, 4, 6, "1, 2, 4, 12")])
def test_impossible_degrees_are_refused(heads, kv, tensor, fits):
    with pytest.raises(LayoutError, match=rf"{heads} query heads and {kv} kv heads .* {tensor} ranks; possible: {fits}$"):
        _layout(tensor).check(_model(heads, kv))


def test_feed_forward_width_must_divide():
    with pytest.raises(LayoutError, match="intermediate_size 50 is not divisible by 4"):
        _layout(4).check(_model(4, 4, intermediate_size=50))


def test_the_vocabulary_is_padded_to_the_mesh():
    assert _layout(4).padded_vocab(_model(4, 4)) == 276
    assert _layout(4, vocab=None).padded_vocab(_model(4, 4)) == 275


def test_rules_must_name_axes_of_the_mesh():
    with pytest.raises(ConfigError, match=r"layout\.rules\.ffn: mesh axis 'model' is not one of tensor"):
        LayoutConfig(mesh={"tensor": 2}, rules={"ffn": "model"})
