"""config.json -> ModelConfig: old keys, transformers 5 keys, refusals (cases C06, C21)."""

import json
import math
import shutil
from pathlib import Path

import pytest

from jinfer.config.model import ExpertsConfig, LatentConfig, LayerConfig, RopeConfig
from jinfer.errors import ConfigError
from jinfer.weights.hf_config import read_hf_config

MODELS = Path(__file__).parents[1] / "data/models"
TWO_SPELLINGS = sorted(path.parent.name for path in MODELS.glob("*/config.v5.json"))


@pytest.fixture
def folder(tmp_path):
    """Writes llama_plain's config with changes (... removes a key); returns its folder."""

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


# What each tiny model's file means, beside what a plain Llama's would.
MEANS = {
    "mistral": {"family": "llama", "layers": (LayerConfig(window=8),)},
    "qwen2": {"family": "llama", "qkv_bias": True, "o_bias": False, "head_dim": 8},
    "qwen3": {"family": "llama", "qkv_bias": False, "qk_norm": "head", "head_dim": 16},
    "qwen3_moe_norm": {"family": "qwen3_moe", "qk_norm": "head", "experts": ExpertsConfig(
        count=8, active=2, intermediate_size=24)},
    "qwen3_moe_nonorm": {"experts": ExpertsConfig(count=8, active=2, intermediate_size=24, normalise=False)},
    "mixtral": {"family": "mixtral", "experts": ExpertsConfig(count=4, active=2, intermediate_size=48)},
    "gemma": {"family": "gemma", "activation": "gelu_tanh", "tie_embeddings": True, "head_dim": 16, "num_kv_heads": 1},
    "gemma2": {"family": "gemma2", "activation": "gelu_tanh", "query_scale": 24**-0.5, "attention_soft_cap": 2.0,
                   "final_soft_cap": 3.0, "layers": (LayerConfig(window=8), LayerConfig())},
    "gemma3_linear": {
        "family": "gemma3", "qk_norm": "head", "attention_soft_cap": None, "final_soft_cap": None, "query_scale": 24**-0.5,
        "layers": (LayerConfig(count=5, window=8, local_rope=True), LayerConfig()),
        "rope": RopeConfig(theta=1e6, kind="linear", factor=4.0, original_context=128),
        "local_rope": RopeConfig(theta=1e4, original_context=128)},
    "phi3_partial": {"family": "phi3", "rope": RopeConfig(partial=0.5, original_context=128)},
    "phi3_longrope": {"layers": (LayerConfig(window=24),), "max_context": 128, "rope": RopeConfig(
        kind="longrope", factor=4.0, original_context=32, short_factors=(1.0, 1.05, 1.2, 1.6),
        long_factors=(1.1, 1.9, 3.3, 5.0))},
    "olmo2": {"family": "olmo2", "qk_norm": "all"},
    "gpt_oss": {
        "family": "gpt_oss", "qkv_bias": True, "o_bias": True, "sinks": True, "activation": "clamped_swiglu", "swiglu_limit": 1.5,
        "experts": ExpertsConfig(count=4, active=2, intermediate_size=16, router_bias=True, bias=True),
        "layers": (LayerConfig(window=8), LayerConfig()),
        "rope": RopeConfig(theta=150_000.0, kind="yarn", factor=4.0, original_context=32, truncate=False)},
    "deepseek_v2": {
        "family": "deepseek", "num_kv_heads": 1, "head_dim": 16, "layers": (LayerConfig(),),
        "latent": LatentConfig(q_rank=None, kv_rank=16, nope_dim=8, rope_dim=8, value_dim=12),
        "query_scale": 0.25 * (0.1 * 0.5 * math.log(4.0) + 1.0) ** 2,
        "experts": ExpertsConfig(count=8, active=3, intermediate_size=8, normalise=False, scale=2.0, groups=4,
                              active_groups=2, shared=2),
        "rope": RopeConfig(kind="yarn", factor=4.0, original_context=32, mscale=0.9, mscale_all_dim=0.5,
                        interleaved=True)},
    "deepseek_v3": {
        "layers": (LayerConfig(dense=True), LayerConfig(count=2)),
        "latent": LatentConfig(q_rank=12, kv_rank=16, nope_dim=8, rope_dim=8, value_dim=12),
        "experts": ExpertsConfig(count=8, active=3, intermediate_size=8, scoring="sigmoid", scale=2.5, groups=4,
                              active_groups=2, group_score="top2", selection_bias=True, shared=1)},
}


@pytest.mark.parametrize("name", MEANS)
def test_options_of_each_family(name):
    config = read_hf_config(MODELS / name)
    assert {key: getattr(config, key) for key in MEANS[name]} == MEANS[name]


# Files that leave an option to the default of transformers' configuration class, or spell it otherwise:
# architecture, changes of llama_plain's file (... removes a key), what must come of it.
CASES = [
    ("LlamaForCausalLM", {"rms_norm_eps": ..., "num_key_value_heads": ...}, {"norm_eps": 1e-6, "num_kv_heads": 4}),
    ("LlamaForCausalLM", {"sliding_window": 16}, {"layers": (LayerConfig(),)}),
    ("LlamaForCausalLM", {"hidden_act": "gelu_pytorch_tanh"}, {"activation": "gelu_tanh"}),
    ("LlamaForCausalLM", {"eos_token_id": ..., "bos_token_id": None}, {"eos_ids": (2,), "bos_id": None}),
    ("LlamaForCausalLM", {"rope_parameters": {"rope_type": "default", "rope_theta": 9.0},
                          "rope_scaling": {"type": "linear", "factor": 2.0}, "rope_theta": 7.0},
     {"rope": RopeConfig(theta=7.0, kind="linear", factor=2.0, original_context=128)}),
    ("LlamaForCausalLM", {"original_max_position_embeddings": 16, "rope_scaling": {
        "type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}},
     {"rope": RopeConfig(kind="yarn", factor=4.0, original_context=16)}),
    ("MistralForCausalLM", {"num_key_value_heads": None, "attention_bias": True}, {"num_kv_heads": 4, "o_bias": False}),
    ("Qwen2ForCausalLM", {"sliding_window": 8, "max_window_layers": 1}, {"layers": (LayerConfig(),)}),
    ("Qwen2ForCausalLM", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
     {"layers": (LayerConfig(), LayerConfig(window=8))}),
    ("Qwen2ForCausalLM", {"use_sliding_window": True}, {"layers": (LayerConfig(),)}),  # 28 layers see all
    ("Qwen3ForCausalLM", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0},
     {"layers": (LayerConfig(window=8),), "head_dim": 128}),
    ("Qwen3ForCausalLM", {"attention_bias": True}, {"qkv_bias": True, "o_bias": True}),
    ("Qwen3MoeForCausalLM", {"num_experts": 8, "moe_intermediate_size": 24, "mlp_only_layers": [0]},
     {"layers": (LayerConfig(dense=True), LayerConfig()), "head_dim": 8, "experts": ExpertsConfig(
         count=8, active=8, intermediate_size=24, normalise=False)}),
    ("Qwen3MoeForCausalLM", {"num_local_experts": 8, "moe_intermediate_size": 24, "decoder_sparse_step": 2,
                             "use_sliding_window": True, "sliding_window": 8},
     {"layers": (LayerConfig(dense=True, window=8), LayerConfig(window=8))}),
    ("Qwen3MoeForCausalLM", {"num_experts": 8, "moe_intermediate_size": 24, "mlp_only_layers": [0, 1]},
     {"layers": (LayerConfig(),), "experts": None}),
    ("MixtralForCausalLM", {"num_experts": 8, "rope_theta": ..., "rms_norm_eps": ..., "sliding_window": 8},
     {"rope": RopeConfig(theta=1e6, original_context=128), "norm_eps": 1e-5, "layers": (LayerConfig(window=8),),
      "experts": ExpertsConfig(count=8, active=2, intermediate_size=48)}),
    ("GemmaForCausalLM", {"hidden_act": "gelu", "hidden_activation": None, "tie_word_embeddings": ...},
     {"activation": "gelu_tanh", "head_dim": 256, "tie_embeddings": True}),
    ("GemmaForCausalLM", {"hidden_act": ..., "eos_token_id": ...}, {"activation": "gelu_tanh", "eos_ids": (1,)}),
    ("Gemma2ForCausalLM", {}, {"layers": (LayerConfig(window=4096), LayerConfig()), "query_scale": 256**-0.5,
                               "attention_soft_cap": 50.0, "final_soft_cap": 30.0, "activation": "gelu_tanh"}),
    ("Gemma2ForCausalLM", {"attn_logit_softcapping": None, "final_logit_softcapping": None},
     {"attention_soft_cap": None, "final_soft_cap": None}),
    ("Gemma3ForCausalLM", {"rope_theta": ..., "num_hidden_layers": 7},
     {"layers": (LayerConfig(count=5, window=4096, local_rope=True), LayerConfig()),
      "rope": RopeConfig(theta=1e6, original_context=128), "local_rope": RopeConfig(theta=1e4, original_context=128)}),
    ("Gemma3ForCausalLM", {"_sliding_window_pattern": 2, "rope_local_base_freq": 500.0},
     {"layers": (LayerConfig(window=4096, local_rope=True), LayerConfig()),
      "local_rope": RopeConfig(theta=500.0, original_context=128)}),
    ("Gemma3ForCausalLM", {"vocab_size": ..., "max_position_embeddings": ..., "num_attention_heads": ...,
                           "num_key_value_heads": ...},  # as in the files of Gemma 3 4B and larger
     {"vocab_size": 262208, "max_context": 131072, "num_heads": 8, "num_kv_heads": 4}),
    ("Phi3ForCausalLM", {"rope_scaling": {"type": "yarn", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4},
                         "max_position_embeddings": 8192},
     {"rope": RopeConfig(kind="longrope", factor=2.0, original_context=4096, short_factors=(1.0,) * 4,
                         long_factors=(2.0,) * 4)}),
    ("GptOssForCausalLM", {"num_experts": 4, "experts_per_token": 2, "rope_theta": ..., "max_position_embeddings": 131072,
                           "attention_bias": ...},
     {"layers": (LayerConfig(window=128), LayerConfig()), "swiglu_limit": 7.0, "head_dim": 64, "qkv_bias": True,
      "max_context": 131072, "rope": RopeConfig(theta=150_000.0, kind="yarn", factor=32.0, original_context=4096,
                                                truncate=False)}),
    ("DeepseekV2ForCausalLM", {"num_key_value_heads": ..., "num_experts_per_tok": 6, "moe_intermediate_size": 8,
                               "n_group": 8, "topk_group": 3},
     {"query_scale": None, "latent": LatentConfig(q_rank=1536, kv_rank=512, nope_dim=128, rope_dim=64, value_dim=128),
      "experts": ExpertsConfig(count=64, active=6, intermediate_size=8, normalise=False, shared=2)}),
    ("DeepseekV3ForCausalLM", {"num_key_value_heads": ..., "moe_intermediate_size": 8, "rope_interleave": False,
                               "num_hidden_layers": 4},
     {"layers": (LayerConfig(count=3, dense=True), LayerConfig()), "rope": RopeConfig(original_context=128),
      "experts": ExpertsConfig(count=256, active=8, intermediate_size=8, scoring="sigmoid", scale=2.5, groups=8,
                               active_groups=4, group_score="top2", selection_bias=True, shared=1)}),
]


@pytest.mark.parametrize(("architecture", "changes", "means"), CASES)
def test_defaults_and_other_spellings(folder, architecture, changes, means):
    config = read_hf_config(folder(architectures=[architecture], **changes))
    assert {key: getattr(config, key) for key in means} == means


DEEPSEEK = {"num_key_value_heads": ..., "num_experts_per_tok": 6, "moe_intermediate_size": 8}


@pytest.mark.parametrize(("architecture", "changes", "named"), [
    ("GemmaForCausalLM", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
    ("Gemma2ForCausalLM", {"hidden_activation": "relu"}, "relu"),
    ("Gemma3ForCausalLM", {"rope_parameters": {"rope_type": "default"}}, r"rope_parameters\.rope_type"),
    ("Gemma3ForCausalLM", {"sliding_window": None}, "sliding_window"),
    ("Phi3ForCausalLM", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "linear"),
    ("GptOssForCausalLM", {"num_experts": 4, "swiglu_alpha": 1.5}, "swiglu_alpha"),
    ("GptOssForCausalLM", {"num_experts": 4, "hidden_act": "gelu_new"}, "hidden_act"),
    ("Qwen3MoeForCausalLM", {"moe_intermediate_size": 24}, "num_experts"),
    ("DeepseekV2ForCausalLM", DEEPSEEK | {"topk_method": "noaux_tc"}, "noaux_tc"),
    ("DeepseekV2ForCausalLM", DEEPSEEK | {"scoring_func": "sigmoid"}, "scoring_func"),
    ("DeepseekV2ForCausalLM", DEEPSEEK | {"norm_topk_prob": True}, "norm_topk_prob"),
    ("DeepseekV2ForCausalLM", DEEPSEEK | {"moe_layer_freq": 2}, "moe_layer_freq"),
    ("DeepseekV2ForCausalLM", DEEPSEEK | {"topk_method": "group_limited_greedy"}, "n_group"),
    ("DeepseekV3ForCausalLM", DEEPSEEK | {"topk_method": "greedy"}, "greedy"),
    ("DeepseekV3ForCausalLM", DEEPSEEK | {"attention_bias": True}, "attention_bias"),
    ("DeepseekV3ForCausalLM", DEEPSEEK | {"num_key_value_heads": 2}, "num_key_value_heads"),
])
def test_refusals_of_families(folder, architecture, changes, named):
    with pytest.raises(ConfigError, match=named):
        read_hf_config(folder(architectures=[architecture], **changes))


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
    mixed = read_hf_config(folder(**mistral, sliding_window=16, layer_types=["full_attention", "sliding_attention"]))
    assert [kind.window for kind in mixed.layer_kinds] == [None, 16]


@pytest.mark.parametrize(("changes", "named"), [
    ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel"),
    ({"architectures": ..., "model_type": "gpt2"}, "gpt2"),
    ({"hidden_act": "gelu"}, "hidden_act"),
    ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
    ({"rope_interleaved": True}, "rope_interleaved"),
    ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "short_factor"),
    ({"rope_scaling": {"type": "su", "factor": 2.0}}, "'su'"),
    ({"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [1.0] * 3}}, "long_factor"),
    ({"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [1, 1, 1, 0]}}, "long_factor"),
    ({"rope_scaling": [4.0]}, "rope_scaling"),
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
    ({"architectures": ["MistralForCausalLM"], "layer_types": ["full_attention"]}, "layer_types"),
    ({"architectures": ["MistralForCausalLM"], "layer_types": ["full_attention", "chunked_attention"]}, "chunked"),
    ({"architectures": ["MistralForCausalLM"], "sliding_window": None, "layer_types": ["sliding_attention"] * 2},
     "sliding_window"),
    ({"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
    ({"logit_scale": 0.5}, "logit_scale"),
    ({"clip_qkv": 8.0}, "clip_qkv"),
    ({"quantization_config": {"quant_method": "fp8"}}, "weight_block_size"),
    ({"quantization_config": {"quant_method": "fp8", "weight_block_size": [1, 1], "fmt": "e5m2"}}, "e5m2"),
    ({"quantization_config": {"quant_method": "fp8", "weight_block_size": [1, 1], "activation_scheme": "static"}},
     "static"),
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
