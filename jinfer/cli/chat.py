"""`jinfer chat`: a conversation in the terminal."""

import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from jinfer.cli.options import Config, Model, Set, takes_sampling, takes_service
from jinfer.config.sampling import SamplingParams
from jinfer.config.service import ServiceParams
from jinfer.errors import RequestError

if TYPE_CHECKING:
    from rich.console import Console

    from jinfer.llm import LLM

System = Annotated[str | None, typer.Option("--system", help="System message that opens the conversation.")]

HELP = "/reset starts a new conversation, /exit or Ctrl-D leaves, Ctrl-C stops an answer."


@takes_service("priority", "ttft_target", "itl_target")  # which weigh requests against each other
@takes_sampling("n", "prompt_logprobs", "logprobs", max_tokens=1024)
def chat(model: Model = "smollm2-135m", system: System = None, config: Config = None, set_: Set = None, *,
         sampling: dict[str, Any], service: dict[str, Any]) -> None:
    """Talk with a model. Answers stream; the whole conversation is sent each time.

    /reset starts a new conversation, /exit or Ctrl-D leaves, Ctrl-C stops an answer.
    """
    from jinfer.cli.session import LAZY, open_llm, stderr_console
    params, promise = SamplingParams.from_dict(sampling), ServiceParams.from_dict(service)
    console = stderr_console()
    with open_llm(model, config, ["max_rows=1", *LAZY, *(set_ or [])], console) as llm:
        console.print(HELP, style="dim")
        converse(llm, system, params, console, promise)


def converse(llm: "LLM", system: str | None, params: SamplingParams, console: "Console",
             service: ServiceParams | None = None) -> None:
    """Reads lines from stdin and answers each until /exit or the end of input."""
    start = [] if system is None else [{"role": "system", "content": system}]
    messages = list(start)
    while True:
        try:
            line = input("> " if sys.stdin.isatty() else "").strip()
        except EOFError:
            return
        except KeyboardInterrupt:
            console.print("\n" + HELP, style="dim")
            continue
        if not line:
            continue
        if line == "/exit":
            return
        if line == "/reset":
            messages = list(start)
            console.print("new conversation", style="dim")
            continue
        if line.startswith("/"):
            console.print(f"{line.split()[0]} is no command. {HELP}", style="dim", markup=False)
            continue
        messages.append({"role": "user", "content": line})
        try:
            text = answer(llm, messages, params, console, service)
        except RequestError as error:  # as a rule: the conversation has outgrown the context
            messages.pop()
            console.print(f"{error} (/reset starts a new conversation)", style="red", markup=False)
            continue
        messages.append({"role": "assistant", "content": text})


def answer(llm: "LLM", messages: list[dict[str, str]], params: SamplingParams, console: "Console",
           service: ServiceParams | None = None) -> str:
    """Streams one answer to stdout and returns it. Ctrl-C ends the answer, not the conversation."""
    parts: list[str] = []
    with llm.stream(messages, params, service=service) as stream:
        try:
            for delta in stream:
                parts.append(delta.text)
                sys.stdout.write(delta.text)
                sys.stdout.flush()
                if delta.output.error is not None:
                    raise delta.output.error
            if delta.finish_reason == "timeout":
                console.print(" [timed out]", style="dim", markup=False, end="")
        except KeyboardInterrupt:
            stream.close()
            console.print(" [stopped]", style="dim", markup=False, end="")
    sys.stdout.write("\n")
    sys.stdout.flush()
    return "".join(parts)
