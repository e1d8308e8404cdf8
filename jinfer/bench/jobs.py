"""Job: a request of a workload before an engine or a simulator has seen it, and its prompt without token lists."""

import dataclasses
from bisect import bisect_right
from collections.abc import Sequence
from typing import overload

from jinfer.config.service import ServiceParams


class Prompt(Sequence[int]):
    """A prompt made of runs of equal tokens; a few numbers stand for thousands of ids.

    What matters of tokens to the scheduler, the pool and the prefix index is where they are equal. So a run is the
    name of a text, as often as the text has tokens: equal names are equal contents, and because whoever compares
    prompts compares them from their first token on, a text at another place is another one.
    """

    __slots__ = ("_ends", "_names", "_total")

    def __init__(self, names: Sequence[int], ends: Sequence[int], total: int):
        """Args:
          names: of the runs. ends: position behind each run, ascending; the last one may lie behind `total`.
          total: tokens.
        """
        self._names, self._ends, self._total = names, ends, total

    def __len__(self) -> int:
        return self._total

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> list[int]: ...
    def __getitem__(self, index: int | slice) -> int | list[int]:
        if isinstance(index, slice):
            if len(self._names) == 1 and index.step is None:
                start, stop, _ = index.indices(self._total)
                return [self._names[0]] * (stop - start)
            start, stop, step = index.indices(self._total)
            tokens = self._run(start, stop)
            return tokens if step == 1 else [self[i] for i in range(start, stop, step)]
        if index < 0:
            index += self._total
        if not 0 <= index < self._total:
            raise IndexError(f"token {index} of {self._total}")
        return self._names[bisect_right(self._ends, index)]

    def followed(self, *parts: tuple[int, int]) -> "Prompt":
        """This prompt and (name, tokens) after it."""
        runs = bisect_right(self._ends, self._total - 1) + 1 if self._total else 0
        names, ends = list(self._names[:runs]), [*self._ends[: runs - 1], self._total] if runs else []
        for name, tokens in parts:
            names.append(name)
            ends.append(tokens + (ends[-1] if ends else 0))
        return Prompt(names, ends, ends[-1])

    def _run(self, start: int, stop: int) -> list[int]:
        names, ends = self._names, self._ends
        run = bisect_right(ends, start)
        tokens: list[int] = []
        while start < stop:
            end = ends[run] if ends[run] < stop else stop
            tokens += [names[run]] * (end - start)
            start, run = end, run + 1
        return tokens


_SERVICE = ServiceParams()


@dataclasses.dataclass(slots=True, eq=False)
class Job:
    """Attributes:
      time: seconds of the workload's clock at which it is sent; with `after`, seconds after that one ended.
      prompt: its tokens. output: tokens it generates, each choice. name: of the first choice's text; the next
        choices' follow.
      declared: max_tokens it is sent with. n: choices.
      service: priority, targets, timeout. group: index of its class.
      cancel_after: seconds after which its user gives up. after: the job whose end it waits for (the turn before).
    """

    time: float
    prompt: Prompt
    output: int
    name: int
    declared: int
    n: int = 1
    service: ServiceParams = _SERVICE
    group: int = 0
    cancel_after: float | None = None
    after: "Job | None" = None
