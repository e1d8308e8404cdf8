"""GGUF files of every architecture: configuration and tensors as their Hugging Face folders have them."""

import dataclasses
import math
from pathlib import Path

import gguf
import numpy as np
import pytest
from safetensors.numpy import load_file

from jinfer.config.model import ExpertsConfig, LayerConfig, ModelConfig, RopeConfig
from jinfer.errors import CheckpointError, ConfigError
from jinfer.weights import open_checkpoint
from jinfer.weights.gguf_config import read_gguf_config
from jinfer.weights.gguf_meta import GgufHead, GgufTensor
from tests.weights.gguf_files import write_gguf
from tests.weights.gguf_models import convert, convert_folder

MODELS = Path(__file__).parents[1] / "data/models"
BASE = ModelConfig(vocab_size=275, hidden_size=32, intermediate_size=48, num_layers=2, num_heads=4, num_kv_heads=2,
                   head_dim=8, max_context=128, rope=RopeConfig(original_context=128), bos_id=256, eos_ids=(257,))
LOCAL, FULL = LayerConfig(count=5, window=8, local_rope=True), LayerConfig()
GEMMA = {"head_dim": 16, "activation": "gelu_tanh", "norm_eps": 1e-6, "tie_embeddings": True, "query_scale": 0.25}
GEMMA3 = dataclasses.replace(
    BASE, **GEMMA, family="gemma3", num_layers=6, layers=(LOCAL, FULL), qk_norm="head",
    rope=RopeConfig(theta=1e6, original_context=128), local_rope=RopeConfig(original_context=128))
MOE = dataclasses.replace(BASE, family="qwen3_moe", head_dim=16, qk_norm="head",
                          experts=ExpertsConfig(count=8, active=2, intermediate_size=24))
WANTED = {
    "llama_bias": dataclasses.replace(BASE, qkv_bias=True, o_bias=True, mlp_bias=True),
    "mixtral": dataclasses.replace(BASE, family="mixtral",
                                   experts=ExpertsConfig(count=4, active=2, intermediate_size=48)),
    "qwen2": dataclasses.replace(BASE, qkv_bias=True),
    "qwen3": dataclasses.replace(BASE, head_dim=16, qk_norm="head"),
    "qwen3_moe_norm": MOE,
    # llama.cpp has no key for it in this architecture; ours is read where a file has it
    "qwen3_moe_nonorm": dataclasses.replace(MOE, experts=dataclasses.replace(MOE.experts, normalise=False)),
    "gemma2": dataclasses.replace(
        BASE, **GEMMA, family="gemma2", layers=(LayerConfig(window=8), FULL), attention_soft_cap=2.0,
        final_soft_cap=3.0),
    "gemma3": GEMMA3,
    "gemma3_linear": dataclasses.replace(
        GEMMA3, rope=RopeConfig(theta=1e6, kind="linear", factor=4.0, original_context=128)),
    "phi3_partial": dataclasses.replace(BASE, family="phi3", rope=RopeConfig(original_context=128, partial=0.5)),
}
CHANGES = {"qwen3_moe_nonorm": {"qwen3moe.expert_weights_norm": False}}


def close(config):
    """The same with the numbers that a file keeps in float32 rounded."""
    return dataclasses.replace(config, norm_eps=round(config.norm_eps, 10))


@pytest.mark.parametrize("name", WANTED)
def test_configuration_and_tensors(tmp_path, name):
    folder = MODELS / name
    checkpoint = open_checkpoint(convert_folder(tmp_path / "m.gguf", folder, changes=CHANGES.get(name)))
    assert close(checkpoint.config) == WANTED[name]
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
    assert close(checkpoint.config) == WANTED["mixtral"]
    for key, array in load_file(MODELS / "mixtral/model.safetensors").items():
        np.testing.assert_array_equal(checkpoint.reader.read(key), array, err_msg=key)


def test_experts_stored_twice_are_refused(tmp_path):
    tensors = {"blk.0.ffn_up_exps.weight": np.zeros((2, 3, 4), np.float32),
               "blk.0.ffn_up.1.weight": np.zeros((3, 4), np.float32), "token_embd.weight": np.zeros((4, 4), np.float32)}
    path = write_gguf(tmp_path / "m.gguf", tensors, {"llama.expert_count": 2})
    with pytest.raises(CheckpointError, match=r"experts\.1\.w3\.weight is stored twice"):
        open_checkpoint(path)


def tiny(kind, **changes):
    config = {"model_type": kind, "num_hidden_layers": 4, "max_position_embeddings": 64, "hidden_size": 16,
              "intermediate_size": 24, "num_attention_heads": 2, "num_key_value_heads": 1, "rms_norm_eps": 1e-6,
              "rope_theta": 1e4}
    return config | changes


def test_gemma(tmp_path):
    arrays = {"model.embed_tokens.weight": np.ones((9, 16), np.float32),
              "model.layers.3.post_attention_layernorm.weight": np.full(16, -0.25, np.float32)}
    checkpoint = open_checkpoint(convert(tmp_path / "m.gguf", tiny("gemma", head_dim=12), arrays))
    assert (checkpoint.config.family, checkpoint.config.activation) == ("gemma", "gelu_tanh")
    assert (checkpoint.config.head_dim, checkpoint.config.tie_embeddings) == (12, True)
    assert checkpoint.config.query_scale is None
    for name, array in arrays.items():
        np.testing.assert_array_equal(checkpoint.reader.read(name), array)


def test_olmo2(tmp_path):
    names = [f"model.layers.1.{part}.weight" for part in (
        "post_attention_layernorm", "post_feedforward_layernorm", "self_attn.q_norm", "self_attn.k_norm")]
    arrays = {name: np.full(16, i, np.float32) for i, name in enumerate(names)}
    arrays |= {"model.embed_tokens.weight": np.ones((9, 16), np.float32),
               "model.layers.1.self_attn.q_proj.weight": np.arange(256, dtype=np.float32).reshape(16, 16)}
    checkpoint = open_checkpoint(convert(tmp_path / "m.gguf", tiny("olmo2"), arrays))
    assert (checkpoint.config.family, checkpoint.config.qk_norm) == ("olmo2", "all")
    for name, array in arrays.items():  # no rows are reordered, and nothing is added to norms
        np.testing.assert_array_equal(checkpoint.reader.read(name), array)


def test_longrope(tmp_path):
    short, long = np.linspace(1, 2, 3, dtype=np.float32), np.linspace(2, 9, 3, dtype=np.float32)
    config = tiny("phi3", hidden_size=24, partial_rotary_factor=0.5, original_max_position_embeddings=16,
                  sliding_window=20)
    factor = math.sqrt(1 + math.log(4) / math.log(16))

    def read(changes, **tensors):
        path = convert(tmp_path / "m.gguf", config, {"model.embed_tokens.weight": np.ones((9, 24), np.float32)},
                       changes={"phi3.rope.scaling.attn_factor": factor} | changes)
        reader = gguf.GGUFReader(path)
        metadata = {key: field.contents() for key, field in reader.fields.items() if not key.startswith("GGUF.")}
        stored = {"token_embd.weight": np.ones((9, 24), np.float32)} | {
            f"rope_factors_{name}.weight": value for name, value in tensors.items()}
        return open_checkpoint(write_gguf(tmp_path / "n.gguf", stored, metadata, "phi3"))

    checkpoint = read({}, short=short, long=long)
    want = RopeConfig(kind="longrope", partial=0.5, factor=4.0, original_context=16,
                      short_factors=tuple(map(float, short)), long_factors=tuple(map(float, long)))
    assert checkpoint.config.rope == want
    assert checkpoint.config.layers == (LayerConfig(window=20),)
    assert checkpoint.config.max_context == 64
    assert checkpoint.reader.names() == ["model.embed_tokens.weight"]
    other = read({"phi3.rope.scaling.attn_factor": 1.5, "phi3.rope.scaling.type": "longrope"}, short=short, long=long)
    assert other.config.rope == dataclasses.replace(want, attention_factor=1.5)
    with pytest.raises(CheckpointError, match="rope_factors_short"):
        read({}, long=long)
    with pytest.raises(CheckpointError, match=r"rope_factors_long\.weight holds 2 numbers for 3"):
        read({}, short=short, long=long[:2])


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
