"""Mixtures of experts of a config.json -> ExpertsConfig."""

from typing import Any

from jinfer.config.model import ExpertsConfig, LayerConfig, layer_runs
from jinfer.weights.hf_section import Section


def mixtral_experts(main: Section) -> ExpertsConfig:
    return ExpertsConfig(count=main.integer(main.either("num_local_experts", "num_experts")),
                         active=main.integer("num_experts_per_tok", 2),
                         intermediate_size=main.integer("intermediate_size"))


def gpt_oss_experts(main: Section) -> ExpertsConfig:
    """A softmax over the chosen experts' logits: that over all, divided by the sum of the chosen."""
    return ExpertsConfig(count=main.integer(main.either("num_local_experts", "num_experts")),
                         active=main.integer(main.either("num_experts_per_tok", "experts_per_token"), 4),
                         intermediate_size=main.integer("intermediate_size"), router_bias=True, bias=True)


def qwen3_experts(main: Section, window: int | None) -> dict[str, Any]:
    """`experts` and `layers`: some layers may be dense."""
    experts = ExpertsConfig(count=main.integer(main.either("num_experts", "num_local_experts")),
                            active=main.integer("num_experts_per_tok", 8),
                            intermediate_size=main.integer("moe_intermediate_size"),
                            normalise=main.flag("norm_topk_prob", False))
    step, dense = main.integer("decoder_sparse_step", 1), main.data.get("mlp_only_layers") or []
    if not isinstance(dense, list):
        main.fail("mlp_only_layers", f"must be a list of layers, got {dense!r}")
    kinds = [LayerConfig(window=window, dense=i in dense or (i + 1) % step != 0)
             for i in range(main.integer("num_hidden_layers"))]
    if all(kind.dense for kind in kinds):
        return {"layers": (LayerConfig(window=window),)}
    return {"experts": experts, "layers": layer_runs(kinds)}


def deepseek2_experts(main: Section) -> dict[str, Any]:
    """`experts` and `layers` of DeepSeek-V2: softmax scores, the best of the best groups."""
    method = main.data.get("topk_method") or "greedy"
    if method not in ("greedy", "group_limited_greedy"):
        main.fail("topk_method", f"{method!r} is not supported; supported: greedy, group_limited_greedy")
    _only(main, "scoring_func", "softmax")
    if main.flag("norm_topk_prob", False):
        main.fail("norm_topk_prob", "is not supported: DeepSeek's own code and transformers' disagree about it")
    groups = {}
    if method == "group_limited_greedy":
        groups = {"groups": main.integer("n_group"), "active_groups": main.integer("topk_group")}
    experts = ExpertsConfig(
        count=main.integer("n_routed_experts", 64), active=main.integer("num_experts_per_tok"),
        intermediate_size=main.integer("moe_intermediate_size"), normalise=False,
        scale=main.number("routed_scaling_factor", 1.0), shared=main.count("n_shared_experts", 2, null=0), **groups)
    return _first_dense(main, experts, main.count("first_k_dense_replace", 0))


def deepseek3_experts(main: Section) -> dict[str, Any]:
    """`experts` and `layers` of DeepSeek-V3: sigmoid scores, a bias for choosing, groups by their best two."""
    _only(main, "topk_method", "noaux_tc")
    _only(main, "scoring_func", "sigmoid")
    experts = ExpertsConfig(
        count=main.integer("n_routed_experts", 256), active=main.integer("num_experts_per_tok", 8),
        intermediate_size=main.integer("moe_intermediate_size"), scoring="sigmoid",
        normalise=main.flag("norm_topk_prob", True), scale=main.number("routed_scaling_factor", 2.5),
        groups=main.integer("n_group", 8), active_groups=main.integer("topk_group", 4), group_score="top2",
        selection_bias=True, shared=main.count("n_shared_experts", 1, null=0))
    return _first_dense(main, experts, main.count("first_k_dense_replace", 3))


def _first_dense(main: Section, experts: ExpertsConfig, dense: int) -> dict[str, Any]:
    kinds = [LayerConfig(dense=i < dense) for i in range(main.integer("num_hidden_layers"))]
    if all(kind.dense for kind in kinds):
        return {}
    return {"experts": experts, "layers": layer_runs(kinds)}


def _only(main: Section, key: str, value: str) -> None:
    if main.data.get(key, value) not in (None, value):
        main.fail(key, f"{main.data[key]!r} is not supported; supported: {value}")
