"""`jinfer generate`: complete prompts from the command line."""

import json
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from jinfer.cli.options import Config, Model, Set, takes_sampling, takes_service
from jinfer.config.sampling import SamplingParams
from jinfer.config.service import ServiceParams
from jinfer.errors import RequestError

if TYPE_CHECKING:
    from jinfer.llm import LLM

Prompts = Annotated[list[str] | None, typer.Option(
    "--prompt", "-p", metavar="TEXT",
    help="Text to complete. Repeatable: prompts run as one batch. Without it, stdin is the prompt.")]
AsChat = Annotated[bool, typer.Option(
    "--chat", help="Treat each prompt as a user's message and answer it through the model's chat template.")]
System = Annotated[str | None, typer.Option("--system", help="System message; implies --chat.")]
AsJson = Annotated[bool, typer.Option(
    "--json",
    help="Print one JSON object a prompt (text, token ids, finish reason, log-probabilities, timing).")]


@takes_service()
@takes_sampling()
def generate(model: Model = "smollm2-135m", prompts: Prompts = None, chat: AsChat = False,
             system: System = None, as_json: AsJson = False, config: Config = None, set_: Set = None, *,
             sampling: dict[str, Any], service: dict[str, Any]) -> None:
    """Complete one or more prompts.

    One prompt streams as it is made; several are batched and printed in order.

    Example: jinfer generate -p "The capital of France is" --temperature 0 --max-tokens 16
    """
    from jinfer.cli.session import LAZY, open_llm, stderr_console
    params, promise = SamplingParams.from_dict(sampling), ServiceParams.from_dict(service)
    texts = prompts or [_from_stdin()]
    items: list[Any] = list(texts)
    if chat or system is not None:
        head = [] if system is None else [{"role": "system", "content": system}]
        items = [[*head, {"role": "user", "content": text}] for text in texts]
    one = ["max_rows=1"] if len(items) == 1 and params.n == 1 else []  # a smaller pool to allocate
    with open_llm(model, config, [*LAZY, *one, *(set_ or [])], stderr_console()) as llm:
        if len(items) == 1 and params.n == 1 and not as_json:
            _stream(llm, items[0], params, promise)
        else:
            _batch(llm, items, params, promise, as_json)


def _from_stdin() -> str:
    if sys.stdin.isatty():
        raise RequestError("prompt", "give --prompt TEXT, or a text on stdin")
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        raise RequestError("prompt", f"stdin is not {error.encoding.upper()} at byte {error.start}") from None


def _stream(llm: "LLM", item: Any, params: SamplingParams, service: ServiceParams) -> None:
    with llm.stream(item, params, service=service) as stream:
        for delta in stream:
            sys.stdout.write(delta.text)
            sys.stdout.flush()
            if delta.output.error is not None:
                raise delta.output.error
    sys.stdout.write("\n")


def _batch(llm: "LLM", items: list[Any], params: SamplingParams, service: ServiceParams, as_json: bool) -> None:
    from jinfer.batch.records import success_record
    from jinfer.batch.rows import Row
    run = llm.chat if isinstance(items[0], list) else llm.generate
    outputs = run(items, params, service=service)
    for i, output in enumerate(outputs):
        if output.error is not None:
            raise output.error
        if as_json:
            record = success_record(Row(i + 1, str(i), "plain", items[i], params, service), output, llm.tokenizer)
            del record["custom_id"]
            print(json.dumps({"prompt": output.prompt, **record}, ensure_ascii=False))
            continue
        for choice in output.completions:
            if len(items) > 1 or params.n > 1:
                print(f"--- {i + 1}" + (f".{choice.index + 1}" if params.n > 1 else ""))
            print(choice.text)
