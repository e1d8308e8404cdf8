"""YAML files and `--set key=value` -> frozen configuration dataclasses. Every mistake names its key."""

import dataclasses
import difflib
import functools
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import yaml

from jinfer.config.device import DeviceConfig, ProfileConfig
from jinfer.config.engine import EngineConfig
from jinfer.config.layout import LayoutConfig
from jinfer.config.model import ModelConfig
from jinfer.config.workload import WorkloadConfig
from jinfer.errors import ConfigError

# Where the files of a class live below the configs directory.
_FOLDERS: dict[type, str] = {EngineConfig: "engine", LayoutConfig: "layouts", ModelConfig: "models",
                             DeviceConfig: "devices", ProfileConfig: "profiles", WorkloadConfig: "workloads"}


def configs_dir() -> Path:
    """The directory of the configurations that come with jinfer: `jinfer/configs` in an installed wheel,
    `configs` beside the package in a checkout."""
    package = Path(__file__).resolve().parents[1]
    packaged = package / "configs"
    return packaged if packaged.is_dir() else package.parent / "configs"


def config_names(folder: str) -> list[str]:
    """Names the options accept, from the YAML files of `folder` (engine, layouts, models, devices, workloads)."""
    return sorted(path.stem for path in (configs_dir() / folder).glob("*.yaml"))


def load_config[C](cls: type[C], source: str | Path | None = None, overrides: Sequence[str] = ()) -> C:
    """Builds `cls`: EngineConfig, LayoutConfig, ModelConfig, DeviceConfig or WorkloadConfig.

    Args:
      source: a YAML file, or the name of one that comes with jinfer (`cpu-int8`); None means the defaults.
      overrides: `key=value` each; keys may be dotted (`layout.mesh.tensor=4`), values are YAML. A layout may
        be given by name wherever a layout stands (`layout=tp2`).

    Raises ConfigError, naming the key, for an unknown key (with the nearest known one), a value of another
    type, a missing required value, a file that cannot be read, and whatever the class itself refuses.
    """
    tree = _read(cls, source) if source is not None else {}
    for override in overrides:
        key, separator, text = override.partition("=")
        if not separator or not key.strip():
            raise ConfigError(f"--set {override!r}: must look like key=value")
        key = key.strip()
        _assign(cls, tree, key.split("."), _parse(text, f"--set {key}"), key)
    return _build(cls, tree, "")


def replace_config[C](config: C, values: Mapping[str, Any]) -> C:
    """A copy of `config` with some fields replaced; types and names are checked as those of a YAML file."""
    cls: Any = type(config)
    hints = _hints(cls)
    checked = {key: _convert(hints[_known(key, hints, cls, "")], value, key) for key, value in values.items()}
    return dataclasses.replace(config, **checked)  # type: ignore[type-var]


def _read(cls: type, source: str | Path) -> dict[str, Any]:
    """The plain mapping in a file, found by path or by name."""
    folder, path = _FOLDERS[cls], Path(source)
    looks_like_a_file = path.suffix in (".yaml", ".yml") or len(path.parts) > 1
    if not looks_like_a_file:
        path = configs_dir() / folder / f"{source}.yaml"
        if not path.is_file():
            known = config_names(folder)
            raise ConfigError(f"{source}: no such configuration{_nearest(str(source), known)}; "
                              f"a YAML file or one of {', '.join(known)}")
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from None
    tree = _parse(text, str(path))
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise ConfigError(f"{path}: must hold `key: value` lines, got {tree!r:.60}")
    return tree


class _Loader(yaml.SafeLoader):
    """SafeLoader that refuses a key given twice (PyYAML silently keeps the last)."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for key in keys:
            if keys.count(key) > 1:
                raise yaml.constructor.ConstructorError(None, None, f"{key}: given twice", node.start_mark)
        return super().construct_mapping(node, deep)


def _parse(text: str, where: str) -> Any:
    try:
        return yaml.load(text, _Loader)
    except yaml.YAMLError as error:
        raise ConfigError(f"{where}: not valid YAML: {' '.join(str(error).split())}") from None


def _assign(cls: type, tree: dict[str, Any], path: Sequence[str], value: Any, key: str) -> None:
    """Sets tree[path[0]][path[1]]... = value, filling in defaults on the way so that siblings survive."""
    hints = _hints(cls)
    head = _known(path[0], hints, cls, key.rpartition(path[0])[0])
    if len(path) == 1:
        tree[head] = value
        return
    inner = _not_none(hints[head])
    node = tree.get(head, _default(cls, head))
    if dataclasses.is_dataclass(inner) and isinstance(inner, type):
        node = _read(inner, node) if isinstance(node, str) else dict(node or {})
        _assign(inner, node, path[1:], value, key)
    elif typing.get_origin(inner) is dict and len(path) == 2:
        node = {**(node or {}), path[1]: value}
    else:
        raise ConfigError(f"{key}: {head} has no parts")
    tree[head] = node


def _not_none(hint: Any) -> Any:
    """T of `T | None`."""
    options = [option for option in typing.get_args(hint) if option is not type(None)]
    return options[0] if typing.get_origin(hint) is types.UnionType and len(options) == 1 else hint


def _default(cls: type, name: str) -> Any:
    """The default of a field as plain data, {} when it has none."""
    field = next(f for f in dataclasses.fields(cls) if f.name == name)
    if field.default_factory is not dataclasses.MISSING:
        value = field.default_factory()
    else:
        value = {} if field.default is dataclasses.MISSING else field.default
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    return value


def _build(cls: Any, tree: Mapping[Any, Any], prefix: str) -> Any:
    hints = _hints(cls)
    values = {}
    for key, value in tree.items():
        name = _known(key, hints, cls, prefix)
        values[name] = _convert(hints[name], value, prefix + name)
    for field in dataclasses.fields(cls):
        required = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        if required and field.name not in values:
            raise ConfigError(f"{prefix}{field.name}: required by {cls.__name__} and not given")
    try:
        return cls(**values)
    except ConfigError as error:
        field_name = str(error).partition(":")[0]
        if field_name in hints:  # the class does not know where in the file it stands
            raise ConfigError(f"{prefix}{error}") from None
        raise


def _convert(hint: Any, value: Any, key: str) -> Any:
    """Plain YAML data -> a value of the annotated type, or ConfigError."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        if isinstance(value, hint):
            return value
        if isinstance(value, str) and hint in _FOLDERS:
            value = _read(hint, value)
        if not isinstance(value, dict):
            raise _mismatch(key, "a mapping", value)
        return _build(hint, value, f"{key}.")
    if origin in (types.UnionType, typing.Union):
        if value is None and type(None) in args:
            return None
        *others, last = [a for a in args if a is not type(None)]
        for option in others:
            try:
                return _convert(option, value, key)
            except ConfigError:
                continue
        return _convert(last, value, key)
    if origin is Literal:
        if value not in args:
            raise ConfigError(f"{key}: must be {' or '.join(map(str, args))}, got {value!r}"
                              f"{_nearest(str(value), [str(a) for a in args])}")
        return value
    if origin is dict:
        if not isinstance(value, Mapping):
            raise _mismatch(key, "a mapping", value)
        return {_convert(args[0], k, f"{key}.{k}"): _convert(args[1], v, f"{key}.{k}")
                for k, v in value.items()}
    if origin is tuple:
        if not isinstance(value, list | tuple):
            raise _mismatch(key, "a list", value)
        return tuple(_convert(args[0], v, f"{key}[{i}]") for i, v in enumerate(value))
    return _scalar(hint, value, key)


def _scalar(hint: Any, value: Any, key: str) -> Any:
    if hint is bool and isinstance(value, bool):
        return value
    if hint is int and isinstance(value, int) and not isinstance(value, bool):
        return value
    if hint is float and not isinstance(value, bool):
        try:
            return float(value)  # also a string: YAML 1.1 reads 1e-5 as one
        except (TypeError, ValueError):
            pass
    if hint in (str, Path) and isinstance(value, str | Path):
        return hint(value)
    names = {bool: "true or false", int: "an integer", float: "a number", str: "a string", Path: "a path"}
    raise _mismatch(key, names.get(hint, str(hint)), value)


@functools.cache
def _hints(cls: type) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def _known(key: Any, hints: Mapping[str, Any], cls: type, prefix: str) -> str:
    if key not in hints:
        nearest = _nearest(str(key), list(hints)) or f"; known: {', '.join(hints)}"
        raise ConfigError(f"{prefix}{key}: unknown key of {cls.__name__}{nearest}")
    return key


def _nearest(word: str, known: Sequence[str]) -> str:
    close = difflib.get_close_matches(word, known, n=1)
    return f"; did you mean {close[0]}?" if close else ""


def _mismatch(key: str, wanted: str, value: Any) -> ConfigError:
    return ConfigError(f"{key}: must be {wanted}, got {value!r}")
