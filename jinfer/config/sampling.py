"""SamplingParams: what one request asks of the sampler."""

import dataclasses
import operator
from collections.abc import Mapping, Sequence
from typing import Any, Self

from jinfer.errors import RequestError

INT32_MAX = 2**31 - 1
INT64_MAX = 2**63 - 1  # where any large value means the same


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How tokens are chosen and when a request ends. Validated where it is made.

    Attributes:
      n: number of independent completions of the prompt.
      temperature: 0 is greedy; otherwise logits are divided by it.
      top_k: keep the k best tokens; 0 or -1 (or k >= vocabulary) switches it off.
      top_p: keep the smallest set of best tokens whose probability reaches p; 1 switches it off. The best
        token is always kept.
      min_p: keep tokens with probability >= min_p * (best probability), after temperature; 0 is off.
      presence_penalty: subtracted once from the logit of every token already generated (OpenAI's formula).
      frequency_penalty: subtracted once per occurrence among the generated tokens (OpenAI's formula).
      repetition_penalty: logits of tokens of the prompt or output are divided (positive) or multiplied
        (negative) by it (CTRL, arXiv 1909.05858); 1 switches it off.
      logit_bias: token id -> number added to its logit at every step.
      max_tokens: most tokens to generate; None means up to the context length; 0 scores the prompt only.
      min_tokens: no end token and no stop token is sampled before this many tokens exist.
      stop: strings that end the request; the text before the earliest match is kept.
      stop_token_ids: token ids that end the request like the end-of-sequence token.
      include_stop: keep the matched stop string in the text.
      ignore_eos: do not end on the model's end-of-sequence tokens (stop_token_ids still end).
      seed: makes the request repeatable whatever runs beside it; None draws a fresh one.
      logprobs: how many top alternatives to report for each generated token; 0 reports the chosen token only;
        None reports nothing. Values are log-softmax of the raw logits.
      prompt_logprobs: the same for each prompt token.
      skip_special_tokens: leave special tokens out of the text.
    """

    n: int = 1
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = dataclasses.field(default_factory=dict)
    max_tokens: int | None = 256
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop: bool = False
    ignore_eos: bool = False
    seed: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        set_ = object.__setattr__
        set_(self, "stop", _strings("stop", self.stop))
        set_(self, "stop_token_ids", tuple(_integer("stop_token_ids", i, 0) for i in _sequence(
            "stop_token_ids", self.stop_token_ids)))
        set_(self, "logit_bias", _bias(self.logit_bias))
        _integer("n", self.n, 1, 128)
        _number("temperature", self.temperature, 0.0, 100.0)
        _integer("top_k", self.top_k, -1, INT64_MAX)
        _number("top_p", self.top_p, 0.0, 1.0)
        _number("min_p", self.min_p, 0.0, 1.0)
        _number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _number("repetition_penalty", self.repetition_penalty, 0.01, 100.0)
        if self.max_tokens is not None:
            _integer("max_tokens", self.max_tokens, 0, INT64_MAX)
        _integer("min_tokens", self.min_tokens, 0)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError("min_tokens", f"{self.min_tokens} is more than max_tokens {self.max_tokens}")
        if self.seed is not None:
            _integer("seed", self.seed, -(2**63), 2**64 - 1)
        if self.logprobs is not None:
            _integer("logprobs", self.logprobs, 0)
        if self.prompt_logprobs is not None:
            _integer("prompt_logprobs", self.prompt_logprobs, 0)
        for name in ("include_stop", "ignore_eos", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise RequestError(name, f"must be true or false, got {getattr(self, name)!r}")

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Builds parameters from plain data; None means the default, an unknown name raises RequestError."""
        known = {f.name for f in dataclasses.fields(cls)}
        for name in values:
            if name not in known:
                raise RequestError(str(name), f"unknown sampling parameter; known: {', '.join(sorted(known))}")
        optional = {"max_tokens"}  # None is a value of its own here
        return cls(**{k: v for k, v in values.items() if v is not None or k in optional})

    @property
    def penalised(self) -> bool:
        """True if logits depend on which tokens came before (needs per-row token counts on the device)."""
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1.0)


def _integer(field: str, value: Any, low: int, high: int = INT32_MAX) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise RequestError(field, f"must be an integer, got {value!r}")
    if not low <= value <= high:
        raise RequestError(field, f"must be between {low} and {high}, got {value}")
    return value


def _number(field: str, value: Any, low: float, high: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise RequestError(field, f"must be a number, got {value!r}")
    if not low <= value <= high:  # NaN and the infinities too; integers of any size compare exactly
        raise RequestError(field, f"must be a finite number between {low:g} and {high:g}, got {value!r}")
    return float(value)


def _sequence(field: str, value: Any) -> Sequence[Any]:
    if isinstance(value, str | bytes) or not isinstance(value, Sequence):
        raise RequestError(field, f"must be a list, got {value!r}")
    return value


def _strings(field: str, value: Any) -> tuple[str, ...]:
    values = (value,) if isinstance(value, str) else tuple(_sequence(field, value))
    for text in values:
        if not isinstance(text, str) or not text:
            raise RequestError(field, f"must hold non-empty strings, got {text!r}")
    return values


def _bias(value: Any) -> Mapping[int, float]:
    if not isinstance(value, Mapping):
        raise RequestError("logit_bias", f"must map token ids to numbers, got {value!r}")
    bias: dict[int, float] = {}
    for key, amount in value.items():
        try:
            token = int(key) if isinstance(key, str) else operator.index(key)  # JSON object keys are strings
        except (TypeError, ValueError):
            raise RequestError("logit_bias", f"keys must be token ids, got {key!r}") from None
        bias[_integer("logit_bias", token, 0)] = _number("logit_bias", amount, -1000.0, 1000.0)
    return bias
