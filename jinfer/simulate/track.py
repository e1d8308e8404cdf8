"""Track: a simulated request's future and past, beyond what the scheduler knows of it."""

import dataclasses

from jinfer.bench.jobs import Job
from jinfer.scheduler import Request
from jinfer.simulate.worker import NAN, Worker


@dataclasses.dataclass(slots=True, eq=False)
class Sent:
    """A job that was sent. open: its choices that have not ended; tracks: all of them."""

    job: Job
    arrival: float
    open: "list[Track]" = dataclasses.field(default_factory=list)
    tracks: "list[Track]" = dataclasses.field(default_factory=list)


@dataclasses.dataclass(slots=True, eq=False)
class Track:
    """Attributes:
      left: tokens it will still sample. token: what they are. group: class of its job. worker: that has it.
      first, last: when it got its first and its last token; scheduled: when its first chunk was dispatched.
      worst: longest gap between tokens.
      preemptions: of the request, when it last got a token. swapped, moved: since then its pages came back from host
        memory, or from another engine.
    """

    request: Request
    sent: Sent
    left: int
    token: tuple[int]
    group: int
    worker: Worker
    last: float = NAN
    first: float = NAN
    scheduled: float = NAN
    worst: float = 0.0
    preemptions: int = 0
    swapped: bool = False
    moved: bool = False
