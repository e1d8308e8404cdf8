"""Request: one choice of one prompt on its way through the engine."""

import dataclasses
import enum
from typing import Any, Literal

from jinfer.config.sampling import SamplingParams
from jinfer.config.service import ServiceParams
from jinfer.kv.node import Extra, Node

DEFAULT_SERVICE = ServiceParams()
FinishReason = Literal["stop", "length", "cancelled", "timeout", "error"]


class Status(enum.Enum):
    """Where a request stands. Preemption takes it from PREFILLING or RUNNING back to WAITING."""

    WAITING = enum.auto()  # holds no slot and no page
    PREFILLING = enum.auto()  # holds both; part of its tokens are not dispatched yet
    RUNNING = enum.auto()  # every known token is dispatched; decodes
    FINISHED = enum.auto()


@dataclasses.dataclass(frozen=True, slots=True)
class Given:
    """KV that another engine computed: of the first `tokens` positions, in whatever form the transfer uses."""

    tokens: int
    payload: Any


@dataclasses.dataclass(slots=True, eq=False)
class Request:
    """One choice of one prompt; n choices are n requests of the same id. Only the scheduler changes it.

    The token at position i < len(prompt) is prompt[i]; the output of index j sits at len(prompt) + j. The KV
    of a position is written by the call that is fed its token, so the last token sampled never needs KV.

    Attributes:
      id: the user's request. index: which of its n choices.
      prompt: token ids. params: how it samples and ends.
      max_position: most tokens, prompt and outputs together; equal to len(prompt) when there is nothing to
        sample (see `position_limit`).
      stop_ids: end and stop token ids the device tests. seed: of its random stream.
      arrival: seconds of a monotonic clock. service: how urgent it is, and what it may share.
      regime: what else its KV depends on, where positions are rotated by the length of the prompt.
      siblings: all choices of the same prompt, itself included; none if it is the only one.
      given: what another engine has computed of it.
      rank: its place among all requests: the policy's key, and the order in which they came.
      outputs: tokens the host knows; one dispatch behind the device.
      slot: row of the device state, 0 is none.
      pages: of each page group, in order of position; 0 for pages given back. None at all without a slot.
      gone: how many pages of each group are given back, the first ones.
      due: a decode call that ends past it needs other pages (see RequestPages).
      page_limit: most pages a group will ever have for it, those given back included (set by `Scheduler.add`).
      page_goal: those admission reckons with; fewer where it did not say how much it wants.
      computed: positions whose KV is written by calls dispatched so far, or was found.
      cached: of them, those it found when it was last admitted, in the prefix index or with a sibling.
      keys: hashes of its full blocks, as far as anybody asked. tip: the last block it has found or published.
      blocks: how many those are. promised: up to which block its prompt is being computed, for others to wait for.
      ready: number of the plan that computed the last of its known tokens.
      joined, advanced: its first chunk, its first decode step in this slot is planned.
      protected: it was preempted as often as it may be.
      in_flight: dispatched steps it takes part in whose results are not collected.
      preemptions: how often it lost its pages and had to be computed again.
      prompt_tokens: len(prompt), which every token asks for.
    """

    id: str
    index: int
    prompt: list[int]
    params: SamplingParams
    max_position: int
    stop_ids: tuple[int, ...] = ()
    seed: int = 0
    arrival: float = 0.0
    service: ServiceParams = DEFAULT_SERVICE
    regime: int = 0
    siblings: "list[Request]" = dataclasses.field(default_factory=list)
    given: Given | None = None
    rank: tuple[float, int] = (0.0, 0)
    outputs: list[int] = dataclasses.field(default_factory=list)
    status: Status = Status.WAITING
    slot: int = 0
    pages: list[list[int]] = dataclasses.field(default_factory=list)
    gone: list[int] = dataclasses.field(default_factory=list)
    due: int = 0
    page_limit: int = 0
    page_goal: int = 0
    computed: int = 0
    cached: int = 0
    keys: list[int] = dataclasses.field(default_factory=list)
    tip: Node | None = None
    blocks: int = 0
    promised: int = 0
    ready: int = 0
    joined: bool = False
    advanced: bool = False
    protected: bool = False
    in_flight: int = 0
    finish_reason: FinishReason | None = None
    preemptions: int = 0
    prompt_tokens: int = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        self.prompt_tokens = len(self.prompt)

    @property
    def length(self) -> int:
        """Tokens the host knows: prompt and outputs."""
        return self.prompt_tokens + len(self.outputs)

    @property
    def scores_prompt(self) -> bool:
        """Prompt logprobs are asked for, and this is the choice that computes them for all."""
        return self.params.prompt_logprobs is not None and self.index == 0

    @property
    def extra(self) -> Extra:
        """What must be equal beside the tokens for KV to be shared. Who opted out shares with its siblings only."""
        private = None if self.service.cache else self.id
        return (self.service.cache_salt, self.regime, private)

    def tokens(self, start: int, stop: int) -> list[int]:
        """Token ids of positions start..stop-1 of prompt + outputs; costs O(stop - start)."""
        split = len(self.prompt)
        if stop <= split:
            return self.prompt[start:stop]
        return self.prompt[start:] + self.outputs[max(0, start - split):stop - split]


def position_limit(prompt_tokens: int, max_tokens: int | None, max_context: int) -> int:
    """Most tokens of a request, prompt and outputs: max_tokens more than the prompt, cut at the context."""
    return max_context if max_tokens is None else min(prompt_tokens + max_tokens, max_context)
