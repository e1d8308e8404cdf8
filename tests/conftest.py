"""Eight virtual CPU devices and one compilation cache for the whole suite."""

from pathlib import Path

import jax
import pytest

from tests.engines import Engines

jax.config.update("jax_num_cpu_devices", 8)  # before any backend starts


@pytest.fixture(scope="session")
def engines(request: pytest.FixtureRequest) -> Engines:
    """Builds engines on tiny models, one per configuration for the whole session."""
    return Engines(Path(request.config.rootpath) / ".cache" / "xla")
