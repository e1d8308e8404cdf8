"""OutputEstimate: which share of what requests may still take will be taken, from those that finished."""

START = 0.7  # before anything finished: most requests end before their max_tokens, how early nobody knows
WORTH = 10  # requests: what START weighs beside the first ones that finish
MEMORY = 100  # requests: the age at which what finished has lost most of its weight
LEAST = 0.05  # of the share: however short outputs were, somebody's will be longer
ALARM = 2.0  # a preemption multiplies the caution by this
CALM = 0.98  # a request that finishes by this: as long as less than 3 in 100 are preempted, caution falls
BOLD = 0.1  # and no further: one preemption after the other makes up for it within four


class OutputEstimate:
    """The share of the declared output that admission reserves memory for.

    `ratio` is the share of their declared tokens that finished requests had generated, weighted by tokens, since it is
    tokens that pages hold, and exponentially by age; times a caution, which doubles with every preemption, when too
    much was admitted, and falls as requests finish. It falls below 1, for requests that end make room for those that
    grow: keeping what all of them may still take, as if none ended before the last has grown, lets others wait beside
    empty pages (docs/scheduling.md). Requests that were cancelled or failed say nothing about lengths and
    are not to be counted.

    Attributes:
      caution: in [BOLD, 1 / share].
    """

    def __init__(self, reserving: bool):
        """reserving: always reserve everything declared; `ratio` stays 1."""
        self._reserving = reserving
        self._declared = 0.0  # sums over what finished, by age
        self._actual = 0.0
        self.caution = 1.0

    @property
    def ratio(self) -> float:
        """In (0, 1]: what admission multiplies the tokens by that requests may still generate."""
        return 1.0 if self._reserving else min(1.0, self.share * self.caution)

    def finished(self, declared: int, actual: int) -> None:
        """A request came to its end after `actual` of at most `declared` output tokens."""
        if not 0 <= actual <= declared:
            raise ValueError(f"{actual} tokens of an output of at most {declared}")
        if not self._declared:
            self._declared, self._actual = WORTH * declared, WORTH * declared * START
        keep = 1.0 - 1.0 / MEMORY
        self._declared = keep * self._declared + declared
        self._actual = keep * self._actual + actual
        self.caution = max(BOLD, self.caution * CALM)

    def preempted(self) -> None:
        """A request lost its pages because others needed more than was reserved for them."""
        self.caution = min(self.caution * ALARM, 1.0 / self.share)  # no higher than reserves everything

    @property
    def share(self) -> float:
        """Of their declared tokens that requests generate."""
        return max(LEAST, self._actual / self._declared) if self._declared else START
