"""AffineFit: the coefficients of one kind of call, learned call by call, whatever accidents happen."""

import statistics
from typing import NamedTuple

MEMORY = 100  # calls: the age at which an observation has lost most of its weight
STAY = 0.1  # of one observation: what holds coefficients where they are as far as no observation moves them
USUAL = 0.05  # mean deviation from what was expected, relative to it, before any was seen
LEAST, MOST = 0.02, 0.3  # of the mean deviation, whatever is seen
EXACT = 0.002  # relative: a call that comes so close to what was expected teaches nothing
ODD = 3.0  # a call that deviates by more than so many times the mean is set aside
CHANGE = 6  # calls set aside, more than came as expected meanwhile: no accidents, the times have changed

Terms = tuple[float, float, float]  # of a call: what Affine's coefficients multiply


class Affine(NamedTuple):
    """Seconds of a call as a function of its work.

    Attributes:
      constant: of the call (prefill), of a step (decode): launches, and reading the weights.
      item: of a token (prefill), of a row (decode).
      position: of a position attended to, by any query: reading or scoring KV.
    """

    constant: float
    item: float
    position: float


class AffineFit:
    """Coefficients, none of them negative, fitted to the calls so far: least squares with exponential forgetting.

    What is made least is the squared error relative to the time expected, so that short calls count like long ones (to
    twice the time taken, if that is less: an expectation far too high must not weigh in its own favour). Each call adds
    its normal equations to the sums of all, which fade by 1/MEMORY; the new coefficients solve the sums with a term
    that holds them where they are, like one step of Levenberg and Marquardt. That term is nothing where calls differ,
    and everything in directions in which they do not: there, without it, forgetting would leave the solution to noise.

    A call that took far longer than expected may have compiled, or the host paused: it is set aside. Where such calls
    prevail, the times have changed: the past is dropped, and the coefficients, scaled to the new times, learn from what
    was set aside. A call that took far less is no accident. It counts at once, but also as a sign of such a change.

    Attributes:
      known: there were coefficients to start from, or a call.
      coefficients: seconds of each term.
    """

    def __init__(self, start: Affine | None):
        self.known = start is not None
        self.coefficients: Terms = start or (0.0, 0.0, 0.0)
        self._usual = USUAL
        self._odd: list[tuple[Terms, float]] = []
        self._forget()

    def predict(self, terms: Terms) -> float:
        """Expected seconds of a call of these terms; 0 while nothing is known."""
        (a, b, c), (x, y, z) = self.coefficients, terms
        return a * x + b * y + c * z

    def observe(self, terms: Terms, seconds: float) -> None:
        """A call of these terms took so long."""
        if seconds <= 0:
            return
        expected = self.predict(terms)
        if expected <= 0:  # nothing is known: each term may be an equal part of it
            self.known = True
            x, y, z = terms
            third = seconds / 3
            self.coefficients = third / x, third / y if y else 0.0, third / z if z else 0.0
            self._learn(terms, seconds)
            return
        deviation = seconds / expected - 1.0
        odd = ODD * self._usual
        self._usual += 0.05 * (min(abs(deviation), odd) - self._usual)
        self._usual = min(MOST, max(LEAST, self._usual))
        if abs(deviation) <= odd:
            if abs(deviation) > EXACT:
                self._learn(terms, seconds)
            del self._odd[:1]
            return
        self._odd.append((terms, seconds))
        if len(self._odd) == CHANGE:
            self._start_again()
        elif deviation < 0:
            self._learn(terms, seconds)

    def _start_again(self) -> None:
        factor = statistics.median(seconds / self.predict(terms) for terms, seconds in self._odd)
        x, y, z = self.coefficients
        self.coefficients = factor * x, factor * y, factor * z
        self._forget()
        likely = [self.predict(terms) for terms, _ in self._odd]
        for (terms, seconds), expected in zip(self._odd, likely, strict=True):
            if seconds < 2 * expected:  # else it was an accident after all
                self._learn(terms, seconds)
        self._odd.clear()

    def _forget(self) -> None:
        self._squares = [0.0] * 6  # sums of products of terms: 00 01 02 11 12 22
        self._sums = [0.0] * 3
        self._hold: Terms | None = None

    def _learn(self, terms: Terms, seconds: float) -> None:
        scale = min(self.predict(terms), 2 * seconds)
        x, y, z = (term / scale for term in terms)
        time = seconds / scale
        if self._hold is None:
            self._hold = (STAY * x * x or STAY, STAY * y * y or STAY, STAY * z * z or STAY)
        keep = 1.0 - 1.0 / MEMORY
        a, b, c, d, e, f = self._squares
        u, v, w = self._sums
        self._squares = a, b, c, d, e, f = [keep * a + x * x, keep * b + x * y, keep * c + x * z, keep * d + y * y,
                                            keep * e + y * z, keep * f + z * z]
        self._sums = u, v, w = [keep * u + x * time, keep * v + y * time, keep * w + z * time]
        (p, q, r), (i, j, k) = self._hold, self.coefficients
        self.coefficients = _solve((a + p, b, c, d + q, e, f + r), (u + p * i, v + q * j, w + r * k))


def _solve(matrix: tuple[float, float, float, float, float, float], right: Terms) -> Terms:
    """Solves symmetric positive definite equations, matrix 00 01 02 11 12 22; who would be negative is held at 0."""
    a, b, c, d, e, f = matrix
    u, v, w = right
    while True:
        ab, ac = b / a, c / a  # LDL'
        d1, e1 = d - ab * b, e - ab * c
        v1 = v - ab * u
        de = e1 / d1
        z = (w - ac * u - de * v1) / (f - ac * c - de * e1)
        y = (v1 - e1 * z) / d1
        x = (u - b * y - c * z) / a
        if x >= 0 and y >= 0 and z >= 0:
            return x, y, z
        if x < 0:
            a, b, c, u = 1.0, 0.0, 0.0, 0.0
        if y < 0:
            b, d, e, v = 0.0, 1.0, 0.0, 0.0
        if z < 0:
            c, e, f, w = 0.0, 0.0, 1.0, 0.0
