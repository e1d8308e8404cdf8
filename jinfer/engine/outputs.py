"""What a request gives back: deltas while it runs, a RequestOutput when it ends. Plain data, no JAX."""

import dataclasses

from jinfer.scheduler.request import FinishReason


@dataclasses.dataclass(frozen=True, slots=True)
class TokenLogprob:
    """One position's log-probabilities (natural log, log-softmax of the raw logits).

    Attributes:
      token_id: the token at this position. logprob: its value, or None for the first prompt token.
      top: the most likely alternatives as (token id, logprob), best first.
    """

    token_id: int
    logprob: float | None
    top: tuple[tuple[int, float], ...] = ()


@dataclasses.dataclass(slots=True)
class Timing:
    """When things happened to one request, in seconds of a monotonic clock; durations are properties.

    Attributes:
      arrived: the engine accepted it. tokenise: seconds spent tokenising before that. scheduled: its first
      chunk was dispatched. token_times: when each token became known to the host (choice 0 only when n > 1).
      finished: its last choice ended. preemptions: how often it lost its pages and was recomputed.
      cached_tokens: prompt tokens served from the prefix cache.
    """

    arrived: float = 0.0
    tokenise: float = 0.0
    scheduled: float | None = None
    finished: float | None = None
    token_times: list[float] = dataclasses.field(default_factory=list)
    preemptions: int = 0
    cached_tokens: int = 0

    @property
    def queue(self) -> float | None:
        """Seconds waiting before the first chunk."""
        return None if self.scheduled is None else self.scheduled - self.arrived

    @property
    def prefill(self) -> float | None:
        """Seconds from the first chunk to the first token."""
        if self.scheduled is None or not self.token_times:
            return None
        return self.token_times[0] - self.scheduled

    @property
    def ttft(self) -> float | None:
        """Time to first token, seconds, tokenising included."""
        return self.token_times[0] - self.arrived + self.tokenise if self.token_times else None

    @property
    def itls(self) -> list[float]:
        """Inter-token latencies, seconds."""
        return [b - a for a, b in zip(self.token_times, self.token_times[1:], strict=False)]

    @property
    def e2e(self) -> float | None:
        """Seconds from arrival to the end, tokenising included."""
        return None if self.finished is None else self.finished - self.arrived + self.tokenise


@dataclasses.dataclass(slots=True)
class Completion:
    """One choice of a request.

    Attributes:
      index: which of the n choices. text: detokenised, cut at a stop string. token_ids: everything sampled,
      an end token included. finish_reason: None while running. stop_reason: the stop string or stop token id
      that matched. logprobs: one entry a token if asked for.
    """

    index: int
    text: str = ""
    token_ids: list[int] = dataclasses.field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    logprobs: list[TokenLogprob] | None = None


@dataclasses.dataclass(slots=True)
class RequestOutput:
    """A request and all its choices.

    `error` is set when it was refused (then there are no choices), failed, or was handed back by a drain.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    completions: list[Completion]
    prompt_logprobs: list[TokenLogprob] | None = None
    timing: Timing = dataclasses.field(default_factory=Timing)
    error: Exception | None = None

    @property
    def text(self) -> str:
        """Text of the first choice."""
        return self.completions[0].text if self.completions else ""

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that came from the prefix cache and were not computed."""
        return self.timing.cached_tokens

    @property
    def finished(self) -> bool:
        return self.error is not None or all(c.finish_reason is not None for c in self.completions)


@dataclasses.dataclass(frozen=True, slots=True)
class Delta:
    """What one step added to one choice. Joined `text`s equal the choice's text; so do ids and logprobs.

    `output` is the whole request as it stands; read it when `request_finished`.
    """

    request_id: str
    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] | None
    finish_reason: FinishReason | None
    request_finished: bool
    output: RequestOutput
