"""PageGroup: layers that need their pages for equally long, and so share a page table."""

import dataclasses
from collections.abc import Sequence

from jinfer.config.model import LayerConfig


@dataclasses.dataclass(frozen=True, slots=True)
class PageGroup:
    """Attributes:
      window: tokens a query of these layers sees, itself included; None sees all.
      layers: indices of the layers, ascending.
    """

    window: int | None
    layers: tuple[int, ...]


def page_groups(kinds: Sequence[LayerConfig]) -> tuple[PageGroup, ...]:
    """Groups of a model's layers (ModelConfig.layer_kinds), the one that sees everything first."""
    windows = sorted({kind.window for kind in kinds}, key=lambda window: (window is not None, window))
    return tuple(PageGroup(window, tuple(i for i, kind in enumerate(kinds) if kind.window == window))
                 for window in windows)
