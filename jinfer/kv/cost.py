"""SwapCost: whether bringing KV pages back from host memory takes less time than computing them again."""

START_RATE = 10e9  # bytes a second, until transfers are measured: somewhat less than PCIe 3 x16 moves
LATENCY = 50e-6  # seconds a transfer takes however little it moves: a dispatch and its completion
MEMORY = 20  # transfers: the age at which a measurement has lost most of its weight
CLIP = 4.0  # a transfer counts as no more than so many times slower than expected: it may have waited or compiled


class SwapCost:
    """The link between host and device: a transfer takes latency + bytes / rate. The rate is measured online.

    It is bytes over seconds of the transfers so far, both weighted exponentially by age. The two are not told apart by
    measurement: the latency is a constant, but less than the fastest transfer seen.

    Attributes:
      latency: seconds of a transfer that do not depend on its size.
    """

    def __init__(self, rate: float = START_RATE, latency: float = LATENCY):
        """rate: bytes a second until the first transfer is measured."""
        if rate <= 0 or latency < 0:
            raise ValueError(f"a link has a positive rate and no negative latency, got {rate} and {latency}")
        self.latency = latency
        self._start = rate
        self._bytes = 0.0
        self._seconds = 0.0

    @property
    def rate(self) -> float:
        """Bytes a second, beside the latency."""
        return self._bytes / self._seconds if self._bytes else self._start

    def load_seconds(self, size: int) -> float:
        """Expected time of a transfer of `size` bytes."""
        return self.latency + size / self.rate

    def prefers_load(self, size: int, recompute_seconds: float) -> bool:
        """Loading `size` bytes is faster than computing for so long."""
        return self.load_seconds(size) < recompute_seconds

    def observe(self, size: int, seconds: float) -> None:
        """A transfer of `size` bytes took so long."""
        if size <= 0 or seconds <= 0:
            return
        seconds = min(seconds, CLIP * self.load_seconds(size))
        self.latency = min(self.latency, 0.9 * seconds)
        keep = 1.0 - 1.0 / MEMORY
        self._bytes = keep * self._bytes + size
        self._seconds = keep * self._seconds + seconds - self.latency
