"""The `jinfer` command: sub-commands, and how errors reach the user."""

import sys
from typing import Annotated

import typer

import jinfer
from jinfer.cli.batch import batch
from jinfer.cli.chat import chat
from jinfer.cli.convert import convert
from jinfer.cli.generate import generate
from jinfer.cli.inspect import inspect
from jinfer.cli.plan import plan
from jinfer.cli.simulate import simulate
from jinfer.errors import JinferError

app = typer.Typer(name="jinfer", no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False,
                  rich_markup_mode=None,  # rich's help cuts long option names at 80 columns
                  context_settings={"help_option_names": ["-h", "--help"]},
                  help="Transformer inference on JAX/XLA: paged KV, continuous batching, streaming.")
app.command()(generate)
app.command()(chat)
app.command()(batch)
app.command()(convert)
app.command()(inspect)
app.command()(simulate)
app.add_typer(plan, name="plan")


def _version(wanted: bool) -> None:
    if wanted:
        print(f"jinfer {jinfer.__version__}")
        raise typer.Exit


@app.callback()
def _root(version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True,
                                                help="Print the version and leave.")] = False) -> None:
    pass


def main() -> None:
    """Entry point. Exit status: 0 done, 1 an error (one line on stderr), 2 wrong usage."""
    try:
        app()
    except JinferError as error:
        print(f"jinfer: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
