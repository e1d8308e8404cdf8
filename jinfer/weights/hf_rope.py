"""Rotary parameters of a config.json -> RopeConfig.

Old files hold `rope_theta` and `rope_scaling` (with `type` or `rope_type`), those of transformers 5 one
`rope_parameters`, or one for each type of layer. Parameters that are not known are refused by name.
"""

from typing import Any, cast

from jinfer.config.model import RopeConfig, RopeKind
from jinfer.weights.hf_section import Section

_COMMON = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
_KEYS: dict[str, set[str]] = {
    "default": set(),
    "linear": {"factor"},
    "dynamic": {"factor", "original_max_position_embeddings"},
    "yarn": {"factor", "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow",
             "mscale", "mscale_all_dim", "truncate"},
    "llama3": {"factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"},
    "longrope": {"factor", "original_max_position_embeddings", "attention_factor", "short_factor", "long_factor"},
}


def read_rope(main: Section, positions: int, lanes: int, *, theta: float = 10_000.0,
              original: int | None = None, aliases: dict[str, str] | None = None) -> RopeConfig:
    """The rotation of a model that has one.

    Args:
      main: the whole config.json.
      positions: its max_position_embeddings.
      lanes: of a head that partial_rotary_factor is a share of.
      theta: base where the file names none.
      original: context first trained on where the file names none; None is `positions`.
      aliases: older names of rope types.
    """
    # transformers takes rope_scaling where a file holds both
    key = "rope_scaling" if main.data.get("rope_scaling") else "rope_parameters"
    return _read(main, key, main.inner(key), positions, lanes, theta=main.number("rope_theta", theta),
                 original=original or positions, aliases=aliases or {})


def read_rope_by_layer_type(main: Section, positions: int, lanes: int, *, theta: float,
                            local_theta: float) -> tuple[RopeConfig, RopeConfig]:
    """The rotations of full and of sliding layers (Gemma 3).

    Old files: scaling and `rope_theta` are of full layers, `rope_local_base_freq` is of sliding ones.
    """
    new = main.inner("rope_parameters")
    names = ("full_attention", "sliding_attention")
    for name, value in new.data.items():
        if name not in names or not isinstance(value, dict | None):
            main.fail(f"rope_parameters.{name}", f"is not the rope of a type of layer: {', '.join(names)}")
    scaling = main.inner("rope_scaling")
    full = Section(scaling.path if scaling.data else new.path, {**(new.data.get(names[0]) or {}), **scaling.data})
    sliding = new.inner(names[1])
    key = "rope_scaling" if scaling.data else f"rope_parameters.{names[0]}"
    return (_read(main, key, full, positions, lanes, theta=main.number("rope_theta", theta), original=positions),
            _read(main, f"rope_parameters.{names[1]}", sliding, positions, lanes,
                  theta=main.number("rope_local_base_freq", local_theta), original=positions))


def context_length(rope: RopeConfig, positions: int) -> int:
    """Longest sequence in tokens, from the stored one: that is unextended for dynamic and may be for yarn."""
    if rope.kind in ("dynamic", "yarn"):
        return max(positions, int(rope.factor * rope.original_context))
    return positions


def _read(main: Section, key: str, scaling: Section, positions: int, head_lanes: int, *, theta: float,
          original: int, aliases: dict[str, str] | None = None) -> RopeConfig:
    if any(isinstance(value, dict) for value in scaling.data.values()):
        main.fail(key, "parameters that differ by layer type are not supported")
    kind = scaling.data.get("rope_type", scaling.data.get("type", "default"))
    kind = (aliases or {}).get(kind, kind)
    if kind not in _KEYS:
        main.fail(f"{key}.rope_type", f"{kind!r} is not supported; supported: {', '.join(_KEYS)}")
    for name in scaling.data:
        if name not in _KEYS[kind] | _COMMON:
            main.fail(f"{key}.{name}", f"is not a known parameter of rope type {kind!r}")
    partial = scaling.number("partial_rotary_factor", None)
    if partial is None:
        partial = main.number("partial_rotary_factor", 1.0)
    lanes = int(head_lanes * partial)
    if not 0.0 < partial <= 1.0 or lanes < 2 or lanes % 2:
        main.fail("partial_rotary_factor", f"{partial} of head_dim {head_lanes} is not an even number of lanes")
    # transformers prefers the key outside the object
    outside = main.integer("original_max_position_embeddings", None)
    original = outside or scaling.integer("original_max_position_embeddings", original)
    if kind == "dynamic":
        original = positions  # transformers reads this one, whatever the file says
    factor = 1.0
    if kind in ("yarn", "longrope"):
        factor = scaling.number("factor", None)
        factor = positions / original if factor is None else factor
    elif kind != "default":
        factor = scaling.number("factor")
    if not factor > 0:
        main.fail(f"{key}.factor", f"must be positive, got {factor}")
    return RopeConfig(theta=scaling.number("rope_theta", theta), kind=cast(RopeKind, kind), factor=factor,
                      original_context=original, partial=partial, **_options(main, key, scaling, kind, lanes))


def _options(main: Section, key: str, scaling: Section, kind: str, lanes: int) -> dict[str, Any]:
    """What only one kind has."""
    if kind == "yarn":
        options = {n: scaling.number(n, None) for n in ("attention_factor", "mscale", "mscale_all_dim")}
        options["beta_fast"] = scaling.number("beta_fast", None) or 32.0
        options["beta_slow"] = scaling.number("beta_slow", None) or 1.0
        options["truncate"] = scaling.flag("truncate", True)
        return options
    if kind == "llama3":
        options = {name: scaling.number(name) for name in ("low_freq_factor", "high_freq_factor")}
        if not options["low_freq_factor"] < options["high_freq_factor"]:
            main.fail(f"{key}.high_freq_factor", "must be greater than low_freq_factor")
        return options
    if kind == "longrope":
        options = {"attention_factor": scaling.number("attention_factor", None)}
        for name in ("short_factor", "long_factor"):
            values = scaling.numbers(name)
            if len(values) != lanes // 2:
                main.fail(f"{key}.{name}", f"holds {len(values)} numbers for {lanes // 2} frequencies")
            options[f"{name}s"] = values
        return options
    return {}
