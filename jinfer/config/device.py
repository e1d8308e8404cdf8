"""DeviceConfig: what a device holds and does a second, for plans and simulations of devices that are not here."""

import dataclasses
from typing import Literal

from jinfer.errors import ConfigError


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EfficiencyConfig:
    """Shares of the published rates that programs reach, 0..1. docs/simulator.md says where the defaults come from.

    Attributes:
      compute: of matrix products of prefill. attention: of the arithmetic of attention over pages.
      bandwidth: of reading weights and KV. interconnect: of collectives. link: of copies from and to the host.
    """

    compute: float = 0.55
    attention: float = 0.5
    bandwidth: float = 0.75
    interconnect: float = 0.6
    link: float = 0.8

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if not 0.0 < value <= 1.0:
                raise ConfigError(f"{field.name}: must be in (0, 1], got {value!r}")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DeviceConfig:
    """One device as JAX counts them. Rates are a second.

    Attributes:
      kind: JAX's device kind. platform: decides types and padding of KV pages.
      memory: bytes a program may use. bandwidth: bytes of memory read.
      flops: bfloat16 operations (float32 on a CPU). int8_flops: int8 operations; None: no faster than flops.
      interconnect: bytes a device sends to the others of its mesh; None: there is one device only.
      interconnect_latency: seconds a collective takes however small it is.
      host_link: bytes between device and host memory, one way. network: bytes from one engine's devices to another's.
      reserve: bytes of a device that neither weights nor KV get: state, temporaries.
      call_seconds: a program takes more than its arithmetic, however small it is.
      host_seconds: planning, dispatching and reading a step, on the host.
    """

    kind: str
    platform: Literal["tpu", "gpu", "cpu"]
    memory: float
    bandwidth: float
    flops: float
    int8_flops: float | None = None
    interconnect: float | None = None
    interconnect_latency: float = 5e-6
    host_link: float = 16e9
    network: float = 10e9
    reserve: float = 0.25 * 2**30
    call_seconds: float = 1e-4
    host_seconds: float = 5e-4
    efficiency: EfficiencyConfig = EfficiencyConfig()

    def __post_init__(self) -> None:
        for name in ("memory", "bandwidth", "flops", "int8_flops", "interconnect", "host_link", "network"):
            value = getattr(self, name)
            if value is not None and not 0.0 < value < float("inf"):
                raise ConfigError(f"device.{name}: must be positive, got {value!r}")
        for name in ("interconnect_latency", "reserve", "call_seconds", "host_seconds"):
            if not 0.0 <= getattr(self, name) < float("inf"):
                raise ConfigError(f"device.{name}: must be 0 or more, got {getattr(self, name)!r}")

    def peak(self, int8: bool) -> float:
        """Operations a second of matrix products with int8 or plain weights."""
        return self.int8_flops or self.flops if int8 else self.flops


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ProfileConfig:
    """Step times measured on an engine, as coefficients in seconds.

    Attributes:
      prefill: of a call, of a token, of a (query, position it sees) pair.
      decode: of a step, of a row, of a position a row sees.
      engine: the configuration it was measured with, for readers.
    """

    prefill: tuple[float, ...]
    decode: tuple[float, ...]
    engine: str = ""

    def __post_init__(self) -> None:
        for name in ("prefill", "decode"):
            values = getattr(self, name)
            if len(values) != 3 or min(values) < 0 or not sum(values) > 0:
                raise ConfigError(f"profile.{name}: must be three numbers of at least 0, not all 0, got {values!r}")
