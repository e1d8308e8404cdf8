"""`jinfer plan capacity`: how many engines of which configuration hold a load within latency targets."""

import typer

plan = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Plan for devices that need not be here.")


@plan.callback()
def _root() -> None:
    pass
