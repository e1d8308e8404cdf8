"""LLM: the Python API. Prompts in, RequestOutputs out, everything on the caller's thread."""

from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self, overload

from jinfer.config.engine import EngineConfig
from jinfer.config.loading import load_config, replace_config
from jinfer.config.sampling import SamplingParams
from jinfer.config.service import ServiceParams
from jinfer.engine.outputs import Delta, RequestOutput
from jinfer.errors import JinferError, OverloadError, RequestError
from jinfer.inbox import Box, DeltaStream, Inbox
from jinfer.observe.metrics import Metrics
from jinfer.prompts import Messages, Prompt, is_conversation, is_one_prompt

if TYPE_CHECKING:
    from jinfer.engine.engine import Engine
    from jinfer.tokenizer import Tokenizer

DEFAULT_MODEL = "smollm2-135m"

type OnDelta = Callable[[Delta], None]
type Params = SamplingParams | Sequence[SamplingParams] | None
type Service = ServiceParams | Sequence[ServiceParams] | None
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
        self, prompts: str, params: Params = ..., *, service: Service = ..., on_delta: OnDelta | None = ...,
        errors: OnError = ...) -> RequestOutput: ...
    @overload
    def generate(self, prompts: Sequence[int], params: Params = ..., *, service: Service = ...,
                 on_delta: OnDelta | None = ..., errors: OnError = ...) -> RequestOutput: ...
    @overload
    def generate(self, prompts: Sequence[str] | Sequence[Sequence[int]] | Sequence[Prompt],
                 params: Params = ..., *, service: Service = ..., on_delta: OnDelta | None = ...,
                 errors: OnError = ...) -> list[RequestOutput]: ...

    def generate(self, prompts: Any, params: Params = None, *, service: Service = None, on_delta: OnDelta | None = None,
                 errors: OnError = "raise") -> RequestOutput | list[RequestOutput]:
        """Completes one prompt (text or token ids) or many, batched continuously.

        Args:
          prompts: one prompt gives one RequestOutput; a list of prompts gives a list in the same order.
          params, service: for all prompts, or one for each.
          on_delta: called with every Delta as it arrives, prompts interleaved.
          errors: `raise`: a prompt the engine refuses raises RequestError, which names its place in the list,
            before anything has run. `return`: its RequestOutput carries `.error` and the others run. One that
            fails later (finish reason `error`) carries `.error` either way.

        Prompts beyond the engine's `max_waiting` wait here and are looked at when there is room, so one of them may be
        refused late; then the others are cancelled. Where an engine drains, what it takes no more carries `.error`.
        """
        if is_one_prompt(prompts):
            return self._run([prompts], params, service, on_delta, errors, single=True)[0]
        return self._run(_listed("prompts", prompts), params, service, on_delta, errors)

    @overload
    def chat(self, messages: Messages, params: Params = ..., *, service: Service = ..., on_delta: OnDelta | None = ...,
             errors: OnError = ...) -> RequestOutput: ...
    @overload
    def chat(self, messages: Sequence[Messages], params: Params = ..., *, service: Service = ...,
             on_delta: OnDelta | None = ..., errors: OnError = ...) -> list[RequestOutput]: ...

    def chat(self, messages: Any, params: Params = None, *, service: Service = None, on_delta: OnDelta | None = None,
             errors: OnError = "raise") -> RequestOutput | list[RequestOutput]:
        """Answers a conversation (a list of {"role", "content"}) or several, through the model's template."""
        if is_conversation(messages):
            return self._run([messages], params, service, on_delta, errors, single=True)[0]
        conversations = _listed("messages", messages)
        for i, conversation in enumerate(conversations):
            if not is_conversation(conversation):
                raise RequestError("messages", f"[{i}] is not a conversation: {conversation!r:.60}")
        return self._run(conversations, params, service, on_delta, errors)

    def stream(self, prompt: Prompt | Messages, params: SamplingParams | None = None, *,
               service: ServiceParams | None = None) -> DeltaStream:
        """An iterator over the Deltas of one prompt or conversation; the last has `request_finished`.

        The request is accepted, or refused, before this returns. Closing the iterator, or letting go of it,
        cancels the request. Streams may be interleaved with each other and with generate().
        """
        return DeltaStream(self.inbox, prompt, params or SamplingParams(), service)

    @overload
    def score(  # type: ignore[overload-overlap]  # text is a sequence of texts, too
        self, prompts: str, *, top: int = ..., service: Service = ..., errors: OnError = ...) -> RequestOutput: ...
    @overload
    def score(self, prompts: Sequence[int], *, top: int = ..., service: Service = ...,
              errors: OnError = ...) -> RequestOutput: ...
    @overload
    def score(self, prompts: Sequence[str] | Sequence[Sequence[int]] | Sequence[Prompt], *, top: int = ...,
              service: Service = ..., errors: OnError = ...) -> list[RequestOutput]: ...

    def score(self, prompts: Any, *, top: int = 0, service: Service = None,
              errors: OnError = "raise") -> RequestOutput | list[RequestOutput]:
        """Log-probabilities of the tokens of one text (or list of ids) or many; nothing is generated.

        Each RequestOutput's `prompt_logprobs` has one TokenLogprob a token (None for the first), with the
        `top` most likely alternatives.
        """
        return self.generate(prompts, SamplingParams(max_tokens=0, prompt_logprobs=top), service=service, errors=errors)

    def pin(self, prompt: Prompt | Messages, service: ServiceParams | None = None) -> str:
        """Computes a prefix, if the prefix cache lacks it, and holds its whole pages until `unpin`; returns its id.

        The first messages of a conversation, a system prompt for example, are rendered without an answer's beginning.

        Raises RequestError, CapacityError where one full context would not fit beside all pins, or OverloadError.
        """
        box: Box = deque()
        name = self.inbox.pin(prompt, box, service)
        try:
            while not (delta := self.inbox.wait(box)).request_finished:
                pass
        finally:
            self.inbox.drop(name)
        check_pinned(delta.output)
        return name

    def unpin(self, name: str) -> None:
        """Gives up a pin; its pages stay cached until they are needed."""
        self.engine.unpin(name)

    def drain(self, hand_back: bool = False) -> list[str]:
        """Finishes what was submitted, whoever waits for it, and takes no more: OverloadError, until `resume`.

        hand_back: requests of which nothing is computed yet end at once, reason `cancelled`, with an OverloadError as
        `.error`; their ids are returned, for another engine to take them.
        """
        names = self.engine.drain(hand_back)
        while self.engine.has_work:
            self.inbox.turn()
        return names

    def resume(self) -> None:
        """Ends a drain."""
        self.engine.resume()

    def _run(self, items: Sequence[object], params: Params, service: Service, on_delta: OnDelta | None, errors: OnError,
             single: bool = False) -> list[RequestOutput]:
        if errors not in ("raise", "return"):
            raise RequestError("errors", f"must be raise or return, got {errors!r}")
        each = zip(items, _spread("params", params, SamplingParams(), len(items)),
                   _spread("service", service, ServiceParams(), len(items)), strict=True)
        todo = deque(enumerate(each))
        outputs: list[RequestOutput | None] = [None] * len(items)
        places: dict[str, int] = {}
        unfinished = 0
        box: Box = deque()
        try:
            while todo or unfinished:
                while todo:
                    place, (item, one, promise) = todo[0]
                    if self._must_wait(one):
                        break
                    todo.popleft()
                    try:
                        places[self.inbox.submit(item, one, box, promise)] = place
                        unfinished += 1
                    except JinferError as error:
                        late = isinstance(error, OverloadError) and bool(places)  # a drain while we were at it
                        if errors == "raise" and not late:
                            if single:
                                raise
                            raise _at(place, error) from error
                        outputs[place] = _refused(place, item, error)
                if todo and not box:
                    self.inbox.turn()  # every turn may make room
                    continue
                if not unfinished:
                    continue
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

    def _must_wait(self, params: SamplingParams) -> bool:
        """The queue has no room for the request now, but will have."""
        engine = self.engine
        return engine.has_work and not engine.draining and not engine.takes(params.n)

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


def _spread[P](name: str, given: P | Sequence[P] | None, default: P, count: int) -> list[P]:
    """Parameters for each prompt."""
    if given is None or isinstance(given, type(default)):
        return [given or default] * count
    if not isinstance(given, Sequence):
        raise RequestError(name, f"must be {type(default).__name__} or a list of them, got {given!r:.60}")
    if len(given) != count:
        raise RequestError(name, f"{len(given)} given for {count} prompts")
    return list(given)


def check_pinned(output: RequestOutput) -> None:
    """Raises what kept the pages of a pin from being held."""
    if output.error is not None:
        raise output.error
    reason = output.completions[0].finish_reason
    if reason != "length":
        raise JinferError(f"the prefix was not pinned: its request ended as {reason}")


def _at(place: int, error: JinferError) -> JinferError:
    """The same error, saying which prompt of the list it is about."""
    if isinstance(error, RequestError):
        return type(error)(f"prompts[{place}]: {error.field}", str(error).removeprefix(f"{error.field}: "))
    return type(error)(f"prompts[{place}]: {error}")


def _refused(place: int, item: object, error: JinferError) -> RequestOutput:
    ids = list(item) if is_one_prompt(item) and not isinstance(item, str) else []
    return RequestOutput(f"refused-{place}", item if isinstance(item, str) else None, ids, [], error=error)
