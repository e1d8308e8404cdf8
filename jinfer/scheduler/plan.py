"""StepPlan: what one step computes, at most one prefill call and one decode call, and which pages move before them."""

import dataclasses
from typing import NamedTuple

from jinfer.kv.moves import PageCopy, PageIn, PageOut
from jinfer.scheduler.request import Request

NewPage = tuple[int, int, int]  # group, index in the row's page table, page


class Received(NamedTuple):
    """Positions that another engine computed go to the pages a request has got for them (`request.given`)."""

    request: Request
    pages: tuple[tuple[int, ...], ...]  # of each group, in order of position; 0 where the sender held none


@dataclasses.dataclass(frozen=True, slots=True)
class Chunk:
    """Part of a prompt in a prefill call: positions start..start+length-1 of request.tokens.

    The whole page tables of the request (request.pages) go up with every chunk.

    Attributes:
      joins: it is the first of its request in this slot. It starts behind whatever was computed before by others:
        a prefix that was found, a sibling, another engine.
      final: it ends the known tokens.
    """

    request: Request
    slot: int
    start: int
    length: int
    final: bool
    joins: bool

    @property
    def samples(self) -> bool:
        """A token is sampled at its end. A final chunk without one ends a request that only scores."""
        return self.final and self.start + self.length < self.request.max_position


class DecodeRow(NamedTuple):
    """A row of a decode call. A tuple, for there are as many as rows in every step, and it is the cheapest to make.

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
    """The device does what is listed in this order: outs, ins, received, copies, the prefill call, the decode call.

    Attributes:
      chunks: of the prefill call, in order of rank. rows: of the decode call, in order of rank; no request is in both.
      steps: positions the decode call advances each row, at most: the device stops a row at its last position
        and at an end token.
    """

    chunks: tuple[Chunk, ...]
    rows: tuple[DecodeRow, ...]
    steps: int
    outs: tuple[PageOut, ...] = ()
    ins: tuple[PageIn, ...] = ()
    received: tuple[Received, ...] = ()
    copies: tuple[PageCopy, ...] = ()

    @property
    def empty(self) -> bool:
        """Nothing to compute or to move. Pages may move without a call: for who waits for its first chunk."""
        return not (self.chunks or self.rows or self.outs or self.ins or self.received or self.copies)
