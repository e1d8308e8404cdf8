"""How much a sequence caches: numbers by page group, from the model's configuration alone."""

import dataclasses
from collections.abc import Sequence

from jinfer.config.model import ModelConfig
from jinfer.kv.groups import page_groups
from jinfer.kv.sizing import pages_for, window_pages


@dataclasses.dataclass(frozen=True, slots=True)
class CacheGroup:
    """A page group of a model.

    Attributes:
      window: positions a query sees, itself included; None sees all. layers: how many.
      width: numbers a layer caches for a position: keys and values of K heads, 2 * K * H, or one latent vector.
    """

    window: int | None
    layers: int
    width: int

    def positions(self, tokens: int, page_size: int) -> int:
        """Positions held for a decoding sequence of `tokens`, in whole pages."""
        pages, most = pages_for(tokens, page_size), window_pages(self.window, page_size, 1)
        return (pages if most is None else min(pages, most)) * page_size


def cache_groups(config: ModelConfig) -> tuple[CacheGroup, ...]:
    """The page groups, in their order in the engine."""
    width = config.cache_heads * config.cache_width * (1 if config.latent else 2)
    return tuple(CacheGroup(group.window, len(group.layers), width) for group in page_groups(config.layer_kinds))


def sequence_numbers(groups: Sequence[CacheGroup], tokens: int, page_size: int) -> int:
    """Numbers cached for one sequence of `tokens`, in all layers."""
    return sum(group.layers * group.width * group.positions(tokens, page_size) for group in groups)


def longest_sequence(groups: Sequence[CacheGroup], numbers: int, page_size: int, most: int) -> int:
    """Tokens of the longest sequence, up to `most`, that `numbers` cached numbers hold; 0 if not a page fits."""
    low, high = 0, pages_for(most, page_size)
    while low < high:  # the need grows with the pages
        middle = -(-(low + high) // 2)
        if sequence_numbers(groups, middle * page_size, page_size) <= numbers:
            low = middle
        else:
            high = middle - 1
    return min(low * page_size, most)
