"""OutputEstimate: which share of what requests may still take will be taken, from those that finished."""

START = 0.7  # before anything finished: most requests end before their max_tokens, how early nobody knows
WORTH = 10  # requests: what START weighs beside the first ones that finish
MEMORY = 100  # requests: the age at which what finished has lost most of its weight
LEAST = 0.05  # of the share: however short outputs were, somebody's will be longer
ALARM = 1.25  # a preemption multiplies the caution by this
CALM = 0.98  # a request that finishes leaves this share of the caution above 1: half is gone after 34


class OutputEstimate:
    """The share of the declared output that admission reserves memory for.

    `ratio` is the share of their declared tokens that finished requests had generated, weighted by tokens, since it is
    tokens that pages hold, and exponentially by age; times a caution of 1 or more, which rises with every preemption,
    when too much was admitted, and falls back to 1 as requests finish. Requests that were cancelled or failed say
    nothing about lengths and are not to be counted.
    """

    def __init__(self, reserving: bool):
        """reserving: always reserve everything declared; `ratio` stays 1."""
        self._reserving = reserving
        self._declared = 0.0  # sums over what finished, by age
        self._actual = 0.0
        self._caution = 1.0

    @property
    def ratio(self) -> float:
        """In (0, 1]: what admission multiplies the tokens by that requests may still generate."""
        return 1.0 if self._reserving else min(1.0, self._share * self._caution)

    def finished(self, declared: int, actual: int) -> None:
        """A request came to its end after `actual` of at most `declared` output tokens."""
        if not 0 <= actual <= declared:
            raise ValueError(f"{actual} tokens of an output of at most {declared}")
        if not self._declared:
            self._declared, self._actual = WORTH * declared, WORTH * declared * START
        keep = 1.0 - 1.0 / MEMORY
        self._declared = keep * self._declared + declared
        self._actual = keep * self._actual + actual
        self._caution = 1.0 + (self._caution - 1.0) * CALM

    def preempted(self) -> None:
        """A request lost its pages because others needed more than was reserved for them."""
        self._caution = min(self._caution * ALARM, 1.0 / self._share)  # no higher than reserves everything

    @property
    def _share(self) -> float:
        return max(LEAST, self._actual / self._declared) if self._declared else START
