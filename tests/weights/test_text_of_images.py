"""The language model inside a Gemma 3 that reads images too: Gemma3ForConditionalGeneration."""

import json
import shutil

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jinfer.weights import open_checkpoint
from jinfer.weights.convert import convert
from tests.engines import DATA

TEXT = DATA / "models" / "gemma3_linear"
DEFAULTS = {"vocab_size": 262_208, "num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 131_072}


@pytest.fixture(params=[("language_model.model.", ""), ("model.language_model.", "model.")], ids=["old", "new"])
def folder(request, tmp_path):
    """gemma3_linear as published checkpoints keep it: beside what reads images, under other names."""
    inside, outside = request.param
    config = json.loads((TEXT / "config.json").read_text())
    tensors = {name.replace("model.", inside, 1): value for name, value in load_file(TEXT / "model.safetensors").items()}
    for name in ("vision_tower.vision_model.post_layernorm.weight", "multi_modal_projector.mm_input_projection_weight"):
        tensors[outside + name] = np.ones(4, np.float32)
    tensors[outside + "vision_tower.position_ids"] = np.arange(4)  # of a type that no language model has
    path = tmp_path / "model"
    path.mkdir()
    save_file(tensors, path / "model.safetensors")
    special = {key: config.pop(key) for key in ("bos_token_id", "eos_token_id")}
    config.pop("architectures")
    (path / "config.json").write_text(json.dumps({
        "architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "text_config": config,
        "vision_config": {"num_hidden_layers": 2}, **special}))
    return path


def test_it_is_read_like_the_language_model_alone(folder):
    alone, inside = open_checkpoint(TEXT), open_checkpoint(folder)
    assert inside.config == alone.config
    assert sorted(inside.reader.names()) == sorted(alone.reader.names())
    for name in alone.reader.names():
        assert np.array_equal(inside.reader.read(name), alone.reader.read(name))


def test_what_its_text_config_leaves_out_is_what_transformers_assumes(folder):
    path = folder / "config.json"
    config = json.loads(path.read_text())
    for name in DEFAULTS:
        config["text_config"].pop(name, None)
    path.write_text(json.dumps(config))
    read = open_checkpoint(folder).config
    assert (read.vocab_size, read.num_heads, read.num_kv_heads, read.max_context) == tuple(DEFAULTS.values())


def test_converted_it_is_a_language_model(folder, tmp_path):
    convert(folder, tmp_path / "text", "safetensors")
    shutil.rmtree(folder)
    assert json.loads((tmp_path / "text" / "config.json").read_text())["architectures"] == ["Gemma3ForCausalLM"]
    assert open_checkpoint(tmp_path / "text").config == open_checkpoint(TEXT).config
