"""GGUF metadata -> ModelConfig (cases C21, C25)."""

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from jinfer.config.model import RopeConfig
from jinfer.errors import CheckpointError, ConfigError
from jinfer.models.rope import inverse_frequencies
from jinfer.weights import open_checkpoint
from jinfer.weights.hf_config import read_hf_config
from tests.weights.gguf_files import LLAMA_PLAIN, write_gguf, write_llama

MODELS = Path(__file__).parents[1] / "data/models"
PLAIN = load_file(MODELS / "llama_plain/model.safetensors")
WIDE = {"token_embd.weight": np.zeros((300, 256), np.float32)}
WIDE_KEYS = LLAMA_PLAIN | {"llama.embedding_length": 256, "llama.attention.head_count": 2,
                           "llama.rope.dimension_count": 128, "llama.rope.freq_base": 500000.0,
                           "llama.context_length": 131072}


def config_of(path):
    return open_checkpoint(path).config


def test_equals_the_hugging_face_configuration(tmp_path):
    for name in ("llama_plain", "llama_bias", "llama_tied"):
        arrays = load_file(MODELS / name / "model.safetensors")
        path, _ = write_llama(tmp_path / f"{name}.gguf", arrays)
        got, want = config_of(path), read_hf_config(MODELS / name)
        assert got.norm_eps == pytest.approx(want.norm_eps)  # stored as float32
        for field in want.__slots__:
            if field != "norm_eps":
                assert getattr(got, field) == getattr(want, field), (name, field)


def test_end_tokens_and_head_size(tmp_path):
    path, _ = write_llama(tmp_path / "m.gguf", PLAIN, metadata=LLAMA_PLAIN | {
        "tokenizer.ggml.eot_token_id": 258, "tokenizer.ggml.eom_token_id": 257,
        "llama.attention.key_length": 8, "llama.attention.value_length": 8,
        "llama.attention.head_count_kv": [2, 2]})
    config = config_of(path)
    assert config.eos_ids == (257, 258)
    assert (config.head_dim, config.num_kv_heads) == (8, 2)


def test_special_tokens_that_are_none(tmp_path):
    none = {"tokenizer.ggml.bos_token_id": 2**32 - 1, "tokenizer.ggml.eot_token_id": 2**32 - 1}
    path, _ = write_llama(tmp_path / "m.gguf", PLAIN, metadata=LLAMA_PLAIN | none)
    assert (config_of(path).bos_id, config_of(path).eos_ids) == (None, (257,))


def test_linear_and_yarn(tmp_path):
    def rope(**keys):
        path, _ = write_llama(tmp_path / "m.gguf", PLAIN, metadata=LLAMA_PLAIN | {
            f"llama.rope.{key.replace('__', '.')}": value for key, value in keys.items()})
        return config_of(path)

    assert rope(scaling__type="none").rope == RopeConfig(original_context=128)
    linear = rope(scaling__type="linear", scaling__factor=4.0).rope
    assert linear == RopeConfig(kind="linear", factor=4.0, original_context=128)
    assert rope(scale_linear=4.0).rope == linear
    yarn = rope(scaling__type="yarn", scaling__factor=4.0, scaling__original_context_length=32,
                scaling__yarn_beta_fast=4.0)
    assert yarn.rope == RopeConfig(kind="yarn", factor=4.0, original_context=32, beta_fast=4.0)
    assert yarn.max_context == 128
    scaled = rope(scaling__type="yarn", scaling__factor=4.0, scaling__attn_factor=2.0).rope
    assert inverse_frequencies(scaled, 8)[1] == pytest.approx(2 * 1.1386294)


@pytest.mark.parametrize(("factor", "original"), [(8.0, 8192), (32.0, 8192), (8.0, 4096)])
def test_llama3_scaling_is_recovered_from_the_stored_factors(tmp_path, factor, original):
    want = RopeConfig(theta=5e5, kind="llama3", factor=factor, original_context=original)
    plain, _ = inverse_frequencies(RopeConfig(theta=5e5), 128)
    factors = plain / inverse_frequencies(want, 128)[0]
    path = write_gguf(tmp_path / "m.gguf", WIDE | {"rope_freqs.weight": factors}, WIDE_KEYS)
    checkpoint = open_checkpoint(path)
    assert checkpoint.config.rope == want
    assert "rope_freqs.weight" not in checkpoint.reader.names()


def test_rope_factors_of_one_change_nothing(tmp_path):
    ones = np.ones(64, np.float32)
    path = write_gguf(tmp_path / "m.gguf", WIDE | {"rope_freqs.weight": ones}, WIDE_KEYS)
    assert config_of(path).rope.kind == "default"


def test_other_rope_factors_are_refused(tmp_path):
    for factors in (np.linspace(1, 4, 64, dtype=np.float32), np.full(3, 8, np.float32)):
        path = write_gguf(tmp_path / "m.gguf", WIDE | {"rope_freqs.weight": factors}, WIDE_KEYS)
        with pytest.raises(CheckpointError, match=r"rope_freqs\.weight"):
            config_of(path)


@pytest.mark.parametrize(("changes", "named"), [
    ({"llama.rope.scaling.type": "longrope"}, "longrope"),
    ({"llama.rope.scaling.surprise": 1.0}, "surprise"),
    ({"llama.expert_count": 8}, "expert_used_count: is missing"),
    ({"llama.logit_scale": 0.5}, "logit_scale"),
    ({"llama.attention.value_length": 4}, "value_length"),
    ({"llama.rope.dimension_count": 4}, "dimension_count"),
    ({"llama.attention.head_count_kv": [2, 1]}, "head_count_kv"),
    ({"llama.attention.head_count": 4.0}, "head_count"),
    ({"llama.attention.head_count": 0}, "head_count: must be positive"),
    ({"tokenizer.ggml.eos_token_id": 275}, "eos_token_id: 275 is none of 275 tokens"),
    ({"tokenizer.ggml.bos_token_id": "<s>"}, "bos_token_id: '<s>' is none"),
    ({"llama.block_count": ...}, r"block_count: is missing"),
])
def test_refusals_name_the_key(tmp_path, changes, named):
    metadata = {key: value for key, value in (LLAMA_PLAIN | changes).items() if value is not ...}
    path, _ = write_llama(tmp_path / "m.gguf", PLAIN, metadata=metadata)
    with pytest.raises(ConfigError, match=named) as caught:
        config_of(path)
    assert "\n" not in str(caught.value)


def test_other_architectures_are_refused(tmp_path):
    path = write_gguf(tmp_path / "m.gguf", {"token_embd.weight": np.zeros((2, 2), np.float32)}, {}, "gemma3")
    with pytest.raises(ConfigError, match="gemma3"):
        config_of(path)


def test_a_file_without_an_embedding_is_refused(tmp_path):
    path = write_gguf(tmp_path / "m.gguf", {"output.weight": np.zeros((2, 2), np.float32)})
    with pytest.raises(CheckpointError, match=r"token_embd\.weight"):
        config_of(path)
