"""Every llama checkpoint of tests/data against transformers' logits (cases C21, C24, C25, C29)."""

import dataclasses
import shutil

import numpy as np
import pytest

from jinfer.config import LayerConfig
from jinfer.errors import CheckpointError, LayoutError
from jinfer.weights import open_checkpoint
from tests.engines import DATA, golden
from tests.models.forward import forward

NAMES = sorted(p.name.removeprefix("logits_").removesuffix(".json") for p in (DATA / "golden").glob("logits_llama_*.json"))


def _log_softmax(x):
    x = x.astype(np.float64)
    return x - np.log(np.exp(x - x.max(-1, keepdims=True)).sum(-1, keepdims=True)) - x.max(-1, keepdims=True)


def _compare(logits, prompt, tolerance=1e-3):
    ids = prompt["ids"]
    assert np.abs(logits[-1] - np.array(prompt["last_logits"])).max() <= tolerance
    got = _log_softmax(logits)[np.arange(len(ids) - 1), ids[1:]]
    assert np.abs(got - np.array(prompt["prompt_logprobs"][1:])).max() <= 2 * tolerance


@pytest.mark.parametrize("spelling", ["config.json", "config.v5.json"])
@pytest.mark.parametrize("name", NAMES)
def test_logits_equal_transformers(name, spelling, tmp_path):
    folder = DATA / "models" / name
    if spelling != "config.json":
        shutil.copytree(folder, tmp_path / "model")
        folder = tmp_path / "model"
        (folder / "config.v5.json").replace(folder / "config.json")
    checkpoint = open_checkpoint(folder)
    for prompt in golden(f"logits_{name}")["prompts"].values():
        _compare(forward(checkpoint.config, checkpoint.reader, prompt["ids"]), prompt)


@pytest.mark.parametrize(("name", "tensor"), [
    ("llama_plain", 2), ("llama_plain", 4), ("llama_kv1", 2), ("llama_kv1", 4), ("llama_bias", 2), ("llama_tied", 4)])
def test_tensor_parallel_logits(name, tensor):
    checkpoint = open_checkpoint(DATA / "models" / name)
    prompt = golden(f"logits_{name}")["prompts"]["short"]
    _compare(forward(checkpoint.config, checkpoint.reader, prompt["ids"], tensor=tensor), prompt, 2e-3)


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


@pytest.mark.parametrize(("options", "bound"), [({"dtype": "bfloat16"}, 0.03), ({"quantization": "int8"}, 0.1)])
def test_narrow_types_stay_close(options, bound):
    checkpoint = open_checkpoint(DATA / "models" / "llama_plain")
    prompt = golden("logits_llama_plain")["prompts"]["long"]
    want = np.array(prompt["last_logits"])
    got = forward(checkpoint.config, checkpoint.reader, prompt["ids"], **options)[-1]
    assert np.linalg.norm(got - want) / np.linalg.norm(want) < bound


@pytest.mark.parametrize("change", [
    {"qkv_bias": False, "o_bias": False}, {"norm_eps": 1e-2}, {"layers": (LayerConfig(window=8),)}])
def test_options_change_the_logits(change):
    """A mutant of each option is far from the golden values, so the tests above can fail."""
    name = "llama_bias" if "qkv_bias" in change else "llama_plain"
    checkpoint = open_checkpoint(DATA / "models" / name)
    prompt = golden(f"logits_{name}")["prompts"]["long"]
    config = dataclasses.replace(checkpoint.config, **change)

    class Without:  # a reader that hides the tensors the mutant does not use
        shape, read = checkpoint.reader.shape, checkpoint.reader.read

        @staticmethod
        def names():
            return [n for n in checkpoint.reader.names() if config.qkv_bias or not (n.endswith(".bias") and "attn" in n)]

    logits = forward(config, Without(), prompt["ids"])
    assert np.abs(logits[-1] - np.array(prompt["last_logits"])).max() > 0.05
