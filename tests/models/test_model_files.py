"""Every file of configs/models builds, abstractly, the number of parameters that was published."""

import dataclasses
import json
import math

import jax
import pytest
from flax import nnx

from jinfer.config import LayoutConfig, ModelConfig
from jinfer.config.loading import config_names, load_config
from jinfer.models import FAMILIES, build_model
from jinfer.models.parameter import Precision
from jinfer.sharding import Layout
from jinfer.weights.hf_config import read_hf_config
from jinfer.weights.hf_write import hf_config

# Elements of all tensors of the published checkpoints, in millions; DeepSeek-V3 without its further layer,
# Gemma 3 27B without what reads images.
MILLIONS = {
    "deepseek-v2-lite": 15706.5, "deepseek-v3": 671026.4, "gemma-2-27b": 27227.1, "gemma-2-9b": 9241.7,
    "gemma-2b": 2506.2, "gemma-3-270m": 268.1, "gemma-3-27b": 27009.3, "gpt-oss-120b": 116829.2,
    "gpt-oss-20b": 20914.8, "llama-3.1-70b": 70553.7, "llama-3.1-8b": 8030.3, "llama-3.2-1b": 1235.8,
    "llama-3.2-3b": 3212.7, "llama-3.3-70b": 70553.7, "mistral-7b": 7241.7, "mistral-7b-v0.3": 7248.0,
    "mixtral-8x7b": 46702.8, "olmo-2-7b": 7298.6, "phi-3-mini-4k": 3821.1, "phi-4": 14659.5, "qwen2.5-7b": 7615.6,
    "qwen3-235b-a22b": 235093.6, "qwen3-30b-a3b": 30532.1, "qwen3-32b": 32762.1, "qwen3-8b": 8190.7,
    "smollm2-135m": 134.5,
}


def test_every_file_is_counted_and_every_family_has_one():
    assert set(config_names("models")) == set(MILLIONS)
    assert {load_config(ModelConfig, name).family for name in MILLIONS} == set(FAMILIES)


@pytest.mark.parametrize("name", MILLIONS)
def test_published_sizes(name):
    config = load_config(ModelConfig, name)
    model = build_model(config, Layout.build(LayoutConfig()), Precision.of("bfloat16", None))
    sources = {}
    for parameter in jax.tree.leaves(nnx.split(model)[1]):
        sources.update(parameter.sources)
    assert sum(math.prod(shape) for shape in sources.values()) / 1e6 == pytest.approx(MILLIONS[name], abs=0.06)
    assert len(config.layer_kinds) == config.num_layers


@pytest.mark.parametrize("name", MILLIONS)
def test_values_derived_from_others_are_those_a_reader_derives(name, tmp_path):
    config = load_config(ModelConfig, name)
    (tmp_path / "config.json").write_text(json.dumps(hf_config(config, "bfloat16")))
    read = read_hf_config(tmp_path)
    if config.rope.original_context == 0:  # of no meaning to this kind of rope
        read = dataclasses.replace(read, rope=dataclasses.replace(read.rope, original_context=0))
    if config.local_rope:
        read = dataclasses.replace(read, local_rope=config.local_rope)
    assert read == config
