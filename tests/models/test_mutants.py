"""Each option of each family switched off: far from the golden logits, so that the golden tests can fail."""

import dataclasses
import functools

import numpy as np
import pytest

from jinfer.config import LayerConfig
from jinfer.weights import open_checkpoint
from tests.engines import DATA, golden
from tests.models.forward import forward

FAR = 0.05  # the golden tests' tolerance is 0.001


def with_rope(**changes):
    return lambda config: {"rope": dataclasses.replace(config.rope, **changes)}


def with_experts(**changes):
    return lambda config: {"experts": dataclasses.replace(config.experts, **changes)}


def with_layers(**changes):
    return lambda config: {"layers": tuple(dataclasses.replace(layer, **changes) for layer in config.layers)}


def set_to(**changes):
    return lambda config: changes


def longer_factors(config):
    more = {name: (*getattr(config.rope, name), 1.0) for name in ("short_factors", "long_factors")}
    return {"rope": dataclasses.replace(config.rope, partial=1.0, **more)}


# model, what is switched off, and tensors that then are of no use
MUTANTS = [
    ("llama_plain", set_to(norm_eps=1e-2), ""),
    ("llama_bias", set_to(qkv_bias=False, o_bias=False), "attn.*bias"),
    ("llama_bias", set_to(mlp_bias=False), "mlp.*bias"),
    ("llama_theta5e5", with_rope(theta=1e4), ""),
    ("llama_linear", with_rope(kind="default"), ""),
    ("llama_llama3", with_rope(kind="default"), ""),
    ("llama_yarn", with_rope(kind="default"), ""),
    ("llama_yarn_attention_factor", with_rope(attention_factor=None), ""),
    ("llama_yarn_betas", with_rope(beta_fast=32.0, beta_slow=1.0), ""),
    ("llama_yarn_mscale_pair", with_rope(mscale=None), ""),
    ("mistral", with_layers(window=None), ""),
    ("mistral", with_layers(window=9), ""),
    ("qwen2", set_to(qkv_bias=False), "attn.*bias"),
    ("qwen3", set_to(qk_norm=None), "attn.*norm"),
    ("gemma", set_to(family="llama"), ""),  # norms without the one, embeddings not scaled
    ("gemma", set_to(activation="silu"), ""),
    ("gemma2", set_to(attention_soft_cap=None), ""),
    ("gemma2", set_to(final_soft_cap=None), ""),
    ("gemma2", set_to(query_scale=None), ""),
    ("gemma2", with_layers(window=None), ""),
    ("gemma3", lambda config: {"local_rope": config.rope}, ""),
    ("gemma3", set_to(qk_norm=None), "attn.*norm"),
    ("gemma3_linear", with_rope(kind="default"), ""),
    ("phi3_partial", with_rope(partial=1.0), ""),
    ("phi3_longrope", lambda config: with_rope(long_factors=config.rope.short_factors)(config), ""),
    ("phi3_longrope", with_rope(attention_factor=1.0), ""),
    ("phi4", longer_factors, ""),
    ("olmo2", set_to(qk_norm=None), "attn.*norm"),
    ("mixtral", with_experts(normalise=False), ""),
    ("qwen3_moe_norm", with_experts(normalise=False), ""),
    ("gpt_oss", set_to(sinks=False), "attn.*sinks"),
    ("gpt_oss", set_to(swiglu_limit=1e9), ""),
    ("gpt_oss", with_experts(router_bias=False), "router.*bias"),
    ("gpt_oss", with_experts(bias=False), "experts.*bias"),
    ("gpt_oss", with_rope(truncate=True), ""),
    ("deepseek_v2", with_experts(groups=1, active_groups=1), ""),
    ("deepseek_v2", with_experts(group_score="top2"), ""),
    ("deepseek_v2", with_experts(shared=0), "mlp.*shared"),
    ("deepseek_v2", set_to(query_scale=None), ""),
    ("deepseek_v3", with_experts(scale=1.0), ""),
    ("deepseek_v3", with_experts(scoring="softmax"), ""),
    ("deepseek_v3", with_experts(selection_bias=False), "gate.*bias"),
    ("deepseek_v3", with_rope(interleaved=False), ""),
]


class Hiding:
    """A reader that does not show tensors with both parts of `useless` ("attn.*bias") in their names."""

    def __init__(self, reader, useless):
        self.reader, self.parts = reader, useless.split(".*")
        self.shape, self.read = reader.shape, reader.read

    def names(self):
        return [name for name in self.reader.names() if not (self.parts[0] and all(p in name for p in self.parts))]


@functools.cache
def checkpoint(name):
    return open_checkpoint(DATA / "models" / name)


@pytest.mark.parametrize(("name", "change", "useless"), MUTANTS,
                         ids=[f"{name}-{i}" for i, (name, _, _) in enumerate(MUTANTS)])
def test_an_option_switched_off_changes_the_logits(name, change, useless):
    found = checkpoint(name)
    config = dataclasses.replace(found.config, **change(found.config))
    assert config != found.config
    prompt = golden(f"logits_{name}")["prompts"]["long"]
    logits = forward(config, Hiding(found.reader, useless), prompt["ids"], quick=True)
    assert np.abs(logits[-1] - np.array(prompt["last_logits"])).max() > FAR


def test_the_table_switches_off_what_transformers_mutants_do():
    """Golden files tell how far transformers' own mutants are: none of them would go unseen."""
    for path in (DATA / "golden").glob("logits_*.json"):
        for mutant, distance in golden(path.stem).get("mutants", {}).items():
            assert max(distance.values()) > FAR, (path.stem, mutant)


def test_every_kind_of_layer_is_in_some_model():
    kinds = {kind for name in {name for name, _, _ in MUTANTS} for kind in checkpoint(name).config.layers}
    assert {LayerConfig(), LayerConfig(dense=True), LayerConfig(window=8)} <= kinds
    assert any(kind.local_rope for kind in kinds)
