"""Stop strings on the host: find the earliest match, never let out text that may turn out to begin one."""


class StopStrings:
    """Cuts a stream of text at the first occurrence of any stop string.

    The joined results of push and flush are a pure function of the joined input, however it was cut into
    pieces: the text before the match that starts earliest (of two that start together, the shorter), or all
    of it. A match that a longer stop string could still precede stays undecided until more text or flush
    settles it, so read `matched` after flush as well.

    Args:
      stops: the strings; may be empty, in which case text passes through.
      include_stop: keep the matched string at the end of the text.
    Attributes:
      matched: the stop string that was found, or None.
    """

    __slots__ = ("_held", "_include", "_longest", "_stops", "matched")

    def __init__(self, stops: tuple[str, ...], include_stop: bool = False):
        self._stops = tuple(sorted(set(stops), key=len))
        self._longest = len(self._stops[-1]) if self._stops else 0
        self._include = include_stop
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """Takes new text, returns what is now safe to show. After a match it returns ""."""
        if self.matched is not None:
            return ""
        if not self._stops:
            return text
        buffer = self._held + text
        found = self._first(buffer)
        may_begin = self._may_begin(buffer)
        if found is not None and found[0] <= may_begin:
            return self._cut(buffer, *found)
        self._held = buffer[may_begin:]
        return buffer[:may_begin]

    def flush(self) -> str:
        """Generation ended: returns the text held back, up to a match if there is one in it."""
        if self.matched is not None:
            return ""
        found = self._first(self._held)
        if found is not None:
            return self._cut(self._held, *found)
        held, self._held = self._held, ""
        return held

    def _cut(self, buffer: str, start: int, stop: str) -> str:
        self.matched = stop
        self._held = ""
        return buffer[:start] + (stop if self._include else "")

    def _first(self, buffer: str) -> tuple[int, str] | None:
        best: tuple[int, str] | None = None
        for stop in self._stops:  # shortest first, so a later one must start strictly earlier
            start = buffer.find(stop)
            if start >= 0 and (best is None or start < best[0]):
                best = start, stop
        return best

    def _may_begin(self, buffer: str) -> int:
        """The first position from which the rest of the buffer is the beginning of a longer stop string."""
        for start in range(max(0, len(buffer) - self._longest + 1), len(buffer)):
            tail = buffer[start:]
            if any(len(stop) > len(tail) and stop.startswith(tail) for stop in self._stops):
                return start
        return len(buffer)
