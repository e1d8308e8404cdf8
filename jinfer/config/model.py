"""ModelConfig: the architecture of a decoder-only transformer, whatever file it was read from."""

import dataclasses
from typing import Literal

from jinfer.errors import ConfigError

RopeKind = Literal["default", "linear", "dynamic", "yarn", "llama3"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding (arXiv 2104.09864) and its context extensions.

    Attributes:
      theta: base of the geometric series of wavelengths.
      kind: `default`; `linear` (positions / factor); `dynamic` (NTK-aware base grown with the length);
        `yarn` (arXiv 2309.00071); `llama3` (Llama 3.1's wavelength bands).
      factor: context extension factor.
      original_context: context length the model was first trained on, positions.
      partial: share of each head's lanes that rotate (the first ones).
      attention_factor: yarn: multiplies cos and sin; None derives it from factor and the mscale pair.
      mscale, mscale_all_dim: yarn: DeepSeek's pair of attention scales.
      beta_fast, beta_slow: yarn: rotations that bound the ramp.
      truncate: yarn: round the ramp's bounds to whole lanes.
      low_freq_factor, high_freq_factor: llama3: bounds of the smooth band.
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


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Shapes and options of one model. Sizes are counts of elements.

    Attributes:
      family: which file of `jinfer/models` defines it (`llama`).
      vocab_size: V. hidden_size: D. intermediate_size: F. num_layers: L. num_heads: N. num_kv_heads: K.
      head_dim: H, explicit (it need not be D / N).
      max_context: longest sequence, prompt and output together, in tokens.
      tie_embeddings: the output head is the embedding table.
      qkv_bias, o_bias, mlp_bias: which projections carry a bias.
      sliding_window: tokens a query sees, itself included; None sees all.
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
    norm_eps: float = 1e-5
    tie_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    sliding_window: int | None = None
    rope: RopeConfig = RopeConfig()
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads",
                     "num_kv_heads", "head_dim", "max_context"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ConfigError(f"model.{name}: must be a positive integer, got {value!r}")
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"model.num_kv_heads: {self.num_kv_heads} does not divide num_heads {self.num_heads}")

    @property
    def group_size(self) -> int:
        """Query heads a kv head serves, G = N / K."""
        return self.num_heads // self.num_kv_heads
