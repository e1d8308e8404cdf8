"""Inbox: sends the deltas of one engine to whoever waits for them, all on one thread."""

import contextlib
import signal
import threading
from collections import deque
from collections.abc import Iterator
from types import FrameType
from typing import TYPE_CHECKING, Self

from jinfer.config.sampling import SamplingParams
from jinfer.config.service import ServiceParams
from jinfer.engine.outputs import Delta
from jinfer.errors import JinferError
from jinfer.prompts import prepare

if TYPE_CHECKING:
    from jinfer.engine.engine import Engine

type Box = deque[Delta]


class Inbox:
    """Streams, batch jobs and `generate` may share an engine: whoever waits turns the loop for all.

    A box belongs to one waiter and may collect many requests. Not thread-safe. Nothing comes into the middle of
    a turn: Ctrl-C waits for its end, and so does a stream that the garbage collector drops.
    """

    def __init__(self, engine: "Engine"):
        self.engine = engine
        self._boxes: dict[str, Box] = {}  # requests that run and are waited for
        self._turning = False
        self._dropped: list[str] = []  # while the engine was in the middle of a step

    def submit(self, item: object, params: SamplingParams, box: Box, service: ServiceParams | None = None) -> str:
        """Hands in a prompt, ids or a conversation, whose deltas go into `box`; returns the request's id.

        A refusal raises RequestError, a full queue OverloadError; neither leaves anything behind.
        """
        prompt, add_special = prepare(item, self.engine.tokenizer)
        request_id = self.engine.submit(prompt, params, service=service, add_special=add_special)
        self._boxes[request_id] = box
        return request_id

    def pin(self, item: object, box: Box, service: ServiceParams | None = None) -> str:
        """The same for a prefix to be pinned; its pages are held when its last delta comes."""
        prompt, add_special = prepare(item, self.engine.tokenizer, answer=False)
        name = self.engine.pin(prompt, service, add_special=add_special)
        self._boxes[name] = box
        return name

    def wait(self, box: Box) -> Delta:
        """The next delta of a box, turning the engine's loop until there is one."""
        while not box:
            if not self.engine.has_work:
                raise JinferError("the engine went idle with requests unfinished")
            self.turn()
        return box.popleft()

    def turn(self) -> None:
        """One turn of the engine's loop."""
        self._turning = True
        try:
            with interrupts_deferred():
                for delta in self.engine.step():
                    other = self._boxes.get(delta.request_id)  # None: dropped, these are its last words
                    if other is not None:
                        other.append(delta)
                        if delta.request_finished:
                            del self._boxes[delta.request_id]
        finally:
            self._turning = False
            while self._dropped:
                self.drop(self._dropped.pop())

    def drop(self, request_id: str) -> None:
        """Cancels a request that nobody waits for any more. Harmless when it has ended."""
        if self._turning:
            self._dropped.append(request_id)
        elif self._boxes.pop(request_id, None) is not None:
            self.engine.cancel(request_id)


@contextlib.contextmanager
def interrupts_deferred() -> Iterator[None]:
    """Ctrl-C takes effect at the end of the block, a second one at once. Other threads are never interrupted."""
    usual = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or usual is None:
        yield
        return
    waiting = False

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal waiting
        if waiting:
            signal.signal(signal.SIGINT, usual)
            signal.raise_signal(signal.SIGINT)
        waiting = True

    signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, usual)
    if waiting:
        signal.raise_signal(signal.SIGINT)


class DeltaStream:
    """Iterator over the deltas of one accepted request. Closing it, or letting go of it, cancels the request.

    A class and not a generator: a generator that was never started does nothing when it is closed.
    """

    def __init__(self, inbox: Inbox, item: object, params: SamplingParams, service: ServiceParams | None = None):
        self._live = False
        self._inbox = inbox
        self._box: Box = deque()
        self.request_id = inbox.submit(item, params, self._box, service)
        self._live = True

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Delta:
        if not self._live:
            raise StopIteration
        delta = self._inbox.wait(self._box)
        self._live = not delta.request_finished
        return delta

    def close(self) -> None:
        """Cancels the request unless it has ended."""
        if self._live:
            self._live = False
            self._inbox.drop(self.request_id)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()
