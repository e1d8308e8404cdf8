"""jinfer: transformer inference on JAX/XLA. `LLM`, `AsyncLLM`, `SamplingParams`, `ServiceParams`, `EngineConfig`.

Importing this loads neither JAX nor a model; both come with the first LLM.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jinfer.async_llm import AsyncLLM
    from jinfer.config import EngineConfig, SamplingParams, ServiceParams
    from jinfer.llm import LLM

__all__ = ["LLM", "AsyncLLM", "EngineConfig", "SamplingParams", "ServiceParams", "__version__"]

__version__ = "0.1.0"

_HOMES = {"LLM": "jinfer.llm", "AsyncLLM": "jinfer.async_llm", "SamplingParams": "jinfer.config",
          "ServiceParams": "jinfer.config", "EngineConfig": "jinfer.config"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'jinfer' has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
