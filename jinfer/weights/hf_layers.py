"""Which layers of a config.json slide, and how far: runs of LayerConfig."""

from collections.abc import Sequence

from jinfer.config.model import LayerConfig, layer_runs
from jinfer.weights.hf_section import Section

Layers = tuple[LayerConfig, ...]
_TYPES = ("full_attention", "sliding_attention")


def uniform(window: int | None) -> Layers:
    """All layers have this window."""
    return (LayerConfig(window=window),)


def by_pattern(main: Section, window: int | None, sliding: Sequence[bool], *, local_rope: bool = False) -> Layers:
    """One flag for each layer, unless the file says `layer_types`.

    local_rope: sliding layers rotate with the model's local_rope.
    """
    types, count = main.data.get("layer_types"), main.integer("num_hidden_layers")
    if types is not None:
        if not isinstance(types, list) or len(types) != count:
            main.fail("layer_types", f"must be a list of num_hidden_layers {count} names")
        for name in types:
            if name not in _TYPES:
                main.fail("layer_types", f"{name!r} is not supported; supported: {', '.join(_TYPES)}")
        sliding = [name == "sliding_attention" for name in types]
    if any(sliding) and window is None:
        main.fail("sliding_window", "is missing, and layers ask for it")
    return layer_runs([LayerConfig(window=window, local_rope=local_rope) if slides else LayerConfig()
                       for slides in sliding])


def alternating(count: int) -> list[bool]:
    """The first layer slides, the second sees all, and so on."""
    return [i % 2 == 0 for i in range(count)]


def every_nth_full(count: int, n: int) -> list[bool]:
    """All layers slide but every n-th."""
    return [(i + 1) % n != 0 for i in range(count)]


def switched_window(main: Section) -> int | None:
    """Qwen's window, which has a switch of its own."""
    window: int | None = main.integer("sliding_window", 4096, null=None)
    return window if main.flag("use_sliding_window", False) else None


def last_layers_slide(main: Section) -> Layers:
    """Qwen 2 and 3: layers from max_window_layers on slide where the window is switched on."""
    window, first = switched_window(main), main.count("max_window_layers", 28)
    count = main.integer("num_hidden_layers")
    return by_pattern(main, window, [window is not None and i >= first for i in range(count)])
