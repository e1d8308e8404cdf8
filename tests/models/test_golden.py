"""Every tiny checkpoint of tests/data against transformers' logits (cases C21, C23, C24, C25, C27, C29)."""

import dataclasses
import shutil

import numpy as np
import pytest

from jinfer.errors import CheckpointError, LayoutError
from jinfer.models import FAMILIES
from jinfer.weights import open_checkpoint
from jinfer.weights.hf_config import read_hf_config
from tests.engines import DATA, golden
from tests.models.forward import forward, forward_all

NAMES = sorted(p.name.removeprefix("logits_").removesuffix(".json") for p in (DATA / "golden").glob("logits_*.json"))


def _log_softmax(x):
    x = x.astype(np.float64)
    return x - np.log(np.exp(x - x.max(-1, keepdims=True)).sum(-1, keepdims=True)) - x.max(-1, keepdims=True)


def _compare(logits, prompt, tolerance=1e-3):
    ids = prompt["ids"]
    assert np.abs(logits[-1] - np.array(prompt["last_logits"])).max() <= tolerance
    got = _log_softmax(logits)[np.arange(len(ids) - 1), ids[1:]]
    assert np.abs(got - np.array(prompt["prompt_logprobs"][1:])).max() <= 2 * tolerance


@pytest.mark.parametrize("name", NAMES)
def test_logits_equal_transformers(name, tmp_path):
    folder = DATA / "models" / name
    checkpoint = open_checkpoint(folder)
    shutil.copy(folder / "config.v5.json", tmp_path / "config.json")
    assert read_hf_config(tmp_path) == checkpoint.config  # so that these are the other spelling's logits too
    prompts = list(golden(f"logits_{name}")["prompts"].values())
    logits = forward_all(checkpoint.config, checkpoint.reader, [prompt["ids"] for prompt in prompts], quick=True)
    for got, prompt in zip(logits, prompts, strict=True):
        _compare(got, prompt)


def test_every_tiny_model_has_its_golden():
    models = {path.parent.name for path in (DATA / "models").glob("*/config.v5.json")}
    assert models == set(NAMES)
    assert {open_checkpoint(DATA / "models" / name).config.family for name in models} == set(FAMILIES)


@pytest.mark.parametrize(("name", "tensor"), [
    ("llama_plain", 2), ("llama_plain", 4), ("llama_kv1", 2), ("llama_kv1", 4), ("llama_bias", 2), ("llama_tied", 4),
    ("qwen3", 2), ("gemma", 4), ("gemma2", 2), ("phi4", 2), ("olmo2", 4), ("mixtral", 4),
    ("qwen3_moe_norm", 2), ("gpt_oss_mxfp4", 4), ("deepseek_v2", 4), ("deepseek_v3", 2)])
def test_tensor_parallel_logits(name, tensor):
    checkpoint = open_checkpoint(DATA / "models" / name)
    prompt = golden(f"logits_{name}")["prompts"]["short"]
    _compare(forward(checkpoint.config, checkpoint.reader, prompt["ids"], tensor=tensor, quick=True), prompt, 2e-3)


@pytest.mark.parametrize("tensor", [3, 8])
def test_impossible_degrees_are_refused_with_both_numbers(tensor):
    checkpoint = open_checkpoint(DATA / "models" / "llama_plain")
    with pytest.raises(LayoutError, match=rf"4 query heads and 2 kv heads .* {tensor} ranks; possible: 1, 2, 4"):
        forward(checkpoint.config, None, [1, 2], tensor=tensor)


def test_a_tied_checkpoint_may_hold_its_head_twice():
    checkpoint = open_checkpoint(DATA / "models" / "llama_tied_extra_head")
    prompt = golden("logits_llama_tied")["prompts"]["short"]
    _compare(forward(checkpoint.config, checkpoint.reader, prompt["ids"]), prompt)


@pytest.mark.parametrize("options", [{}, {"tensor": 2}, {"quantization": "int8"}])
def test_an_untied_checkpoint_without_head_is_refused(options):
    checkpoint = open_checkpoint(DATA / "models" / "llama_untied_missing_head")
    with pytest.raises(CheckpointError, match=r"lm_head\.weight"):
        forward(checkpoint.config, checkpoint.reader, [1], **options)


def test_an_unused_bias_is_refused():
    checkpoint = open_checkpoint(DATA / "models" / "llama_bias")
    config = dataclasses.replace(checkpoint.config, mlp_bias=False)
    with pytest.raises(CheckpointError, match=r"not use: model\.layers\.0\.mlp\.down_proj\.bias"):
        forward(config, checkpoint.reader, [1])


def test_a_wrong_shape_is_refused():
    checkpoint = open_checkpoint(DATA / "models" / "llama_plain")
    config = dataclasses.replace(checkpoint.config, intermediate_size=64)
    with pytest.raises(CheckpointError, match=r"has shape \(32, 48\), the configuration asks for \(32, 64\)"):
        forward(config, checkpoint.reader, [1])


@pytest.mark.parametrize(("name", "options", "bound"), [
    ("llama_plain", {"dtype": "bfloat16"}, 0.03), ("llama_plain", {"quantization": "int8"}, 0.1),
    ("deepseek_v2", {"dtype": "bfloat16"}, 0.05), ("deepseek_v2", {"quantization": "int8"}, 0.1)])
def test_narrow_types_stay_close(name, options, bound):
    checkpoint = open_checkpoint(DATA / "models" / name)
    prompt = golden(f"logits_{name}")["prompts"]["long"]
    want = np.array(prompt["last_logits"])
    got = forward(checkpoint.config, checkpoint.reader, prompt["ids"], **options)[-1]
    assert np.linalg.norm(got - want) / np.linalg.norm(want) < bound
