"""`jinfer batch`: answer the rows of a JSONL file."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from jinfer.cli.options import Config, ModelOption, Set, takes_sampling, takes_service
from jinfer.config.sampling import SamplingParams
from jinfer.config.service import ServiceParams
from jinfer.errors import JinferError

if TYPE_CHECKING:
    from rich.console import Console

    from jinfer.batch.runner import BatchCounts
    from jinfer.llm import LLM

Source = Annotated[Path, typer.Argument(metavar="IN.jsonl", help="Rows to answer, one JSON object a line.")]
Target = Annotated[Path, typer.Argument(
    metavar="OUT.jsonl",
    help="Answers, one JSON object a row, in the order of the rows. Written when all are done.")]
InFlight = Annotated[int | None, typer.Option(
    min=1, help="Rows handed to the engine at a time (default: twice max_rows). Changes no answer.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace OUT.jsonl if it exists.")]


@takes_service()
@takes_sampling("prompt_logprobs")
def batch(source: Source, target: Target, model: ModelOption = "smollm2-135m", in_flight: InFlight = None,
          overwrite: Overwrite = False, config: Config = None, set_: Set = None, *,
          sampling: dict[str, Any], service: dict[str, Any]) -> None:
    """Answer every row of IN.jsonl as one continuously batched job.

    A row is {"custom_id", "prompt" or "messages", and any sampling or service field}, or a row of an OpenAI batch
    file (completions or chat completions). A bad row gives an error record and the job goes on. Sampling and service
    options given here hold for rows that do not set them.

    Ctrl-C or SIGTERM ends the job when the rows that run are done; the same command goes on from there. A second one
    ends it at once.
    """
    from jinfer.batch.partial import partial_path
    from jinfer.batch.runner import check_paths
    from jinfer.cli.session import open_llm, stderr_console
    from jinfer.cli.signals import StopSignals
    SamplingParams.from_dict(sampling)  # refuses bad defaults before the model is loaded
    ServiceParams.from_dict(service)
    defaults = sampling | service
    check_paths(source, target, overwrite=overwrite, model=model, defaults=defaults)
    console = stderr_console()

    def say() -> None:
        console.print("stopping when the rows that run are done; once more stops at once", markup=False)

    with open_llm(model, config, set_ or [], console) as llm, StopSignals(say) as stop:
        counts = run_job(llm, source, target, console, title=f"{source.name} on {model}", model=model,
                         defaults=defaults, in_flight=in_flight, stop=stop)
    if counts.stopped:
        raise JinferError(f"stopped with {counts.completed + counts.failed:,} rows done, kept in "
                          f"{partial_path(target)}; the same command goes on from there")


def run_job(llm: "LLM", source: Path, target: Path, console: "Console", *, title: str,
            model: str = "", defaults: dict[str, Any] | None = None, in_flight: int | None = None,
            stop: Callable[[], bool] | None = None) -> "BatchCounts":
    """A batch file with a progress bar, and a summary table on the console when it is done, or stopped."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from jinfer.batch.partial import partial_path
    from jinfer.batch.runner import count_rows, run_file
    from jinfer.observe.report import Report, summary_table
    report, before, began = Report(), llm.metrics.snapshot(), time.monotonic()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
               TextColumn("{task.fields[rate]} output tok/s"))
    with Progress(*columns, console=console) as progress:
        task = progress.add_task(source.name, total=count_rows(source), rate="-")

        def show(counts: "BatchCounts") -> None:
            made = llm.metrics.output_tokens - before.output_tokens
            progress.update(task, completed=counts.completed + counts.failed,
                            rate=f"{made / max(time.monotonic() - began, 1e-9):,.0f}")

        counts = run_file(llm, source, target, model=model, defaults=defaults, in_flight=in_flight, stop=stop,
                          on_output=report.add, on_progress=show)
    seconds = time.monotonic() - began
    console.print(summary_table(report.summary(llm.metrics.since(before), seconds, counts.failed), title))
    skipped = f", {counts.skipped:,} blank lines skipped" if counts.skipped else ""
    resumed = f", {counts.resumed:,} of them in an earlier run" if counts.resumed else ""
    written = partial_path(target) if counts.stopped else target
    console.print(f"{written}: {counts.completed:,} answered, {counts.failed:,} failed{resumed}{skipped}", markup=False,
                  soft_wrap=True)
    return counts
