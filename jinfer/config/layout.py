"""LayoutConfig and DisaggregationConfig: which devices run a model, and how its arrays lie on them."""

import dataclasses
import math

from jinfer.errors import ConfigError

LOGICAL_AXES = ("vocab", "kv_heads", "ffn")  # query heads go with their kv heads


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LayoutConfig:
    """A mesh and the rules that map logical axes of arrays onto it.

    Attributes:
      mesh: mesh axis name -> number of devices. The product is the number of devices used.
      rules: logical axis (vocab, kv_heads, ffn) -> mesh axis, or None to replicate. Axes not named
        are replicated.
    """

    mesh: dict[str, int] = dataclasses.field(default_factory=lambda: {"tensor": 1})
    rules: dict[str, str | None] = dataclasses.field(
        default_factory=lambda: {"vocab": "tensor", "kv_heads": "tensor", "ffn": "tensor"})

    def __post_init__(self) -> None:
        for axis, size in self.mesh.items():
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                raise ConfigError(f"layout.mesh.{axis}: must be a positive integer, got {size!r}")
        for logical, target in self.rules.items():
            if logical not in LOGICAL_AXES:
                raise ConfigError(f"layout.rules.{logical}: not a logical axis; known: {', '.join(LOGICAL_AXES)}")
            if target is not None and target not in self.mesh:
                raise ConfigError(
                    f"layout.rules.{logical}: mesh axis {target!r} is not one of {', '.join(self.mesh)}")

    @property
    def devices(self) -> int:
        """Devices in use."""
        return math.prod(self.mesh.values())


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DisaggregationConfig:
    """Prefill and decode as workers on device groups of their own; KV pages go over when a prompt is computed.

    The groups follow each other on the devices: those of all prefill workers, then those of all decode workers. Each
    holds the whole model and a KV pool of its own. Everything else of EngineConfig holds for each worker.

    Attributes:
      prefill, decode: mesh and sharding rules of one worker. prefill_workers, decode_workers: how many.
      transfer_gb: GiB of KV pages that may be on their way to a decode worker or wait there until it has room, kept
        free on its devices where the pool is sized from memory. What exceeds it waits in the prefill worker's pages.
    """

    prefill: LayoutConfig = dataclasses.field(default_factory=LayoutConfig)
    decode: LayoutConfig = dataclasses.field(default_factory=LayoutConfig)
    prefill_workers: int = 1
    decode_workers: int = 1
    transfer_gb: float = 1.0

    def __post_init__(self) -> None:
        for name in ("prefill_workers", "decode_workers"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ConfigError(f"disaggregation.{name}: must be a positive integer, got {value!r}")
        if not 0.0 < self.transfer_gb < float("inf"):
            raise ConfigError(f"disaggregation.transfer_gb: must be positive, got {self.transfer_gb!r}")

    @property
    def devices(self) -> int:
        """Devices in use."""
        return self.prefill_workers * self.prefill.devices + self.decode_workers * self.decode.devices
