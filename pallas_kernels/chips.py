"""What the chips kernels are written for can hold and do, by JAX's device kind."""

import dataclasses

from pallas_kernels.platform import device_kind

MiB = 2**20
GiB = 2**30


@dataclasses.dataclass(frozen=True, slots=True)
class Chip:
    """One device as JAX counts them (a v5p device is two TensorCores; v4 and tpu7x devices are one of a chip's two).

    Attributes:
      vmem: bytes of VMEM a TensorCore (TPU) or of shared memory a block may use (GPU).
      smem: bytes of scalar memory (TPU only).
      cores: TensorCores or streaming multiprocessors.
      hbm: bytes of HBM a program may use: what the compiler reports for TPUs, the card's size for GPUs.
      bandwidth: bytes a second of HBM, published. flops: bfloat16 operations a second, published.
    """

    vmem: int
    smem: int
    cores: int
    hbm: int
    bandwidth: float
    flops: float


CHIPS = {
    "TPU v4": Chip(16 * MiB, MiB, 1, int(15.25 * GiB), 0.614e12, 137e12),
    "TPU v5 lite": Chip(128 * MiB, MiB, 1, int(15.75 * GiB), 0.819e12, 197e12),
    "TPU v5": Chip(64 * MiB, MiB, 2, int(95.73 * GiB), 2.765e12, 459e12),
    "TPU v6 lite": Chip(128 * MiB, MiB, 1, int(31.24 * GiB), 1.638e12, 918e12),
    "TPU7x": Chip(64 * MiB, MiB, 1, int(94.74 * GiB), 3.69e12, 1153e12),
    "NVIDIA A100-SXM4-80GB": Chip(163 * 1024, 0, 108, 80 * 10**9, 2.039e12, 312e12),
    "NVIDIA H100 80GB HBM3": Chip(227 * 1024, 0, 132, 80 * 10**9, 3.35e12, 989e12),
    "NVIDIA H200": Chip(227 * 1024, 0, 132, 141 * 10**9, 4.8e12, 989e12),
}
# What an unknown device surely has: kernels that fit here fit anywhere.
SMALLEST_TPU = Chip(16 * MiB, MiB, 1, 8 * GiB, 0.8e12, 190e12)
SMALLEST_GPU = Chip(99 * 1024, 0, 64, 16 * 10**9, 0.9e12, 120e12)


def chip(kind: str) -> Chip:
    """The chip of a device kind; an unknown kind gets the smallest of its maker's."""
    return CHIPS.get(kind) or (SMALLEST_GPU if "NVIDIA" in kind else SMALLEST_TPU)


def local_chip() -> Chip:
    """The chip programs are traced for: the mesh's inside `jax.shard_map`, else the default backend's."""
    return chip(device_kind())
