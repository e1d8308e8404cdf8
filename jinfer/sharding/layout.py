"""Layout: a device mesh and where each logical axis of an array lies on it."""

import dataclasses
import math
from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jinfer.config import LayoutConfig, ModelConfig
from jinfer.errors import LayoutError


@dataclasses.dataclass(frozen=True, slots=True)
class Layout:
    """A mesh and rules, logical axis -> mesh axis. Axes without a rule are replicated.

    Logical axes in use: vocab, kv_heads (with them their query heads), ffn. Hashable: modules carry it as static.
    """

    mesh: Mesh
    rules: tuple[tuple[str, str | None], ...]

    @classmethod
    def build(cls, config: LayoutConfig, devices: Sequence[jax.Device] | None = None) -> "Layout":
        """Takes the first devices the mesh needs. Raises LayoutError with both numbers if there are too few."""
        devices = jax.devices() if devices is None else devices
        wanted = math.prod(config.mesh.values())
        if wanted > len(devices):
            raise LayoutError(f"layout.mesh: needs {wanted} devices, {len(devices)} present")
        grid = np.array(devices[:wanted]).reshape(tuple(config.mesh.values()))
        return cls(Mesh(grid, tuple(config.mesh)), tuple(sorted(config.rules.items())))

    @property
    def platform(self) -> str:
        """Of the mesh's devices, which may not be attached: cpu, tpu or gpu."""
        platform = self.mesh.devices.flat[0].platform
        return "gpu" if platform == "cuda" else platform

    def spec(self, *axes: str | None) -> PartitionSpec:
        """PartitionSpec of an array with these logical axes; None is a replicated axis."""
        return PartitionSpec(*(self.mesh_axis(axis) for axis in axes))

    def sharding(self, *axes: str | None) -> NamedSharding:
        return NamedSharding(self.mesh, self.spec(*axes))

    def whole(self, x: jax.Array) -> jax.Array:
        """x, said to be replicated: between the layers' cuts the partitioner is left no choice."""
        return jax.lax.with_sharding_constraint(x, self.sharding())

    def degree(self, axis: str) -> int:
        """How many parts a logical axis is cut into."""
        name = self.mesh_axis(axis)
        return 1 if name is None else self.mesh.shape[name]

    def mesh_axis(self, axis: str | None) -> str | None:
        """The mesh axis a logical axis is cut on, None if it is replicated."""
        return dict(self.rules).get(axis) if axis else None

    def kv_heads(self, model: ModelConfig) -> int:
        """Physical kv heads: each rank needs a whole one, so they are replicated where ranks outnumber them."""
        return max(model.cache_heads, self.degree("kv_heads"))

    def padded_vocab(self, model: ModelConfig) -> int:
        """V rounded up so that every rank holds the same number of rows; the sampler masks the tail."""
        parts = self.degree("vocab")
        return -(-model.vocab_size // parts) * parts

    def check(self, model: ModelConfig) -> None:
        """Raises LayoutError, before anything is loaded, if the mesh does not divide the model."""
        parts = self.degree("kv_heads")
        kv = model.cache_heads
        if model.num_heads % parts or (kv % parts and parts % kv):
            fits = [n for n in range(1, model.num_heads + 1)
                    if model.num_heads % n == 0 and (kv % n == 0 or n % kv == 0)]
            raise LayoutError(
                f"layout: {model.num_heads} query heads and {kv} kv heads cannot be split over {parts} ranks; "
                f"possible: {', '.join(map(str, fits))}")
        parts = self.degree("ffn")
        widths = {}
        if model.experts is None or any(layer.dense for layer in model.layer_kinds):
            widths["intermediate_size"] = model.intermediate_size
        if model.experts is not None:  # the shared experts' width is a multiple of it
            widths["experts.intermediate_size"] = model.experts.intermediate_size
        for name, width in widths.items():
            if width % parts:
                raise LayoutError(f"layout: {name} {width} is not divisible by {parts} ranks")
