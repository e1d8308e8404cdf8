"""`jinfer convert`: write a checkpoint in another format."""

import enum
import time
from pathlib import Path
from typing import Annotated

import typer

from jinfer.cli.options import Model


class Format(enum.StrEnum):
    SAFETENSORS = "safetensors"
    ORBAX = "orbax"


class StoredType(enum.StrEnum):
    KEEP = "keep"
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


Target = Annotated[Path, typer.Argument(metavar="DST", help="The folder to write; it appears when it is complete.")]
To = Annotated[Format, typer.Option(
    "--to", help="safetensors: a Hugging Face folder. orbax: the same with the tensors in an Orbax checkpoint, of "
                 "which each device reads its part alone.")]
Dtype = Annotated[StoredType, typer.Option(
    "--dtype", help="Type of the stored tensors. keep: as they are; quantised ones become float32.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace DST if it is a model.")]


def convert(source: Model, target: Target, to: To, dtype: Dtype = StoredType.KEEP,
            overwrite: Overwrite = False) -> None:
    """Convert a checkpoint, with configuration, tokenizer and chat template, tensor by tensor.

    Example: jinfer convert smollm2-135m smollm2 --to safetensors --dtype bfloat16
    """
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    from jinfer.cli.session import stderr_console
    from jinfer.weights import resolve_model
    from jinfer.weights.convert import convert as write
    from jinfer.weights.files import check_target
    console = stderr_console()
    path, began, size = resolve_model(source), time.monotonic(), 0
    check_target(target, overwrite=overwrite)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task(target.name, total=None)

        def show(done: int, total: int) -> None:
            nonlocal size
            size = total
            progress.update(task, completed=done, total=total)

        write(path, target, to.value, dtype=dtype.value, overwrite=overwrite, progress=show)
    seconds = time.monotonic() - began
    console.print(f"{target}: {size / 1e9:.2f} GB in {seconds:.1f} s", markup=False, soft_wrap=True)
