"""Options that several commands share. Many come from SamplingParams and ServiceParams, help texts included."""

import inspect
import re
import types
import typing
from collections.abc import Callable, Collection, Mapping
from typing import Annotated, Any

import typer

from jinfer.config.sampling import SamplingParams
from jinfer.config.service import ServiceParams
from jinfer.errors import RequestError

_MODEL = ("A model folder, a .gguf file, a Hugging Face Hub id, or smollm2-135m or gemma3-270m (under the Gemma Terms "
          "of Use), which are fetched when needed.")

Model = Annotated[str, typer.Argument(metavar="MODEL", help=_MODEL)]
ModelOption = Annotated[str, typer.Option("--model", "-m", metavar="MODEL", help=_MODEL)]
Config = Annotated[str | None, typer.Option(
    "--config", "-c", metavar="NAME|FILE",
    help="Engine configuration: a YAML file, or the name of one that comes with jinfer, e.g. cpu-int8.")]
Set = Annotated[list[str] | None, typer.Option(
    "--set", "-s", metavar="KEY=VALUE",
    help="Override one value of the configuration, e.g. max_rows=16 or layout.mesh.tensor=2. Repeatable.")]

# Lists are given by repeating a singular option.
_FLAGS = {"stop": "--stop", "stop_token_ids": "--stop-token-id", "logit_bias": "--logit-bias"}
_METAVARS = {"stop": "TEXT", "stop_token_ids": "ID", "logit_bias": "ID=NUMBER"}
_HELP = {"max_tokens": "Most tokens to generate; 0 scores the prompt only.",
         "cache": "Read from and publish to the prefix cache."}

type Params = type[SamplingParams] | type[ServiceParams]


type Decorator = Callable[[Callable[..., None]], Callable[..., None]]


def takes_sampling(*without: str, **defaults: Any) -> Decorator:
    """Decorator: replaces a command's parameter `sampling` by one option for each field of SamplingParams.

    The command gets `sampling`, a dict of the fields the user gave, on top of `defaults`, the command's own. Fields
    named in `without` get no option.
    """
    return _takes("sampling", SamplingParams, without, defaults)


def takes_service(*without: str) -> Decorator:
    """The same for the parameter `service` and ServiceParams."""
    return _takes("service", ServiceParams, without, {})


def _takes(parameter: str, params: Params, without: Collection[str], defaults: dict[str, Any]) -> Decorator:
    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        usual = _defaults(params)
        fields = [name for name in usual if name not in without]

        def run(**values: Any) -> None:
            given = {name: values.pop(name) for name in fields}
            values[parameter] = defaults | {name: _plain(name, value, usual[name]) for name, value in
                                                  given.items() if value is not None and value != []}
            command(**values)

        signature = inspect.signature(command, eval_str=True)
        kept = [p for p in signature.parameters.values() if p.name != parameter]
        added = [_option(params, name, (usual | defaults)[name], parameter.capitalize()) for name in fields]
        # typer reads the signature and, for the types, the annotations
        run.__signature__ = inspect.Signature([*kept, *added])  # type: ignore[attr-defined]
        run.__annotations__ = {p.name: p.annotation for p in [*kept, *added]}
        run.__name__, run.__doc__ = command.__name__, command.__doc__
        return run
    return decorate


def _defaults(params: Params) -> dict[str, Any]:
    return {name: getattr(params(), name) for name in typing.get_type_hints(params)}


def _option(params: Params, name: str, default: Any, panel: str) -> inspect.Parameter:
    kind = _kind(typing.get_type_hints(params)[name])
    text = _HELP.get(name) or field_help(params).get(name, "").replace("None", "not given")
    flag = _FLAGS.get(name, f"--{name.replace('_', '-')}")
    if name in _FLAGS:
        text += " Repeatable."
    elif kind is bool and default:
        flag, text = f"--no-{flag.removeprefix('--')}", f"Do not {text[0].lower()}{text[1:]}"
    elif default not in (None, "") and kind is not bool:
        text = f"{text.removesuffix('.')} (default {default})."
    option = typer.Option(flag, help=text, show_default=False, rich_help_panel=panel,
                          metavar=_METAVARS.get(name, None if kind is bool else "TEXT" if kind is str else "NUMBER"))
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None,
                             annotation=Annotated[kind | None, option])


def _kind(hint: Any) -> Any:
    """The type of a command line option for a field."""
    if isinstance(hint, types.UnionType):
        hint = next(a for a in typing.get_args(hint) if a is not type(None))
    if typing.get_origin(hint) is tuple:
        return list[int] if typing.get_args(hint)[0] is int else list[str]
    return list[str] if typing.get_origin(hint) is Mapping else hint


def _plain(name: str, value: Any, default: Any) -> Any:
    """What the user typed -> the field's value."""
    if default is True:
        return not value  # its flag is --no-...
    if name != "logit_bias":
        return value
    bias = {}
    for pair in value:
        token, _, amount = pair.partition("=")
        try:
            bias[int(token)] = float(amount)
        except ValueError:
            raise RequestError("logit_bias", f"must look like ID=NUMBER, got {pair!r}") from None
    return bias


def field_help(params: Params = SamplingParams) -> dict[str, str]:
    """Field name -> its sentence in the docstring of the class, in one line."""
    texts: dict[str, str] = {}
    name = ""
    for line in inspect.cleandoc(params.__doc__ or "").splitlines():
        start = re.match(r"  (\w+): (.*)", line)
        if start:
            name, texts[start[1]] = start[1], start[2]
        elif name and line.startswith("    "):
            texts[name] += " " + line.strip()
        else:
            name = ""
    return {name: text[0].upper() + text[1:] for name, text in texts.items()}


