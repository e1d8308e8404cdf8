"""Makes tiny random checkpoints of model families below tests/data, with transformers' float32 logits as goldens.

Run by hand, in an environment of its own (jinfer itself never imports torch or transformers):

    python -m venv /tmp/golden && /tmp/golden/bin/pip install torch==2.13.0 transformers==5.24.0
    /tmp/golden/bin/python scripts/make_tiny_models.py tests/data [NAME ...]

Each model gets models/NAME/{config.json, config.v5.json, model.safetensors}: the keys of files on the Hub, those
transformers 5 writes, and tensors under the names of public checkpoints. golden/logits_NAME.json holds, for two
prompts, the last logits, the prompt's log-probabilities, 16 greedy ids and the smallest gap between the two best
logits on the way; and for each mutant (an option switched off) how far its last logits are from the model's.
"""

import argparse
import copy
import json
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

PROMPTS = {"short": [256] + [(11 + 37 * i) % 250 for i in range(11)],
           "long": [256] + [(7 + 53 * i) % 250 for i in range(95)]}
COMMON = {"vocab_size": 275, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2,
          "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128, "rms_norm_eps": 1e-5,
          "rope_theta": 10000.0, "hidden_act": "silu", "tie_word_embeddings": True, "bos_token_id": 256,
          "eos_token_id": 257, "pad_token_id": 0, "torch_dtype": "float32"}
YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
FACTORS = {"short_factor": [1.0, 1.05, 1.2, 1.6], "long_factor": [1.1, 1.9, 3.3, 5.0]}
EAGER = {"attn_implementation": "eager", "experts_implementation": "eager"}
State = dict[str, torch.Tensor]


@dataclass
class Model:
    """config: config.json beside COMMON, None removes a key. mutants: changes of config.json (a dict) or of the
    weights (a function), each of which switches an option off."""

    architecture: str
    model_type: str
    config: dict[str, Any]
    mutants: dict[str, dict[str, Any] | Callable[[State], None]]
    pack: bool = False
    seed: int = 2
    config_file: dict[str, Any] = field(init=False)

    def __post_init__(self) -> None:
        merged = COMMON | self.config
        self.config_file = {"architectures": [self.architecture], "model_type": self.model_type} | {
            key: value for key, value in merged.items() if value is not ...}


def fill(part: str, value: float) -> Callable[[State], None]:
    def change(state: State) -> None:
        for name, tensor in state.items():
            if part in name:
                tensor.fill_(value)
    return change


GPT_OSS = {"head_dim": 16, "rope_theta": 150000.0, "rope_scaling": YARN | {
               "rope_type": "yarn", "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False},
           "sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"], "attention_bias": True,
           "num_local_experts": 4, "num_experts_per_tok": 2, "experts_per_token": 2, "swiglu_limit": 1.5,
           "initial_context_length": 32}
GPT_OSS_MUTANTS = {
    "no_window": {"layer_types": ["full_attention"] * 2},
    "all_layers_slide": {"layer_types": ["sliding_attention"] * 2},
    "no_sinks": fill(".sinks", -1e9), "no_clamp": {"swiglu_limit": 1e9}, "one_expert": {"num_experts_per_tok": 1},
    "attention_biases_dropped": fill("_proj.bias", 0.0), "router_bias_dropped": fill("router.bias", 0.0),
    "expert_biases_dropped": fill("proj_bias", 0.0),
    "yarn_truncated": {"rope_scaling": GPT_OSS["rope_scaling"] | {"truncate": True}},
    "rope_scaling_ignored": {"rope_scaling": {"rope_type": "default"}}}
LATENT = {"num_key_value_heads": 4, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8,
          "v_head_dim": 12, "rms_norm_eps": 1e-6, "moe_intermediate_size": 8, "first_k_dense_replace": 1,
          "n_routed_experts": 8, "num_experts_per_tok": 3, "n_group": 4, "topk_group": 2, "moe_layer_freq": 1,
          "attention_bias": False}
MODELS = {
    "mistral": Model("MistralForCausalLM", "mistral", {"sliding_window": 8}, {
        "no_window": {"sliding_window": None}, "window_one_wider": {"sliding_window": 9}}),
    "gemma": Model("GemmaForCausalLM", "gemma", {
        "hidden_act": "gelu", "hidden_activation": None, "head_dim": 16, "num_key_value_heads": 1,
        "rms_norm_eps": 1e-6}, {"silu": {"hidden_act": "silu"}, "norm_without_one": lambda state: [
            tensor.sub_(1.0) for name, tensor in state.items() if "norm" in name]}),
    "olmo2": Model("Olmo2ForCausalLM", "olmo2", {"tie_word_embeddings": False, "attention_bias": False}, {
        "qk_norm_of_ones": fill("_norm.weight", 1.0)}),
    "gpt_oss": Model("GptOssForCausalLM", "gpt_oss", GPT_OSS | {"intermediate_size": 16}, GPT_OSS_MUTANTS),
    "gpt_oss_mxfp4": Model("GptOssForCausalLM", "gpt_oss", GPT_OSS | {"quantization_config": {
        "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens",
                                   "lm_head"], "quant_method": "mxfp4"}}, {}, pack=True),
    "phi3_longrope": Model("Phi3ForCausalLM", "phi3", {
        "num_key_value_heads": 4, "original_max_position_embeddings": 32, "sliding_window": 24,
        "rope_scaling": {"type": "su", **FACTORS}}, {
            "no_window": {"sliding_window": None}, "rope_scaling_ignored": {"rope_scaling": None},
            "short_factors_only": {"rope_scaling": {
                "type": "longrope", "short_factor": FACTORS["short_factor"], "long_factor": FACTORS["short_factor"]}},
            "no_attention_factor": {"rope_scaling": {"type": "longrope", "attention_factor": 1.0, **FACTORS}}}),
    "phi4": Model("Phi3ForCausalLM", "phi3", {
        "original_max_position_embeddings": 32, "sliding_window": 128, "partial_rotary_factor": 0.75,
        "rope_scaling": {"type": "longrope", **{name: values[:3] for name, values in FACTORS.items()}}}, {
            "full_rotary": {"partial_rotary_factor": 1.0, "rope_scaling": {"type": "longrope", **FACTORS}},
            "rope_scaling_ignored": {"rope_scaling": None}}),
    "deepseek_v2": Model("DeepseekV2ForCausalLM", "deepseek_v2", LATENT | {
        "q_lora_rank": None, "first_k_dense_replace": 0, "topk_method": "group_limited_greedy",
        "scoring_func": "softmax", "norm_topk_prob": False, "routed_scaling_factor": 2.0, "n_shared_experts": 2,
        "rope_scaling": YARN | {"mscale": 0.9, "mscale_all_dim": 0.5, "beta_fast": 32, "beta_slow": 1}}, {
            "no_groups": {"topk_method": "greedy"}, "no_scale": {"routed_scaling_factor": 1.0},
            "rope_scaling_ignored": {"rope_scaling": None},
            "no_mscale": {"rope_scaling": YARN}, "two_experts": {"num_experts_per_tok": 2},
            "no_shared_experts": fill("shared_experts.down_proj", 0.0)}),
    "deepseek_v3": Model("DeepseekV3ForCausalLM", "deepseek_v3", LATENT | {
        "num_hidden_layers": 3, "q_lora_rank": 12, "topk_method": "noaux_tc",
        "scoring_func": "sigmoid", "norm_topk_prob": True, "routed_scaling_factor": 2.5, "n_shared_experts": 1,
        "num_nextn_predict_layers": 0,
        "rope_scaling": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0, "beta_fast": 32, "beta_slow": 1}}, {
            "no_groups": {"n_group": 1, "topk_group": 1}, "no_scale": {"routed_scaling_factor": 1.0},
            "not_renormalised": {"norm_topk_prob": False}, "not_interleaved": {"rope_interleave": False},
            "no_selection_bias": fill("e_score_correction_bias", 0.0), "rope_scaling_ignored": {"rope_scaling": None},
            "no_mscale": {"rope_scaling": YARN}, "no_shared_experts": fill("shared_experts.down_proj", 0.0)}),
}


def randomise(state: State, generator: torch.Generator) -> None:
    """Values large enough that every option shows in the logits."""
    for name, tensor in sorted(state.items()):
        noise = torch.randn(tensor.shape, generator=generator)
        if "norm" in name:
            tensor.copy_((0.0 if tensor.abs().max() == 0 else 1.0) + 0.4 * noise)  # Gemma adds the one itself
        elif "sinks" in name:
            tensor.copy_(1.0 + noise)
        elif tensor.ndim == 1 or "bias" in name:
            tensor.copy_(0.4 * noise)
        elif "embed_tokens" in name:
            tensor.copy_(0.5 * noise)
        elif "mlp.gate.weight" in name or "router.weight" in name:
            tensor.copy_(2.5 * noise / tensor.shape[-1] ** 0.5)
        elif tensor.ndim == 3 and "gate_up_proj" in name and "gpt_oss" in name:
            tensor.copy_(1.5 * noise / tensor.shape[1] ** 0.5)
        else:
            tensor.copy_(1.5 * noise / tensor.shape[-1] ** 0.5)


def pack(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[E, in, out] -> MXFP4 blocks [E, out, in / 32, 16] and scales [E, out, in / 32], both uint8."""
    grid = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    groups = tensor.transpose(1, 2).reshape(tensor.shape[0], tensor.shape[2], -1, 32)
    exponents = torch.floor(torch.log2(groups.abs().amax(-1, keepdim=True))) - 2
    scaled = groups / 2.0**exponents
    codes = (scaled.abs()[..., None] - grid).abs().argmin(-1) + 8 * (scaled < 0)
    codes = codes.to(torch.uint8)
    return codes[..., 0::2] | codes[..., 1::2] << 4, (exponents[..., 0] + 127).to(torch.uint8)


def build(config_file: dict[str, Any], state: State | None = None) -> Any:
    """transformers' model of a config.json, in float32."""
    values = {key: value for key, value in config_file.items() if key != "quantization_config"}
    scaling = values.get("rope_scaling") or {}
    if scaling.get("type") == "su":  # the first Phi-3 files' name of longrope, which transformers 5 fails on
        values["rope_scaling"] = scaling | {"type": "longrope"}
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(values))
        config = AutoConfig.from_pretrained(folder)
    model = AutoModelForCausalLM.from_config(config, **EAGER).float().eval()
    if state is not None:
        model.load_state_dict(state)
    return model


@torch.inference_mode()
def last_logits(model: Any, ids: list[int]) -> torch.Tensor:
    return model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1]


@torch.inference_mode()
def golden(model: Any, ids: list[int]) -> dict[str, Any]:
    logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0]
    exact = copy.deepcopy(model).double()
    error = (exact(input_ids=torch.tensor([ids]), use_cache=False).logits[0] - logits).abs().max()
    assert error < 1e-4, f"float32 is off by {error}: an expert's choice is too close, take another seed"
    logprobs = torch.log_softmax(logits.double(), -1)
    greedy, gaps = list(ids), []
    for _ in range(16):
        best = last_logits(model, greedy).topk(2)
        gaps.append(float(best.values[0] - best.values[1]))
        greedy.append(int(best.indices[0]))
    return {"ids": ids, "last_logits": [round(v, 5) for v in logits[-1].tolist()],
            "prompt_logprobs": [None] + [round(float(logprobs[i, t]), 5) for i, t in enumerate(ids[1:])],
            "greedy16_nocache": greedy[len(ids):], "min_top2_gap": round(min(gaps), 5)}


def make(name: str, spec: Model, data: Path) -> None:
    torch.manual_seed(0)
    model = build(spec.config_file)
    generator = torch.Generator().manual_seed(spec.seed)
    with torch.no_grad():
        state = {key: tensor for key, tensor in model.state_dict().items() if key != "lm_head.weight"
                 or not model.config.tie_word_embeddings}
        randomise(state, generator)
    packed: State = {}
    if spec.pack:
        for key, tensor in state.items():
            if key.endswith(("experts.gate_up_proj", "experts.down_proj")):
                packed[f"{key}_blocks"], packed[f"{key}_scales"] = blocks, scales = pack(tensor)
                tensor.copy_(convert_moe_packed_tensors(blocks, scales, dtype=torch.float32))
    folder = data / "models" / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as saved:
        model.save_pretrained(saved)
        tensors = load_file(Path(saved, "model.safetensors"))
    tensors = {key: tensor for key, tensor in tensors.items() if f"{key}_blocks" not in packed} | packed
    save_file(dict(sorted(tensors.items())), folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(spec.config_file, indent=1) + "\n")
    new = {key: value for key, value in model.config.to_dict().items() if key != "transformers_version"}
    if "quantization_config" in spec.config_file:
        new["quantization_config"] = spec.config_file["quantization_config"]
    (folder / "config.v5.json").write_text(json.dumps({"architectures": [spec.architecture]} | new, indent=1) + "\n")
    if not spec.pack:  # what was written is what was meant, under the names transformers reads
        model = AutoModelForCausalLM.from_pretrained(
            folder, config=model.config, dtype=torch.float32, **EAGER).eval()
    prompts = {kind: golden(model, ids) for kind, ids in PROMPTS.items()}
    mutants = {}
    for mutant, change in spec.mutants.items():
        if isinstance(change, dict):
            other = build(spec.config_file | change, model.state_dict())
        else:
            other = copy.deepcopy(model)
            with torch.no_grad():
                change(other.state_dict())
        mutants[mutant] = {kind: round(float((last_logits(other, ids) - last_logits(model, ids)).abs().max()), 4)
                           for kind, ids in PROMPTS.items()}
    (data / "golden" / f"logits_{name}.json").write_text(
        json.dumps({"prompts": prompts, "mutants": mutants}, separators=(",", ":")) + "\n")
    size = (folder / "model.safetensors").stat().st_size
    print(f"{name}: {size} bytes, logits up to {max(map(abs, prompts['long']['last_logits']))}, mutants {mutants}")


def make_mxfp4_blocks(data: Path) -> None:
    """quant/mxfp4.json: all sixteen codes under several scales, as transformers decodes them."""
    generator = torch.Generator().manual_seed(4)
    blocks = torch.randint(0, 256, (1, 4, 2, 16), generator=generator, dtype=torch.uint8)
    blocks[0, 0, 0] = torch.arange(16, dtype=torch.uint8) * 17
    scales = torch.tensor([[[127, 120], [130, 1], [118, 200], [126, 128]]], dtype=torch.uint8)
    values = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    (data / "quant" / "mxfp4.json").write_text(json.dumps({
        "blocks": blocks.tolist(), "scales": scales.tolist(), "values": values.tolist()}) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", type=Path, help="the folder that holds models/ and golden/")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(MODELS)}; default: all")
    args = parser.parse_args()
    torch.set_num_threads(1)
    make_mxfp4_blocks(args.data)
    for name in args.names or MODELS:
        make(name, MODELS[name], args.data)


if __name__ == "__main__":
    main()
