"""What every command does first: read the configuration, load the model, and say so on the terminal."""

import re
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape

from jinfer.config.engine import EngineConfig
from jinfer.config.loading import load_config

if TYPE_CHECKING:
    from jinfer.llm import LLM

LINE_SECONDS = 10.0  # between lines about the same stage
LAZY = ("warmup=false",)  # commands that answer a few prompts load the programs these need, not all


def stderr_console() -> Console:
    """Where progress goes, so that stdout holds nothing but answers."""
    return Console(stderr=True, highlight=False)


def open_llm(model: str, config: str | None, overrides: Sequence[str], console: Console) -> "LLM":
    """Builds the LLM and says what it is doing: a spinner on a terminal, else a line for each stage, and
    now and then one about its progress.

    A bad configuration is refused before JAX is loaded.
    """
    engine_config = load_config(EngineConfig, config, overrides)
    with console.status(escape(f"loading {model}")) as status:
        from jinfer.llm import LLM

        stage, said = "", 0.0

        def show(text: str) -> None:
            nonlocal stage, said
            status.update(escape(text))
            now, name = time.monotonic(), re.split(r"\s\d", text)[0]
            if not console.is_terminal and (name != stage or now - said > LINE_SECONDS):
                console.print(text, markup=False, soft_wrap=True)
                stage, said = name, now
        return LLM(model, engine_config, on_progress=show)
