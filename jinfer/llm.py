"""LLM: the Python API. Prompts in, RequestOutputs out, everything on the caller's thread."""

from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self, overload

from jinfer.config.engine import EngineConfig
from jinfer.config.loading import load_config, replace_config
from jinfer.config.sampling import SamplingParams
from jinfer.engine.outputs import Delta, RequestOutput
from jinfer.errors import JinferError, RequestError
from jinfer.inbox import Box, DeltaStream, Inbox
from jinfer.observe.metrics import Metrics
from jinfer.prompts import Messages, Prompt, is_conversation, is_one_prompt

if TYPE_CHECKING:
    from jinfer.engine.engine import Engine
    from jinfer.tokenizer import Tokenizer

DEFAULT_MODEL = "smollm2-135m"

type OnDelta = Callable[[Delta], None]
type Params = SamplingParams | Sequence[SamplingParams] | None
type OnError = Literal["raise", "return"]


def build_engine(model: str | Path, config: EngineConfig | str | Path | None, overrides: dict[str, Any],
                 on_progress: Callable[[str], None] | None) -> "Engine":
    """The engine behind LLM and AsyncLLM. `config` may be the name or path of a YAML file."""
    if not isinstance(config, EngineConfig):
        config = load_config(EngineConfig, config)
    config = replace_config(config, overrides)
    from jinfer.engine.engine import Engine  # JAX comes in here, after the configuration was found good
    return Engine(model, config, on_progress=on_progress)


class LLM:
    """A model ready to answer.

        llm = LLM("smollm2-135m", max_rows=16)
        print(llm.generate("The capital of France is", SamplingParams(max_tokens=8)).text)

    Use it as a context manager, or call close(). One thread at a time; AsyncLLM is for servers.
    """

    def __init__(self, model: str | Path = DEFAULT_MODEL, config: EngineConfig | str | Path | None = None, *,
                 on_progress: Callable[[str], None] | None = None, **overrides: Any):
        """Loads `model`: a folder, a .gguf file, a Hub id, or the embedded default `smollm2-135m`.

        Args:
          config: an EngineConfig, or the name or path of a YAML file (`cpu-int8`).
          on_progress: told in short lines what loading is doing.
          overrides: fields of EngineConfig set on top, e.g. `max_rows=16`.

        Raises ConfigError, CheckpointError, TokenizerError or CacheError.
        """
        self._adopt(build_engine(model, config, overrides, on_progress))

    @classmethod
    def from_engine(cls, engine: "Engine") -> Self:
        """An LLM over an engine that exists already; close() closes it."""
        llm = cls.__new__(cls)
        llm._adopt(engine)
        return llm

    def _adopt(self, engine: "Engine") -> None:
        self.engine = engine
        self.inbox = Inbox(engine)
        self._closed = False

    @property
    def tokenizer(self) -> "Tokenizer | None":
        """The model's tokenizer, `.chat` its chat template; None where the checkpoint has none."""
        return self.engine.tokenizer

    @property
    def metrics(self) -> Metrics:
        """Live counters of the engine; take a `snapshot()` to compare."""
        return self.engine.metrics

    @overload
    def generate(  # type: ignore[overload-overlap]  # text is a sequence of texts, too
        self, prompts: str, params: Params = ..., *, on_delta: OnDelta | None = ...,
        errors: OnError = ...) -> RequestOutput: ...
    @overload
    def generate(self, prompts: Sequence[int], params: Params = ..., *, on_delta: OnDelta | None = ...,
                 errors: OnError = ...) -> RequestOutput: ...
    @overload
    def generate(self, prompts: Sequence[str] | Sequence[Sequence[int]] | Sequence[Prompt],
                 params: Params = ..., *, on_delta: OnDelta | None = ...,
                 errors: OnError = ...) -> list[RequestOutput]: ...

    def generate(self, prompts: Any, params: Params = None, *, on_delta: OnDelta | None = None,
                 errors: OnError = "raise") -> RequestOutput | list[RequestOutput]:
        """Completes one prompt (text or token ids) or many, batched continuously.

        Args:
          prompts: one prompt gives one RequestOutput; a list of prompts gives a list in the same order.
          params: for all prompts, or one for each.
          on_delta: called with every Delta as it arrives, prompts interleaved.
          errors: `raise`: a prompt the engine refuses raises RequestError, which names its place in the list,
            before anything has run. `return`: its RequestOutput carries `.error` and the others run. One that
            fails later (finish reason `error`) carries `.error` either way.
        """
        if is_one_prompt(prompts):
            return self._run([prompts], params, on_delta, errors, single=True)[0]
        return self._run(_listed("prompts", prompts), params, on_delta, errors)

    @overload
    def chat(self, messages: Messages, params: Params = ..., *, on_delta: OnDelta | None = ...,
             errors: OnError = ...) -> RequestOutput: ...
    @overload
    def chat(self, messages: Sequence[Messages], params: Params = ..., *, on_delta: OnDelta | None = ...,
             errors: OnError = ...) -> list[RequestOutput]: ...

    def chat(self, messages: Any, params: Params = None, *, on_delta: OnDelta | None = None,
             errors: OnError = "raise") -> RequestOutput | list[RequestOutput]:
        """Answers a conversation (a list of {"role", "content"}) or several, through the model's template."""
        if is_conversation(messages):
            return self._run([messages], params, on_delta, errors, single=True)[0]
        conversations = _listed("messages", messages)
        for i, conversation in enumerate(conversations):
            if not is_conversation(conversation):
                raise RequestError("messages", f"[{i}] is not a conversation: {conversation!r:.60}")
        return self._run(conversations, params, on_delta, errors)

    def stream(self, prompt: Prompt | Messages, params: SamplingParams | None = None) -> DeltaStream:
        """An iterator over the Deltas of one prompt or conversation; the last has `request_finished`.

        The request is accepted, or refused, before this returns. Closing the iterator, or letting go of it,
        cancels the request. Streams may be interleaved with each other and with generate().
        """
        return DeltaStream(self.inbox, prompt, params or SamplingParams())

    @overload
    def score(  # type: ignore[overload-overlap]  # text is a sequence of texts, too
        self, prompts: str, *, top: int = ..., errors: OnError = ...) -> RequestOutput: ...
    @overload
    def score(self, prompts: Sequence[int], *, top: int = ..., errors: OnError = ...) -> RequestOutput: ...
    @overload
    def score(self, prompts: Sequence[str] | Sequence[Sequence[int]] | Sequence[Prompt], *, top: int = ...,
              errors: OnError = ...) -> list[RequestOutput]: ...

    def score(self, prompts: Any, *, top: int = 0,
              errors: OnError = "raise") -> RequestOutput | list[RequestOutput]:
        """Log-probabilities of the tokens of one text (or list of ids) or many; nothing is generated.

        Each RequestOutput's `prompt_logprobs` has one TokenLogprob a token (None for the first), with the
        `top` most likely alternatives.
        """
        return self.generate(prompts, SamplingParams(max_tokens=0, prompt_logprobs=top), errors=errors)

    def _run(self, items: Sequence[object], params: Params, on_delta: OnDelta | None, errors: OnError,
             single: bool = False) -> list[RequestOutput]:
        if errors not in ("raise", "return"):
            raise RequestError("errors", f"must be raise or return, got {errors!r}")
        each = _spread(params, len(items))
        outputs: list[RequestOutput | None] = [None] * len(items)
        places: dict[str, int] = {}
        box: Box = deque()
        try:
            for place, (item, one) in enumerate(zip(items, each, strict=True)):
                try:
                    places[self.inbox.submit(item, one, box)] = place
                except JinferError as error:
                    if errors == "raise":
                        if single:
                            raise
                        raise _at(place, error) from error
                    outputs[place] = _refused(place, item, error)
            unfinished = len(places)
            while unfinished:
                delta = self.inbox.wait(box)
                if delta.request_finished:
                    outputs[places[delta.request_id]] = delta.output
                    unfinished -= 1
                if on_delta is not None:
                    on_delta(delta)
        finally:
            for request_id in places:  # whatever stopped us, an interrupt or on_delta, nothing runs on
                self.inbox.drop(request_id)
        return [output for output in outputs if output is not None]

    def close(self) -> None:
        """Frees the engine's memory. Harmless when done twice."""
        if not self._closed:
            self._closed = True
            self.engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _listed(field: str, items: object) -> Sequence[object]:
    if not isinstance(items, Sequence) or isinstance(items, str | bytes):
        raise RequestError(field, f"must be one or a list, got {items!r:.60}")
    return items


def _spread(params: Params, count: int) -> list[SamplingParams]:
    """One SamplingParams for each prompt."""
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if len(params) != count:
        raise RequestError("params", f"{len(params)} given for {count} prompts")
    return list(params)


def _at(place: int, error: JinferError) -> JinferError:
    """The same error, saying which prompt of the list it is about."""
    if isinstance(error, RequestError):
        return type(error)(f"prompts[{place}]: {error.field}", str(error).removeprefix(f"{error.field}: "))
    return type(error)(f"prompts[{place}]: {error}")


def _refused(place: int, item: object, error: JinferError) -> RequestOutput:
    ids = list(item) if is_one_prompt(item) and not isinstance(item, str) else []
    return RequestOutput(f"refused-{place}", item if isinstance(item, str) else None, ids, [], error=error)
