"""config.json -> ModelConfig: old keys, transformers 5 keys, refusals (cases C06, C21)."""

import json
import shutil
from pathlib import Path

import pytest

from jinfer.errors import ConfigError
from jinfer.weights.hf_config import read_hf_config

MODELS = Path(__file__).parents[1] / "data/models"
TWO_SPELLINGS = sorted(path.parent.name for path in MODELS.glob("*/config.v5.json"))


@pytest.fixture
def folder(tmp_path):
    """Writes llama_plain's config with changes (None removes a key); returns its folder."""

    def write(generation=None, **changes):
        config = json.loads((MODELS / "llama_plain/config.json").read_text()) | changes
        config = {key: value for key, value in config.items() if value is not ...}
        (tmp_path / "config.json").write_text(json.dumps(config))
        if generation is not None:
            (tmp_path / "generation_config.json").write_text(json.dumps(generation))
        return tmp_path

    return write


@pytest.mark.parametrize("name", TWO_SPELLINGS)
def test_old_and_new_keys_mean_the_same(name, tmp_path):
    shutil.copy(MODELS / name / "config.v5.json", tmp_path / "config.json")
    assert read_hf_config(tmp_path) == read_hf_config(MODELS / name)


def test_shapes_and_defaults():
    config = read_hf_config(MODELS / "llama_plain")
    assert (config.vocab_size, config.hidden_size, config.intermediate_size) == (275, 32, 48)
    assert config.num_layers == 2
    assert (config.num_heads, config.num_kv_heads, config.head_dim, config.max_context) == (4, 2, 8, 128)
    assert not any([config.tie_embeddings, config.qkv_bias, config.o_bias, config.mlp_bias])
    assert config.rope.kind == "default"
    assert config.layers[0].window is None
    assert (config.bos_id, config.eos_ids) == (256, (257,))


def test_explicit_head_dim_and_generation_config():
    config = read_hf_config(MODELS / "table_open")
    assert (config.head_dim, config.hidden_size, config.num_heads) == (8, 288, 2)
    assert config.eos_ids == (257, 258)


def test_eos_ids_are_united(folder):
    assert read_hf_config(folder({"eos_token_id": [9, 7]}, eos_token_id=[5, 7])).eos_ids == (9, 7, 5)


def test_biases():
    config = read_hf_config(MODELS / "llama_bias")
    assert config.qkv_bias
    assert config.o_bias
    assert config.mlp_bias


def test_theta_inside_rope_parameters_wins_over_the_default(folder):
    path = folder(rope_theta=..., rope_parameters={"rope_type": "default", "rope_theta": 5e5})
    assert read_hf_config(path).rope.theta == 5e5


def test_partial_rotary_factor_in_both_places(folder):
    assert read_hf_config(folder(partial_rotary_factor=0.5)).rope.partial == 0.5
    parameters = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25}
    assert read_hf_config(folder(rope_parameters=parameters)).rope.partial == 0.25


def test_original_context(folder):
    scaling = {"rope_type": "yarn", "factor": 4.0}
    assert read_hf_config(folder(rope_scaling=scaling)).rope.original_context == 128
    scaling["original_max_position_embeddings"] = 32
    assert read_hf_config(folder(rope_scaling=scaling)).rope.original_context == 32
    # without a factor yarn's is the ratio of the two lengths
    assert read_hf_config(folder(rope_scaling=scaling | {"factor": None})).rope.factor == 4.0
    scaling["rope_type"] = "dynamic"
    assert read_hf_config(folder(rope_scaling=scaling)).rope.original_context == 128


def test_context_grows_with_yarn_over_the_trained_length(folder):
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
    assert read_hf_config(folder(rope_scaling=scaling)).max_context == 512
    scaling["original_max_position_embeddings"] = 32
    assert read_hf_config(folder(rope_scaling=scaling)).max_context == 128


def test_mistral_window(folder):
    mistral = {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}
    assert read_hf_config(folder(**mistral, sliding_window=16)).layers[0].window == 16
    assert read_hf_config(folder(**mistral, sliding_window=None)).layers[0].window is None
    assert read_hf_config(folder(**mistral)).layers[0].window == 4096  # transformers' default
    full = read_hf_config(folder(**mistral, sliding_window=16, layer_types=["full_attention"] * 2))
    assert full.layers[0].window is None


@pytest.mark.parametrize(("changes", "named"), [
    ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel"),
    ({"architectures": ..., "model_type": "gpt2"}, "gpt2"),
    ({"hidden_act": "gelu"}, "hidden_act"),
    ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
    ({"rope_interleaved": True}, "rope_interleaved"),
    ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "longrope"),
    ({"rope_scaling": {"type": "su", "factor": 2.0}}, "su"),
    ({"rope_scaling": {"rope_type": "linear"}}, "factor"),
    ({"rope_scaling": {"rope_type": "linear", "factor": "4"}}, "factor"),
    ({"rope_scaling": {"rope_type": "linear", "factor": -1.0}}, "factor"),
    ({"rope_scaling": {"rope_type": "linear", "factor": 2.0, "short_factor": [1.0]}}, "short_factor"),
    ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor"),
    ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "rope_parameters"),
    ({"partial_rotary_factor": 0.1}, "partial_rotary_factor"),
    ({"hidden_size": ...}, "hidden_size"),
    ({"hidden_size": 33}, "head_dim"),
    ({"vocab_size": "275"}, "vocab_size"),
    ({"num_hidden_layers": True}, "num_hidden_layers"),
    ({"num_key_value_heads": 3}, "num_kv_heads"),
    ({"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
    ({"eos_token_id": "end"}, "eos_token_id"),
    ({"architectures": ["MistralForCausalLM"], "sliding_window": 8,
      "layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
])
def test_refusals_name_the_key(folder, changes, named):
    with pytest.raises(ConfigError, match=named) as caught:
        read_hf_config(folder(**changes))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["{", "[]", "\xff"])
def test_broken_json_names_the_file(tmp_path, text):
    (tmp_path / "config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigError, match=r"config\.json"):
        read_hf_config(tmp_path)


def test_absent_config(tmp_path):
    with pytest.raises(ConfigError, match=r"config\.json.*No such file"):
        read_hf_config(tmp_path)
