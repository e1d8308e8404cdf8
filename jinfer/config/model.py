"""ModelConfig: the architecture of a decoder-only transformer, whatever file it was read from."""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Literal, get_args

from jinfer.errors import ConfigError

RopeKind = Literal["default", "linear", "dynamic", "yarn", "llama3", "longrope"]
Activation = Literal["silu", "gelu_tanh", "clamped_swiglu"]
QKNorm = Literal["head", "all"]
Scoring = Literal["softmax", "sigmoid"]
GroupScore = Literal["max", "top2"]


def _check_choice(name: str, value: object, choices: tuple[object, ...]) -> None:
    if value not in choices:
        raise ConfigError(f"model.{name}: {value!r} is not one of {', '.join(map(str, choices))}")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding (arXiv 2104.09864) and its context extensions.

    Attributes:
      theta: base of the geometric series of wavelengths.
      kind: `default`; `linear` (positions / factor); `dynamic` (NTK-aware base grown with the length);
        `yarn` (arXiv 2309.00071); `llama3` (Llama 3.1's wavelength bands); `longrope` (arXiv 2402.13753).
      factor: context extension factor.
      original_context: context length the model was first trained on, positions.
      partial: share of each head's lanes that rotate (the first ones).
      attention_factor: yarn, longrope: multiplies cos and sin; None derives it from factor (and the mscale pair).
      mscale, mscale_all_dim: yarn: DeepSeek's pair of attention scales.
      beta_fast, beta_slow: yarn: rotations that bound the ramp.
      truncate: yarn: round the ramp's bounds to whole lanes.
      low_freq_factor, high_freq_factor: llama3: bounds of the smooth band.
      short_factors, long_factors: longrope: divisors of the R/2 frequencies for sequences up to original_context
        and for longer ones.
      interleaved: checkpoints pair neighbouring lanes instead of the two halves (DeepSeek); loading reorders them.
    """

    theta: float = 10_000.0
    kind: RopeKind = "default"
    factor: float = 1.0
    original_context: int = 0
    partial: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()
    interleaved: bool = False

    def __post_init__(self) -> None:
        _check_choice("rope.kind", self.kind, get_args(RopeKind))
        if not (self.theta > 0 and self.factor > 0):
            raise ConfigError(f"model.rope: theta and factor must be positive, got {self.theta!r} and {self.factor!r}")
        if self.kind in ("dynamic", "yarn", "llama3", "longrope") and self.original_context < 1:
            raise ConfigError(f"model.rope.original_context: {self.kind!r} needs it, got {self.original_context!r}")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LayerConfig:
    """How a run of layers differs from the rest of the model.

    Attributes:
      count: layers of this kind in a row.
      window: tokens a query sees, itself included; None sees all.
      local_rope: rotates with the model's local_rope instead of its rope.
      dense: in a model with experts, a feed-forward network without them.
    """

    count: int = 1
    window: int | None = None
    local_rope: bool = False
    dense: bool = False

    def __post_init__(self) -> None:
        for name, value in (("count", self.count), ("window", self.window)):
            if value is not None and (not isinstance(value, int) or value < 1):
                raise ConfigError(f"model.layers.{name}: must be a positive integer, got {value!r}")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsConfig:
    """A mixture of experts in the place of the feed-forward network (arXiv 1701.06538, 2401.06066).

    Attributes:
      count: E, routed experts. active: experts a token takes. intermediate_size: F of one expert.
      scoring: router logits become scores by a softmax over all experts, or a sigmoid of each (DeepSeek-V3).
      normalise: the taken scores are divided by their sum. scale: then multiplies them.
      groups, active_groups: experts lie in equal groups, and only the best groups are chosen from.
      group_score: a group's score: its best expert's (DeepSeek-V2) or the sum of its best two (DeepSeek-V3).
      selection_bias: a stored bias is added to scores to choose experts, not to weigh them (DeepSeek-V3).
      router_bias: router logits have a bias. bias: experts' projections have one (gpt-oss).
      shared: experts every token takes besides, as one network of shared * intermediate_size.
    """

    count: int
    active: int
    intermediate_size: int
    scoring: Scoring = "softmax"
    normalise: bool = True
    scale: float = 1.0
    groups: int = 1
    active_groups: int = 1
    group_score: GroupScore = "max"
    selection_bias: bool = False
    router_bias: bool = False
    bias: bool = False
    shared: int = 0

    def __post_init__(self) -> None:
        for name in ("count", "active", "intermediate_size", "groups", "active_groups"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ConfigError(f"model.experts.{name}: must be a positive integer, got {value!r}")
        _check_choice("experts.scoring", self.scoring, get_args(Scoring))
        _check_choice("experts.group_score", self.group_score, get_args(GroupScore))
        if not isinstance(self.shared, int) or self.shared < 0:
            raise ConfigError(f"model.experts.shared: must be an integer of at least 0, got {self.shared!r}")
        if self.count % self.groups or self.active_groups > self.groups:
            raise ConfigError(f"model.experts.groups: {self.count} experts and {self.active_groups} active groups "
                              f"do not fit {self.groups} groups")
        if self.active > self.count // self.groups * self.active_groups:
            raise ConfigError(f"model.experts.active: {self.active} is more than the experts to choose from")
        if self.group_score == "top2" and self.groups > 1 and self.count // self.groups < 2:
            raise ConfigError(f"model.experts.groups: {self.groups} groups of {self.count} experts have no best two")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LatentConfig:
    """Multi-head latent attention (arXiv 2405.04434): keys and values of all heads are one cached vector a token.

    Attributes:
      q_rank: width of the compressed query; None projects queries directly. kv_rank: R0, width of the latent.
      nope_dim, rope_dim: lanes of a query head without and with rotation. value_dim: lanes of a value head.
    """

    q_rank: int | None
    kv_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int

    def __post_init__(self) -> None:
        for name in ("q_rank", "kv_rank", "nope_dim", "rope_dim", "value_dim"):
            value = getattr(self, name)
            if (value is not None or name != "q_rank") and (not isinstance(value, int) or value < 1):
                raise ConfigError(f"model.latent.{name}: must be a positive integer, got {value!r}")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Shapes and options of one model. Sizes are counts of elements.

    Attributes:
      family: which function of `jinfer/models` builds it (`llama`, `gemma`, ...; see models.FAMILIES).
      vocab_size: V. hidden_size: D. intermediate_size: F, of dense layers. num_layers: L. num_heads: N.
      num_kv_heads: K.
      head_dim: H, explicit (it need not be D / N); of queries where attention is latent.
      max_context: longest sequence, prompt and output together, in tokens.
      layers: kinds of layers, run by run; the list starts again until there are num_layers.
      tie_embeddings: the output head is the embedding table.
      qkv_bias, o_bias, mlp_bias: which projections carry a bias.
      qk_norm: RMSNorm of queries and keys before rotation: of each head's lanes, or of all heads' together.
      query_scale: multiplies the scores; None is head_dim ** -0.5.
      attention_soft_cap, final_soft_cap: bounds of attention scores and of logits, cap * tanh(x / cap).
      sinks: each query head has a learned logit that takes part in the softmax and has no value.
      activation: of the gate: silu, gelu (tanh form), or gpt-oss's (swiglu_limit clamps gate and up).
      rope: rotary embedding; local_rope: of the layers that ask for it.
      experts: of all layers that are not dense; None has no such layer. latent: None is ordinary attention.
      bos_id, eos_ids: special token ids of the checkpoint (config and generation_config united).
    """

    family: str = "llama"
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_context: int
    layers: tuple[LayerConfig, ...] = (LayerConfig(),)
    norm_eps: float = 1e-5
    tie_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: QKNorm | None = None
    query_scale: float | None = None
    attention_soft_cap: float | None = None
    final_soft_cap: float | None = None
    sinks: bool = False
    activation: Activation = "silu"
    swiglu_limit: float = 7.0
    rope: RopeConfig = RopeConfig()
    local_rope: RopeConfig | None = None
    experts: ExpertsConfig | None = None
    latent: LatentConfig | None = None
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads",
                     "num_kv_heads", "head_dim", "max_context"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ConfigError(f"model.{name}: must be a positive integer, got {value!r}")
        _check_choice("activation", self.activation, get_args(Activation))
        _check_choice("qk_norm", self.qk_norm, (None, *get_args(QKNorm)))
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"model.num_kv_heads: {self.num_kv_heads} does not divide num_heads {self.num_heads}")
        if not self.layers:
            raise ConfigError("model.layers: must name a kind of layer")
        for layer in self.layers:
            if layer.local_rope and self.local_rope is None:
                raise ConfigError("model.local_rope: is asked for by a layer and not given")
        if self.latent and self.head_dim != self.latent.nope_dim + self.latent.rope_dim:
            raise ConfigError(f"model.head_dim: {self.head_dim} is not the latent's nope_dim {self.latent.nope_dim} + "
                              f"rope_dim {self.latent.rope_dim}")
        for name, rope in (("rope", self.rope), ("local_rope", self.local_rope)):
            lanes = int(self.rotary_dim * rope.partial) if rope else 2
            if not 0 < lanes <= self.rotary_dim or lanes % 2:
                raise ConfigError(f"model.{name}.partial: {rope and rope.partial!r} of {self.rotary_dim} lanes is not "
                                  "an even number of them")
            if rope and rope.kind == "longrope" and not (
                    len(rope.short_factors) == len(rope.long_factors) == lanes // 2):
                raise ConfigError(f"model.{name}.short_factors: {len(rope.short_factors)} and "
                                  f"{len(rope.long_factors)} long_factors for {lanes // 2} frequencies")

    @property
    def group_size(self) -> int:
        """Query heads a kv head serves, G = N / K."""
        return self.num_heads // self.num_kv_heads

    @property
    def layer_kinds(self) -> tuple[LayerConfig, ...]:
        """The kind of each of the L layers, counts unrolled."""
        once = [dataclasses.replace(layer, count=1) for layer in self.layers for _ in range(layer.count)]
        return tuple(once[i % len(once)] for i in range(self.num_layers))

    @property
    def cache_heads(self) -> int:
        """kv heads the cache holds: K, or the one latent vector."""
        return 1 if self.latent else self.num_kv_heads

    @property
    def cache_width(self) -> int:
        """Lanes of a cached head: H, or the latent's kv_rank + rope_dim."""
        return self.latent.kv_rank + self.latent.rope_dim if self.latent else self.head_dim

    @property
    def rotary_dim(self) -> int:
        """Lanes of a head that rope.partial is a share of: H, or the latent's rope_dim."""
        return self.latent.rope_dim if self.latent else self.head_dim


def layer_runs(kinds: Sequence[LayerConfig]) -> tuple[LayerConfig, ...]:
    """The shortest `layers` of a ModelConfig that unrolls to these kinds, one a layer."""
    period = next(p for p in range(1, len(kinds) + 1) if all(kinds[i] == kinds[i % p] for i in range(len(kinds))))
    return tuple(dataclasses.replace(kind, count=len(tuple(run)))
                 for kind, run in itertools.groupby(kinds[:period]))
