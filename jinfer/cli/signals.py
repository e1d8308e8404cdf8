"""How a long command ends early: the first signal asks for it, the second one insists."""

import signal
from collections.abc import Callable
from types import FrameType
from typing import Any, Self


class StopSignals:
    """Within it, Ctrl-C or SIGTERM is noted, and a second one raises KeyboardInterrupt. Main thread only.

    Call it to learn whether one came.
    """

    def __init__(self, say: Callable[[], None]):
        """say: tells the user what happens now; called once, by whoever asks first, not amid the signal."""
        self._say = say
        self._came = self._said = False
        self._usual: dict[int, Any] = {}

    def __enter__(self) -> Self:
        self._usual = {number: signal.signal(number, self._note) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *exc: object) -> None:
        for number, usual in self._usual.items():
            signal.signal(number, usual)

    def __call__(self) -> bool:
        if self._came and not self._said:
            self._said = True
            self._say()
        return self._came

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._came:
            raise KeyboardInterrupt
        self._came = True
