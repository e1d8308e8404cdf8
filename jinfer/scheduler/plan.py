"""StepPlan: what one step computes, at most one prefill call and one decode call."""

import dataclasses

from jinfer.scheduler.pages import NewPage
from jinfer.scheduler.request import Request


@dataclasses.dataclass(frozen=True, slots=True)
class Chunk:
    """Part of a prompt in a prefill call: positions start..start+length-1 of request.tokens.

    A chunk with start 0 is the first of its request in this slot: the row joins. The whole page tables of the request
    (request.pages) go up with every chunk.

    Attributes:
      final: it ends the known tokens.
    """

    request: Request
    slot: int
    start: int
    length: int
    final: bool

    @property
    def samples(self) -> bool:
        """A token is sampled at its end. A final chunk without one ends a request that only scores."""
        return self.final and self.start + self.length < self.request.max_position


@dataclasses.dataclass(frozen=True, slots=True)
class DecodeRow:
    """A row of a decode call.

    Attributes:
      position: of the first token fed, whose KV is written; the first token sampled sits one further.
      new_pages: (group, index, page): what to put into the row's page tables before the call, one a group at most.
    """

    request: Request
    slot: int
    position: int
    new_pages: tuple[NewPage, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class StepPlan:
    """Attributes:
      chunks: of the prefill call, in order of arrival. rows: of the decode call, in order of arrival; no
        request is in both.
      steps: positions the decode call advances each row, at most: the device stops a row at its last position
        and at an end token.
    """

    chunks: tuple[Chunk, ...]
    rows: tuple[DecodeRow, ...]
    steps: int

    @property
    def empty(self) -> bool:
        return not self.chunks and not self.rows
