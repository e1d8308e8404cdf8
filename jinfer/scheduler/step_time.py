"""StepTime: how long a prefill or a decode call takes, learned while they run."""

import math

from jinfer.scheduler.fit import MEMORY, Affine, AffineFit, Terms

TYPICAL = 512  # tokens: the chunk by which a prefill rate is given before any was seen


class StepTime:
    """A model of the time of prefill and decode calls, affine in what they compute, updated by every call.

    Prefill of n tokens that attend to a positions: constant + n * item + a * position; a chunk of n tokens that begins
    at s attends to n * s + n * (n + 1) / 2. A decode call of n steps over r rows whose sequences are c positions long
    altogether: n * (constant + r * item + (c + r * (n - 1) / 2) * position), since every step makes them longer.
    """

    def __init__(self, prefill: Affine | None = None, decode: Affine | None = None):
        """prefill, decode: coefficients to start from, a roofline's for instance; None starts from the first calls."""
        self._prefill = AffineFit(prefill)
        self._decode = AffineFit(decode)
        self._tokens, self._attended = float(TYPICAL), attended_positions(TYPICAL, 0)

    @property
    def prefill_known(self) -> bool:
        """There were coefficients to start from, or a call."""
        return self._prefill.known

    @property
    def decode_known(self) -> bool:
        """There were coefficients to start from, or a call."""
        return self._decode.known

    @property
    def prefill_rate(self) -> float:
        """Tokens a second of the average prefill call so far; 0 while nothing is known."""
        seconds = self.prefill_seconds(self._tokens, self._attended)
        return self._tokens / seconds if seconds else 0.0

    def prefill_seconds(self, tokens: float, attended: float) -> float:
        """Expected time of a prefill call; 0 while nothing is known."""
        return self._prefill.predict((1.0, tokens, attended))

    def decode_seconds(self, rows: int, context: int, steps: int) -> float:
        """Expected time of a decode call; 0 while nothing is known.

        context: positions of all rows at its start, together. steps: tokens a row advances.
        """
        return self._decode.predict(_decode_terms(rows, context, steps))

    def observe_prefill(self, tokens: int, attended: float, seconds: float) -> None:
        """A prefill call took so long."""
        self._prefill.observe((1.0, tokens, attended), seconds)
        self._tokens += (tokens - self._tokens) / MEMORY
        self._attended += (attended - self._attended) / MEMORY

    def observe_decode(self, rows: int, context: int, steps: int, seconds: float) -> None:
        """A decode call took so long."""
        self._decode.observe(_decode_terms(rows, context, steps), seconds)

    def chunk_tokens(self, budget_seconds: float, start: int, most: int, least: int, *,
                     tokens: int = 0, attended: float = 0.0) -> int:
        """Tokens of the longest chunk from position `start` with which a prefill call takes no longer than a budget.

        Args:
          most, least: what the result is cut to, whatever it takes; `most` is the stronger one.
          tokens, attended: what the call computes already.

        Returns:
          `most` while nothing is known.
        """
        if not self._prefill.known:
            return most
        _, item, position = self._prefill.coefficients
        left = budget_seconds - self.prefill_seconds(tokens, attended)
        # left = square * n^2 + linear * n: the root in the form that also holds where square is 0
        square, linear = position / 2, item + position * (start + 0.5)
        if left <= 0:
            fits = 0
        else:
            slope = linear + math.sqrt(linear * linear + 4 * square * left)
            fits = int(min(most, 2 * left / slope)) if slope else most
        return min(most, max(least, fits))


def attended_positions(tokens: int, start: int) -> float:
    """Positions that the queries of a chunk attend to, together: each to all before it and to itself."""
    return tokens * start + tokens * (tokens + 1) / 2


def _decode_terms(rows: int, context: int, steps: int) -> Terms:
    return float(steps), float(rows * steps), steps * (context + rows * (steps - 1) / 2)
