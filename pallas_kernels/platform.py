"""Which implementation of an operation runs here, and on what kind of device."""

from typing import Literal

import jax

Implementation = Literal["tpu", "gpu", "reference"]


def choose(implementation: Implementation | None) -> Implementation:
    """The implementation to trace: the one asked for, else the one of the platform of the mesh.

    Inside `jax.shard_map` that is the mesh's platform, which may be a topology no device of which is here; outside,
    the default backend's.

    Raises:
      ValueError: unknown name.
    """
    if implementation is None:
        device = jax.sharding.get_abstract_mesh().abstract_device
        platform = jax.default_backend() if device is None else device.platform
        match platform:
            case "tpu":
                return "tpu"
            case "gpu" | "cuda":
                return "gpu"
            case _:
                return "reference"
    if implementation not in ("tpu", "gpu", "reference"):
        raise ValueError(f"implementation must be tpu, gpu, reference or None, got {implementation!r}")
    return implementation


def device_kind() -> str:
    """Kind of the device programs are traced for, such as 'TPU v6 lite'; 'cpu' on a CPU (interpret mode)."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return jax.devices()[0].device_kind if device is None else device.device_kind
