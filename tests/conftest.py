"""Eight virtual CPU devices and one compilation cache for the whole suite."""

import gc
from collections.abc import Iterator
from pathlib import Path

import jax
import pytest

from tests.engines import Engines

# Before any backend starts. Compiling for an absent GPU wants CUDA's plugin left alone.
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)


@pytest.fixture(scope="module")
def engines(request: pytest.FixtureRequest) -> Iterator[Engines]:
    """Builds engines on tiny models, one a configuration; their compiled programs outlive them in the cache."""
    cache = Engines(Path(request.config.rootpath) / ".cache" / "xla")
    yield cache
    cache.close()


@pytest.fixture(autouse=True, scope="module")
def _drop_programs() -> Iterator[None]:
    """XLA:CPU maps every kernel of a program on its own, and a process may have 65,530 mappings."""
    yield
    jax.clear_caches()
    gc.collect()
