"""WorkloadConfig: requests to simulate or to send, from a trace or drawn from distributions."""

import dataclasses
from typing import Literal

from jinfer.errors import ConfigError

TraceFormat = Literal["auto", "azure", "mooncake", "sharegpt"]


def _share(name: str, value: float) -> None:
    if not 0.0 <= value <= 1.0:
        raise ConfigError(f"{name}: must be in [0, 1], got {value!r}")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LengthConfig:
    """A distribution of whole numbers (tokens, turns), cut to least..most.

    Attributes:
      kind: constant (value), uniform (low..high), lognormal (mean of the numbers, sigma of their logarithm),
        empirical (drawn from a column of a csv file).
      value, low, high, mean, sigma, file, column: of the kinds that need them.
      least, most: bounds; most None is none.
    """

    kind: Literal["constant", "uniform", "lognormal", "empirical"] = "constant"
    value: int | None = None
    low: int | None = None
    high: int | None = None
    mean: float | None = None
    sigma: float = 1.0
    file: str | None = None
    column: str | None = None
    least: int = 1
    most: int | None = None

    def __post_init__(self) -> None:
        needs = {"constant": ("value",), "uniform": ("low", "high"), "lognormal": ("mean",),
                 "empirical": ("file", "column")}[self.kind]
        for name in needs:
            if getattr(self, name) is None:
                raise ConfigError(f"{name}: a {self.kind} distribution needs it")
        for name in ("value", "low", "high", "mean"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise ConfigError(f"{name}: must be 0 or more, got {value!r}")
        if self.kind == "uniform" and self.high < self.low:  # type: ignore[operator]
            raise ConfigError(f"high: {self.high} is less than low {self.low}")
        if self.kind == "lognormal" and not (self.mean and self.sigma >= 0):
            raise ConfigError(f"mean: must be positive and sigma 0 or more, got {self.mean!r} and {self.sigma!r}")
        if self.least < 0 or (self.most is not None and self.most < self.least):
            raise ConfigError(f"most: {self.most} is less than least {self.least}, or least is below 0")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ArrivalConfig:
    """When requests (or the first turns of chats) come.

    Attributes:
      process: poisson; gamma; constant (equal distances); closed (all at once, at time 0).
      rate: requests a second. burstiness: shape of gamma; 1 is poisson, less is burstier.
    """

    process: Literal["poisson", "gamma", "constant", "closed"] = "poisson"
    rate: float = 1.0
    burstiness: float = 1.0

    def __post_init__(self) -> None:
        for name in ("rate", "burstiness"):
            if not 0.0 < getattr(self, name) < float("inf"):
                raise ConfigError(f"{name}: must be positive, got {getattr(self, name)!r}")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SharingConfig:
    """Prompts that begin alike.

    Attributes:
      groups: how many different beginnings. length: tokens of each. share: of the prompts that have one.
    """

    groups: int = 1
    length: LengthConfig
    share: float = 1.0

    def __post_init__(self) -> None:
        if self.groups < 1:
            raise ConfigError(f"groups: must be a positive integer, got {self.groups!r}")
        _share("share", self.share)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ChatConfig:
    """Conversations: each turn's prompt is everything said before and a new message.

    Attributes:
      turns: of a conversation. message: tokens of the user's second and later messages.
      think: mean seconds between an answer's end and the next message (exponential).
    """

    turns: LengthConfig
    message: LengthConfig
    think: float = 10.0

    def __post_init__(self) -> None:
        if not 0.0 <= self.think < float("inf"):
            raise ConfigError(f"think: must be 0 or more seconds, got {self.think!r}")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ClassConfig:
    """A class of requests, drawn by weight.

    Attributes:
      name: in reports. weight: how many of all, relative to the other classes.
      priority, ttft_target, itl_target, timeout, cache: as of ServiceParams.
      cancel: share of the requests that are cancelled; cancel_after: mean seconds after arrival (exponential).
    """

    name: str = "all"
    weight: float = 1.0
    priority: int = 0
    ttft_target: float | None = None
    itl_target: float | None = None
    timeout: float | None = None
    cache: bool = True
    cancel: float = 0.0
    cancel_after: float = 10.0

    def __post_init__(self) -> None:
        if not 0.0 < self.weight < float("inf"):
            raise ConfigError(f"weight: must be positive, got {self.weight!r}")
        for name in ("ttft_target", "itl_target", "timeout"):
            value = getattr(self, name)
            if value is not None and not 0.0 < value < float("inf"):
                raise ConfigError(f"{name}: must be a positive number of seconds, got {value!r}")
        _share("cancel", self.cancel)
        if not 0.0 < self.cancel_after < float("inf"):
            raise ConfigError(f"cancel_after: must be positive, got {self.cancel_after!r}")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadConfig:
    """Requests from a trace (then without arrivals, prompt, output, sharing and chat) or from distributions.

    Attributes:
      trace: file of recorded requests; a relative path starts at the folder of the workload file.
      format: of the trace; auto goes by its first line.
      requests: how many; a trace is repeated with fresh contents as often as it takes. None is the trace once.
      limit: of a trace, only the first so many.
      rate: mean requests a second a trace is stretched or pressed to. None leaves its times.
      seed: of everything drawn.
      arrivals, prompt, output: of a synthetic workload. sharing, chat: None is neither.
      declared: max_tokens of the requests, at least what they generate; None: what they generate exactly.
      declared_factor: instead, so many times what they generate.
      n: choices of each prompt.
      classes: of requests.
    """

    trace: str | None = None
    format: TraceFormat = "auto"
    requests: int | None = None
    limit: int | None = None
    rate: float | None = None
    seed: int = 0
    arrivals: ArrivalConfig = ArrivalConfig()
    prompt: LengthConfig | None = None
    output: LengthConfig | None = None
    sharing: SharingConfig | None = None
    chat: ChatConfig | None = None
    declared: LengthConfig | None = None
    declared_factor: float | None = None
    n: int = 1
    classes: tuple[ClassConfig, ...] = (ClassConfig(),)

    def __post_init__(self) -> None:
        for name in ("requests", "limit", "n"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name}: must be a positive integer, got {value!r}")
        if self.seed < 0:
            raise ConfigError(f"seed: must be 0 or more, got {self.seed!r}")
        if self.rate is not None and not 0.0 < self.rate < float("inf"):
            raise ConfigError(f"rate: must be positive, got {self.rate!r}")
        if self.declared_factor is not None and not 1.0 <= self.declared_factor < float("inf"):
            raise ConfigError(f"declared_factor: must be 1 or more, got {self.declared_factor!r}")
        if self.declared is not None and self.declared_factor is not None:
            raise ConfigError("declared_factor: give it or declared, not both")
        if not self.classes:
            raise ConfigError("classes: must name one")
        names = [c.name for c in self.classes]
        if len(set(names)) < len(names):
            raise ConfigError(f"name: given twice in {', '.join(names)}")
        if self.trace is None:
            for name in ("prompt", "output"):
                if getattr(self, name) is None:
                    raise ConfigError(f"{name}: required where there is no trace")
            for name in ("limit", "rate"):
                if getattr(self, name) is not None:
                    raise ConfigError(f"{name}: belongs to a trace; here say requests and arrivals.rate")
        else:
            for name in ("prompt", "output", "sharing", "chat"):
                if getattr(self, name) is not None:
                    raise ConfigError(f"{name}: comes with the trace and cannot be given beside it")
