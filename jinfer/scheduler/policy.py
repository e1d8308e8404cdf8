"""Policies: in which order requests are served. Pure functions over what may be known of a request and of a step.

A policy gives each request one number at arrival, its key, and the request of the smallest key is served first. The
key is never asked again: the queue stays sorted at O(log n), and waiting works by itself, since whoever arrives later
has a larger arrival in it. What "nothing starves" means is therefore which later arrivals can overtake a request;
every factory here says it.
"""

import dataclasses
import difflib
import importlib
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from jinfer.errors import ConfigError


@dataclasses.dataclass(frozen=True, slots=True)
class Candidate:
    """What a policy may know of a request. Seconds are of one monotonic clock.

    Attributes:
      priority: class; smaller is more urgent.
      arrival: when it came. deadline: when its first token is due; None if it has no target.
      prompt_tokens, max_tokens: of the prompt, and most of the output.
      cached_tokens: tokens of the prompt in the prefix cache; 0 when the key is asked for.
      prefill_seconds: estimate for the whole prompt; 0 while nothing is known.
    """

    priority: int
    arrival: float
    deadline: float | None
    prompt_tokens: int
    max_tokens: int
    cached_tokens: int
    prefill_seconds: float


class Snapshot(NamedTuple):
    """How many requests are where, as a step is planned.

    Attributes:
      now: seconds of the clock of Candidate.arrival.
      waiting: hold nothing. prefilling: have tokens left to prefill.
      decoding: have none. advanced: those of them that made a decode step since they joined.
      rows: most requests that can be active together.
      full: the first that waits found no room, and nothing has become free since.
    """

    now: float
    waiting: int
    prefilling: int
    decoding: int
    advanced: int
    rows: int
    full: bool


class Phase(NamedTuple):
    """What a step may do; prompts that were begun always go on.

    Attributes:
      admit: take requests from the queue. decode: advance the rows that decode.
    """

    admit: bool
    decode: bool


@dataclasses.dataclass(frozen=True, slots=True)
class Policy:
    """Attributes:
      name: as in the configuration.
      key: of a request at its arrival; finite, the smallest is served first, equal ones in order of arrival.
      choose: (front of the queue, best key first; now) -> index of the request to admit next. None takes the first.
      phase: what a step may do, asked at its start. None allows both always.
    """

    name: str
    key: Callable[[Candidate], float]
    choose: Callable[[Sequence[Candidate], float], int] | None = None
    phase: Callable[[Snapshot], Phase] | None = None


def fcfs(ageing: float) -> Policy:
    """First come, first served. Nothing that arrives later overtakes a request."""
    return Policy("fcfs", lambda request: request.arrival)


def priority(ageing: float) -> Policy:
    """Priority classes; `ageing` seconds of waiting outweigh one class.

    A request of class p is overtaken by those of class q < p that arrive within (p - q) * ageing seconds after it,
    and by no others.
    """
    return Policy("priority", lambda request: _class_key(request, ageing))


def deadline(ageing: float) -> Policy:
    """Least slack first: a request ranks by when its prefill must begin for its first token to be in time.

    Classes weigh as in `priority`. A request without a target is due `ageing` seconds after its arrival. It is
    overtaken by later arrivals of its class only if they must begin before it, so, with an estimate e of their prefill
    and e' of its own, by those that arrive within target - e' + e seconds after it, at most.
    """

    def key(request: Candidate) -> float:
        due = request.arrival + ageing if request.deadline is None else request.deadline
        return due - request.prefill_seconds + request.priority * ageing

    return Policy("deadline", key)


def longest_prefix(ageing: float) -> Policy:
    """Whose prompt is cached furthest goes first, so that pages are used before they are evicted.

    Only within the front of the queue, which is sorted as in `priority`, and never past a request of a better class
    or one that has waited longer than `ageing`. From then on a request is behind those only that `priority` would
    serve before it.
    """

    def choose(front: Sequence[Candidate], now: float) -> int:
        best, urgent = 0, front[0].priority
        for i, request in enumerate(front):
            urgent = min(urgent, request.priority)
            if request.priority == urgent and request.cached_tokens > front[best].cached_tokens:
                best = i
            if now - request.arrival > ageing:
                break
        return best

    return Policy("longest-prefix", lambda request: _class_key(request, ageing), choose)


def static(ageing: float) -> Policy:
    """Static batching, the baseline: a batch is filled, prefilled, decoded to its last row, and then comes the next.

    Nothing that arrives later overtakes a request, but it waits for the longest output of every batch before its own.
    """

    def phase(step: Snapshot) -> Phase:
        complete = step.advanced or step.full or not step.waiting or step.decoding == step.rows
        return Phase(admit=not step.advanced, decode=bool(complete and not step.prefilling))

    return Policy("static", lambda request: request.arrival, phase=phase)


POLICIES: dict[str, Callable[[float], Policy]] = {
    "fcfs": fcfs, "priority": priority, "deadline": deadline, "longest-prefix": longest_prefix, "static": static}


def find_policy(name: str, ageing: float) -> Policy:
    """The policy of a configuration.

    Args:
      name: one of POLICIES, or `package.module:name` of a Policy or of a function from `ageing` to one.
      ageing: seconds of waiting that outweigh one class of priority.

    Raises:
      ConfigError: there is no such policy, or it is none.
    """
    module, colon, attribute = name.partition(":")
    if not colon:
        if name not in POLICIES:
            raise ConfigError(f"policy: there is no {name!r}{_nearest(name, POLICIES)}; known: {', '.join(POLICIES)}, "
                              "or package.module:name")
        return POLICIES[name](ageing)
    try:
        known = vars(importlib.import_module(module))
    except Exception as error:  # whatever a user's module raises
        raise ConfigError(f"policy: {module!r} of {name!r} cannot be imported: {error}") from error
    if attribute not in known:
        raise ConfigError(f"policy: {module!r} has no {attribute!r}{_nearest(attribute, known)}")
    found = known[attribute]
    try:
        policy = found(ageing) if callable(found) else found
    except Exception as error:  # whatever a user's function raises
        raise ConfigError(f"policy: {name!r} cannot be made: {error}") from error
    if not isinstance(policy, Policy):
        raise ConfigError(f"policy: {name!r} must be a Policy or make one of the ageing, got a {type(policy).__name__}")
    return policy


def _class_key(request: Candidate, ageing: float) -> float:
    return request.arrival + request.priority * ageing


def _nearest(word: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(word, known, n=1)
    return f", did you mean {close[0]!r}?" if close else ""
