"""ServiceParams: how urgently and under which promises one request is served."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Self

from jinfer.errors import RequestError

MOST_SECONDS = 1e9


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ServiceParams:
    """What a request asks of the scheduler and of the prefix cache. It never changes the tokens of the request.

    Attributes:
      priority: class; a smaller number is served earlier. Waiting makes up for it (`EngineConfig.ageing`).
      ttft_target: seconds from arrival within which the first token is wanted; the `deadline` policy orders by it.
      itl_target: seconds between tokens wanted; prefill chunks beside this request shrink to keep it.
      timeout: seconds from arrival after which the request ends, in whatever state, with reason `timeout`.
      cache: read from and publish to the prefix cache.
      cache_salt: requests share cached prefixes only with requests of the same salt.
    """

    priority: int = 0
    ttft_target: float | None = None
    itl_target: float | None = None
    timeout: float | None = None
    cache: bool = True
    cache_salt: str = ""

    def __post_init__(self) -> None:
        if isinstance(self.priority, bool) or not isinstance(self.priority, int) or abs(self.priority) > 10**6:
            raise RequestError("priority", f"must be an integer between -1000000 and 1000000, got {self.priority!r}")
        for name in ("ttft_target", "itl_target", "timeout"):
            value = getattr(self, name)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= MOST_SECONDS:
                raise RequestError(name, f"must be a positive number of seconds, got {value!r}")
        if not isinstance(self.cache, bool):
            raise RequestError("cache", f"must be true or false, got {self.cache!r}")
        if not isinstance(self.cache_salt, str):
            raise RequestError("cache_salt", f"must be text, got {self.cache_salt!r}")

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Builds parameters from plain data; None means the default, an unknown name raises RequestError."""
        known = [f.name for f in dataclasses.fields(cls)]
        for name in values:
            if name not in known:
                raise RequestError(str(name), f"unknown service parameter; known: {', '.join(sorted(known))}")
        return cls(**{k: v for k, v in values.items() if v is not None})
