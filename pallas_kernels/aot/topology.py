"""Devices of a TPU slice or of GPUs that are not attached: good for compiling, not for running."""

import math
import os
from typing import Any

from jax.experimental import topologies

CHIPS_PER_HOST = 4


def tpu_devices(name: str) -> list[Any]:
    """Devices of a slice such as v5e:2x4, v6e:1x1, v5p:2x2x1, tpu7x:1x1x1 (needs the libtpu package)."""
    # libtpu asks the cloud's metadata server what it runs on and locks the machine's TPU: there is none.
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    sides = [int(side) for side in name.partition(":")[2].split("x")]
    # A slice smaller than a host has to say so, at least to older libtpu.
    bounds: dict[str, Any] = {}
    if math.prod(sides) < CHIPS_PER_HOST:
        bounds["chips_per_host_bounds"] = (*sides, *[1] * (3 - len(sides)))
    return list(topologies.get_topology_desc(topology_name=name, platform="tpu", **bounds).devices)


def gpu_devices(target_config: str, count: int = 1) -> list[Any]:
    """`count` GPUs of the kind a text proto describes (needs the jax-cuda13-plugin and jax-cuda13-pjrt packages).

    Raises:
      RuntimeError: JAX may use CUDA itself in this process, or has no plugin for it.
    """
    try:
        return list(topologies.get_topology_desc(
            topology_name="", platform="cuda", topology=f"1x1x{count}", target_config=target_config).devices)
    except NotImplementedError as error:
        raise RuntimeError("compiling for a GPU that is not here needs jax_platforms=cpu (or JAX_PLATFORMS=cpu), and "
                           f"the packages jax-cuda13-plugin and jax-cuda13-pjrt: {error}") from error
