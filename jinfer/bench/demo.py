"""The demo: the prompts of configs/workloads/demo.jsonl as one batch job on the embedded model."""

from pathlib import Path
from typing import Annotated

import typer

from jinfer.batch.runner import check_paths
from jinfer.cli.batch import run_job
from jinfer.cli.options import Config, ModelOption, Set
from jinfer.cli.session import open_llm, stderr_console
from jinfer.config.loading import configs_dir
from jinfer.errors import JinferError

Output = Annotated[Path, typer.Option("--output", "-o", help="Where the answers go; replaced if it exists.")]


def demo(model: ModelOption = "smollm2-135m", output: Output = Path("demo_output.jsonl"),
         config: Config = None, set_: Set = None) -> None:
    """Fetch the embedded model if need be and complete the 32 demo prompts, batched continuously."""
    source = configs_dir() / "workloads" / "demo.jsonl"
    check_paths(source, output, overwrite=True)
    console = stderr_console()
    with open_llm(model, config, set_ or [], console) as llm:
        counts = run_job(llm, source, output, console, title=f"32 demo prompts on {model}")
    if counts.failed:
        raise JinferError(f"{output}: {counts.failed} of the demo's rows failed")


def main() -> None:
    """`python -m jinfer.bench.demo`; errors are reported as the `jinfer` command does."""
    try:
        typer.run(demo)
    except JinferError as error:
        raise SystemExit(f"jinfer: {error}") from None


if __name__ == "__main__":
    main()
