"""GGUF files of every architecture: configuration and tensors as their Hugging Face folders have them."""

import dataclasses
from pathlib import Path

import gguf
import numpy as np
import pytest
from safetensors.numpy import load_file

from jinfer.config.model import ExpertsConfig, LayerConfig, RopeConfig
from jinfer.errors import CheckpointError, ConfigError
from jinfer.weights import open_checkpoint
from jinfer.weights.gguf_config import read_gguf_config
from jinfer.weights.gguf_meta import GgufHead, GgufTensor
from jinfer.weights.hf_config import read_hf_config
from tests.weights.gguf_files import write_gguf
from tests.weights.gguf_models import convert_folder

MODELS = Path(__file__).parents[1] / "data/models"
FULL = LayerConfig()
NAMES = ("llama_bias", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe_norm", "qwen3_moe_nonorm", "gemma", "gemma2",
         "gemma3", "gemma3_linear", "phi3_partial", "phi3_longrope", "phi4", "olmo2", "gpt_oss")
# What the format has no key for: llama.cpp takes the head size, and 7 for the clamp.
DIFFERS = {"gemma2": {"query_scale": 0.25}, "gemma3": {"query_scale": 0.25}, "gemma3_linear": {"query_scale": 0.25},
           "gpt_oss": {"swiglu_limit": 7.0}}
# llama.cpp has no use for this key in this architecture; it is read where a file has it.
CHANGES = {"qwen3_moe_nonorm": {"qwen3moe.expert_weights_norm": False}}


@pytest.mark.parametrize("name", NAMES)
def test_configuration_and_tensors(tmp_path, name):
    folder = MODELS / name
    checkpoint = open_checkpoint(convert_folder(tmp_path / "m.gguf", folder, changes=CHANGES.get(name)))
    assert checkpoint.config == dataclasses.replace(read_hf_config(folder), **DIFFERS.get(name, {}))
    want = load_file(folder / "model.safetensors")
    assert sorted(checkpoint.reader.names()) == sorted(want)
    rng = np.random.default_rng(0)
    for key, array in want.items():
        got = checkpoint.reader.read(key)
        assert checkpoint.reader.shape(key) == array.shape
        # 1 was added and taken off again in float32
        np.testing.assert_allclose(got, array, rtol=0, atol=1e-7 if name.startswith("gemma") else 0, err_msg=key)
        starts = [int(rng.integers(0, size)) for size in array.shape]
        index = tuple(slice(start, int(rng.integers(start, size)) + 1)
                      for start, size in zip(starts, array.shape, strict=True))
        np.testing.assert_array_equal(checkpoint.reader.read(key, index), got[index], err_msg=f"{key} {index}")
    assert checkpoint.reader.nbytes() == sum(array.nbytes for array in want.values())


def test_experts_one_by_one(tmp_path):
    """The first Mixtral files had one tensor for each expert."""
    path = convert_folder(tmp_path / "m.gguf", MODELS / "mixtral", split_experts=True)
    checkpoint = open_checkpoint(path)
    assert checkpoint.config == read_hf_config(MODELS / "mixtral")
    for key, array in load_file(MODELS / "mixtral/model.safetensors").items():
        np.testing.assert_array_equal(checkpoint.reader.read(key), array, err_msg=key)


def test_experts_stored_twice_are_refused(tmp_path):
    tensors = {"blk.0.ffn_up_exps.weight": np.zeros((2, 3, 4), np.float32),
               "blk.0.ffn_up.1.weight": np.zeros((3, 4), np.float32), "token_embd.weight": np.zeros((4, 4), np.float32)}
    path = write_gguf(tmp_path / "m.gguf", tensors, {"llama.expert_count": 2})
    with pytest.raises(CheckpointError, match=r"experts\.1\.w3\.weight is stored twice"):
        open_checkpoint(path)


def test_longrope(tmp_path):
    """An attention factor of its own, and factors that are missing or do not fit the rotating lanes."""
    whole = convert_folder(tmp_path / "m.gguf", MODELS / "phi4")
    reader = gguf.GGUFReader(whole)
    metadata = {key: field.contents() for key, field in reader.fields.items() if "." in key and key[0] != "G"}
    tensors = {tensor.name: tensor.data for tensor in reader.tensors if "rope" in tensor.name or "embd" in tensor.name}

    def read(changes, **others):
        stored = {name: value for name, value in (tensors | others).items() if value is not None}
        metadata.pop("general.architecture", None)
        return open_checkpoint(write_gguf(tmp_path / "n.gguf", stored, metadata | changes, "phi3")).config.rope

    rope = read({})
    assert (rope.kind, rope.attention_factor) == ("longrope", None)
    assert read({"phi3.rope.scaling.attn_factor": 1.5}) == dataclasses.replace(rope, attention_factor=1.5)
    assert read({"phi3.rope.scaling.type": "longrope"}) == rope
    with pytest.raises(CheckpointError, match="rope_factors_short"):
        read({}, **{"rope_factors_short.weight": None})
    with pytest.raises(CheckpointError, match=r"rope_factors_long\.weight holds 2 numbers for 3"):
        read({}, **{"rope_factors_long.weight": np.ones(2, np.float32)})


def config_of(architecture, **keys):
    """ModelConfig of metadata alone; `__` stands for a dot."""
    metadata = {"block_count": 4, "context_length": 64, "embedding_length": 16, "feed_forward_length": 24,
                "attention.head_count": 2, "attention.layer_norm_rms_epsilon": 1e-6}
    metadata |= {name.replace("__", "."): value for name, value in keys.items()}
    head = GgufHead({"general.architecture": architecture} | {
        f"{architecture}.{name}": value for name, value in metadata.items()},
        {"token_embd.weight": GgufTensor("token_embd.weight", (9, 16), 0, 0)}, 0)
    return read_gguf_config(Path("m.gguf"), head, {})


def test_what_gemma_files_leave_out():
    second = config_of("gemma2")
    assert (second.attention_soft_cap, second.final_soft_cap) == (50.0, 30.0)
    assert second.layers == (LayerConfig(window=4096), FULL)
    assert second.query_scale == pytest.approx(8**-0.5)
    third = config_of("gemma3", attention__sliding_window=512, block_count=18)
    assert (third.attention_soft_cap, third.final_soft_cap) == (None, None)
    assert [kind.window for kind in third.layer_kinds] == ([512] * 5 + [None]) * 3
    assert third.local_rope == RopeConfig(theta=10_000.0, original_context=64)
    assert config_of("gemma3").layers == (FULL,)  # some fine-tunes have no windows


@pytest.mark.parametrize(("architecture", "layers"), [("gemma2", 46), ("gemma3", 62)])
def test_queries_of_the_largest_gemmas_are_scaled_by_the_width(architecture, layers):
    keys = {"attention__key_length": 128, "attention__value_length": 128, "attention__head_count": 32,
            "embedding_length": 5376}
    assert config_of(architecture, block_count=layers, **keys).query_scale == pytest.approx(168**-0.5)
    assert config_of(architecture, block_count=layers - 1, **keys).query_scale == pytest.approx(128**-0.5)


def test_patterns_of_windows():
    def windows(pattern, architecture="gemma3"):
        config = config_of(architecture, attention__sliding_window=7, attention__sliding_window_pattern=pattern)
        return [kind.window for kind in config.layer_kinds]

    assert windows(2) == [7, None, 7, None]
    assert windows(3) == [7, 7, None, 7]
    assert windows([True, False, False, True]) == [7, None, None, 7]
    assert windows([1, 1, 0, 1], "gemma2") == [7, 7, None, 7]
    with pytest.raises(ConfigError, match="sliding_window_pattern"):
        windows([True, False])


@pytest.mark.parametrize(("architecture", "keys", "named"), [
    ("qwen2", {"attention__sliding_window": 128}, r"qwen2\.attention\.sliding_window: 128"),
    ("qwen3", {"attn_logit_softcapping": 30.0}, "attn_logit_softcapping"),
    ("olmo2", {"attention__sliding_window": 128}, "sliding_window"),
    ("gemma2", {"rope__freq_base_swa": 5000.0}, "freq_base_swa"),
    ("gemma3", {"something_new": [1, 2]}, "something_new"),
    ("qwen3moe", {"expert_count": 4, "expert_used_count": 2, "expert_gating_func": 2}, "expert_gating_func"),
    ("qwen3moe", {"expert_count": 4, "expert_used_count": 2, "expert_shared_count": 1}, "expert_shared_count"),
    ("llama", {"attention__causal": False}, "attention.causal"),
    ("phi3", {"rope__dimension_count": 7}, "dimension_count"),
    ("qwen3", {"rope__scaling__attn_factor": 1.5}, "attn_factor"),
    ("mamba", {}, r"'mamba' is not supported; supported: llama, qwen2,"),
])
def test_refusals_name_the_key(architecture, keys, named):
    with pytest.raises(ConfigError, match=named) as caught:
        config_of(architecture, **keys)
    assert "\n" not in str(caught.value)


def test_what_is_switched_off_is_no_reason_to_refuse():
    config = config_of("qwen3", expert_count=0, logit_scale=1.0, attention__causal=True, use_parallel_residual=False)
    assert config.experts is None


def test_one_part_of_several_is_refused(tmp_path):
    path = write_gguf(tmp_path / "m.gguf", {"token_embd.weight": np.zeros((2, 2), np.float32)}, {"split.count": 3})
    with pytest.raises(CheckpointError, match="one of 3 parts"):
        open_checkpoint(path)


GPT_OSS = {
    "block_count": 2, "context_length": 4096, "embedding_length": 32, "feed_forward_length": 64,
    "attention.head_count": 4, "attention.head_count_kv": 2, "attention.key_length": 8, "attention.value_length": 8,
    "attention.layer_norm_rms_epsilon": 1e-5, "attention.sliding_window": 16, "rope.freq_base": 150000.0,
    "rope.scaling.type": "yarn", "rope.scaling.factor": 32.0, "rope.scaling.original_context_length": 128,
    "expert_count": 3, "expert_used_count": 2, "expert_feed_forward_length": 64, "expert_gating_func": 3,
}


def mxfp4(raw):
    """[..., 17] bytes -> [..., 32]: an exponent, then codes of e2m1, low halves first (OCP Microscaling 1.0)."""
    values = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    codes = np.concatenate([raw[..., 1:] & 15, raw[..., 1:] >> 4], -1)
    return np.where(codes & 8, -1.0, 1.0) * values[codes & 7] * 2.0 ** (raw[..., :1].astype(float) - 127)


def test_gpt_oss(tmp_path):
    rng = np.random.default_rng(3)
    kind = gguf.GGMLQuantizationType.MXFP4
    tensors, experts, biases = {"token_embd.weight": np.ones((9, 32), np.float32)}, {}, {}
    for layer in range(2):
        for part, (rows, columns) in {"gate": (64, 32), "up": (64, 32), "down": (32, 64)}.items():
            raw = rng.integers(0, 256, (3, rows, columns // 32, 17), dtype=np.uint8)
            raw[..., 0] = rng.integers(120, 130, raw.shape[:-1])
            stored = f"blk.{layer}.ffn_{part}_exps"
            tensors[f"{stored}.weight"] = (raw.reshape(3, rows, -1), kind)
            experts[layer, part] = mxfp4(raw).reshape(3, rows, columns)
            biases[layer, part] = tensors[f"{stored}.bias"] = rng.normal(size=(3, rows)).astype(np.float32)
        tensors[f"blk.{layer}.attn_sinks.weight"] = np.full(4, layer, np.float32)
        tensors[f"blk.{layer}.ffn_gate_inp.bias"] = np.arange(3, dtype=np.float32)
        tensors[f"blk.{layer}.attn_q.bias"] = np.arange(32, dtype=np.float32)
        tensors[f"blk.{layer}.post_attention_norm.weight"] = np.ones(32, np.float32)
    metadata = {f"gpt-oss.{key}": value for key, value in GPT_OSS.items()}
    checkpoint = open_checkpoint(write_gguf(tmp_path / "m.gguf", tensors, metadata, "gpt-oss"))
    config, reader = checkpoint.config, checkpoint.reader
    assert (config.family, config.sinks, config.activation) == ("gpt_oss", True, "clamped_swiglu")
    assert config.layers == (LayerConfig(window=16), FULL)
    assert config.rope == RopeConfig(theta=150000.0, kind="yarn", factor=32.0, original_context=128, truncate=False)
    assert config.experts == ExpertsConfig(count=3, active=2, intermediate_size=64, router_bias=True, bias=True)
    assert (config.qkv_bias, config.qk_norm, config.max_context) == (True, None, 4096)
    expected = {"model.embed_tokens.weight"} | {f"model.layers.{i}.{name}" for i in range(2) for name in (
        "mlp.experts.gate_up_proj", "mlp.experts.gate_up_proj_bias", "mlp.experts.down_proj",
        "mlp.experts.down_proj_bias", "self_attn.sinks", "mlp.router.bias", "self_attn.q_proj.bias",
        "post_attention_layernorm.weight")}
    assert set(reader.names()) == expected
    np.testing.assert_array_equal(reader.read("model.layers.1.self_attn.sinks"), np.full(4, 1))
    np.testing.assert_array_equal(reader.read("model.layers.1.self_attn.q_proj.bias"), np.arange(32))
    fused = np.zeros((3, 32, 128))
    fused[:, :, 0::2], fused[:, :, 1::2] = (experts[1, part].swapaxes(1, 2) for part in ("gate", "up"))
    bias = np.zeros((3, 128), np.float32)
    bias[:, 0::2], bias[:, 1::2] = biases[1, "gate"], biases[1, "up"]
    for name, want in (("gate_up_proj", fused), ("gate_up_proj_bias", bias), ("down_proj_bias", biases[1, "down"]),
                       ("down_proj", experts[1, "down"].swapaxes(1, 2))):
        name = f"model.layers.1.mlp.experts.{name}"
        assert reader.shape(name) == want.shape
        np.testing.assert_array_equal(reader.read(name), want)
        for _ in range(8):
            starts = [int(rng.integers(0, size)) for size in want.shape]
            index = tuple(slice(start, int(rng.integers(start, size)) + 1)
                          for start, size in zip(starts, want.shape, strict=True))
            np.testing.assert_array_equal(reader.read(name, index), want[index], err_msg=f"{name} {index}")
        np.testing.assert_array_equal(reader.read(name, (slice(1, 2),)), want[1:2])
