"""What every command does first: read the configuration, load the model, and say so on the terminal."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape

from jinfer.config.engine import EngineConfig
from jinfer.config.loading import load_config

if TYPE_CHECKING:
    from jinfer.llm import LLM

LAZY = ("warmup=false",)  # commands that answer a few prompts load the programs these need, not all


def stderr_console() -> Console:
    """Where progress goes, so that stdout holds nothing but answers."""
    return Console(stderr=True, highlight=False)


def open_llm(model: str, config: str | None, overrides: Sequence[str], console: Console) -> "LLM":
    """Builds the LLM and says what it is doing: a spinner on a terminal, else a line for each stage.

    A bad configuration is refused before JAX is loaded.
    """
    engine_config = load_config(EngineConfig, config, overrides)
    with console.status(escape(f"loading {model}")) as status:
        from jinfer.llm import LLM

        def show(text: str) -> None:
            status.update(escape(text))
            if not console.is_terminal:
                console.print(text, markup=False, soft_wrap=True)
        return LLM(model, engine_config, on_progress=show)
