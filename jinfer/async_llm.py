"""AsyncLLM: an engine on a thread of its own behind asyncio, for servers and other concurrent callers."""

import asyncio
import itertools
import queue
import threading
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from jinfer.config.engine import EngineConfig
from jinfer.config.sampling import SamplingParams
from jinfer.engine.outputs import Delta, RequestOutput
from jinfer.errors import JinferError, RequestError
from jinfer.llm import DEFAULT_MODEL, build_engine
from jinfer.observe.metrics import Metrics
from jinfer.prompts import Messages, Prompt, prepare

if TYPE_CHECKING:
    from jinfer.engine.engine import Engine
    from jinfer.tokenizer import Tokenizer


class _Listener:
    """Where one request's deltas, or its error, go: a queue that belongs to an event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop):
        self.loop = loop
        self.queue: asyncio.Queue[Delta | BaseException] = asyncio.Queue()


class AsyncLLM:
    """The same model from many tasks at once; requests are batched continuously.

    The engine runs on one background thread. A task that is cancelled, or a stream that is closed, cancels
    its request. If the engine fails, every waiting and every later call raises JinferError; nothing hangs.
    """

    def __init__(self, model: str | Path = DEFAULT_MODEL, config: EngineConfig | str | Path | None = None, *,
                 on_progress: Callable[[str], None] | None = None, **overrides: Any):
        """Loads the model in the calling thread, as LLM does; takes the same arguments."""
        self._start(build_engine(model, config, overrides, on_progress))

    @classmethod
    def from_engine(cls, engine: "Engine") -> Self:
        """An AsyncLLM over an engine that exists already, and that belongs to it from now on."""
        llm = cls.__new__(cls)
        llm._start(engine)
        return llm

    def _start(self, engine: "Engine") -> None:
        self.engine = engine
        self._names = (f"async-{i}" for i in itertools.count())
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()  # None: stop
        self._listeners: dict[str, _Listener] = {}  # touched by the engine's thread only
        self._failure: BaseException | None = None
        self._gate = threading.Lock()  # a command is either queued before the thread ends, or refused
        self._thread = threading.Thread(target=self._run, name="jinfer-engine", daemon=True)
        self._thread.start()

    @property
    def tokenizer(self) -> "Tokenizer | None":
        return self.engine.tokenizer

    @property
    def metrics(self) -> Metrics:
        """Live counters of the engine, written by its thread."""
        return self.engine.metrics

    async def generate(self, prompt: Prompt | Messages, params: SamplingParams | None = None, *,
                       request_id: str | None = None) -> RequestOutput:
        """Completes a prompt (text or token ids) or answers a conversation. A refusal raises RequestError."""
        output: RequestOutput | None = None
        stream = self.stream(prompt, params, request_id=request_id)
        try:
            async for delta in stream:
                output = delta.output
        finally:
            await stream.aclose()
        assert output is not None  # a request's last delta carries it
        return output

    async def stream(self, prompt: Prompt | Messages, params: SamplingParams | None = None, *,
                     request_id: str | None = None) -> AsyncGenerator[Delta, None]:
        """Yields the Deltas of one request; the last has `request_finished` and the whole output.

        The request is handed in when the first Delta is asked for; closing the generator cancels it.
        """
        name = next(self._names) if request_id is None else request_id
        listener = _Listener(asyncio.get_running_loop())
        self._post(lambda: self._submit(name, listener, prompt, params or SamplingParams()))
        ended = False
        try:
            while not ended:
                item = await listener.queue.get()
                if isinstance(item, BaseException):
                    ended = True
                    raise item
                ended = item.request_finished
                yield item
        finally:
            if not ended:
                self._post(lambda: self._drop(name, listener), strict=False)

    async def aclose(self) -> None:
        """Cancels what still runs (its callers get JinferError), stops the thread and closes the engine."""
        self._stop()
        await asyncio.to_thread(self._thread.join)

    def _stop(self) -> None:
        with self._gate:
            if self._failure is None:
                self._failure = JinferError("the engine is closed")
                self._commands.put(None)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.aclose()

    def _post(self, command: Callable[[], None], strict: bool = True) -> None:
        """Queues a command for the engine's thread. After its end: raises (strict) or does nothing."""
        with self._gate:
            if self._failure is None:
                self._commands.put(command)
            elif strict:
                raise JinferError(str(self._failure)) from self._failure

    # What follows runs on the engine's thread.

    def _run(self) -> None:
        try:
            while self._obey():
                if self.engine.has_work:
                    self._deliver(self.engine.step())
        except BaseException as error:  # whatever it is, the callers must hear of it
            with self._gate:
                self._failure = JinferError(f"the engine failed: {type(error).__name__}: {error}")
                self._failure.__cause__ = error
        finally:
            self._end()

    def _obey(self) -> bool:
        """Runs the commands that wait; sleeps for one when there is nothing else to do. False: stop."""
        while True:
            try:
                command = self._commands.get(block=not self.engine.has_work)
            except queue.Empty:
                return True
            if command is None:
                return False
            command()

    def _submit(self, name: str, listener: _Listener, item: object, params: SamplingParams) -> None:
        try:
            if self._failure is not None:  # queued before the end, reached after it
                raise JinferError(str(self._failure)) from self._failure
            if name in self._listeners:
                raise RequestError("request_id", f"{name} is in use")
            prompt, add_special = prepare(item, self.engine.tokenizer)
            self.engine.submit(prompt, params, request_id=name, add_special=add_special)
            self._listeners[name] = listener
        except Exception as error:  # a failing request fails alone
            self._send({listener.loop: [(listener, error)]})

    def _drop(self, name: str, listener: _Listener) -> None:
        if self._listeners.get(name) is listener:
            del self._listeners[name]
            self.engine.cancel(name)

    def _deliver(self, deltas: list[Delta]) -> None:
        parcels: dict[asyncio.AbstractEventLoop, list[tuple[_Listener, Delta | BaseException]]] = {}
        for delta in deltas:
            listener = self._listeners.get(delta.request_id)
            if listener is None:
                continue
            parcels.setdefault(listener.loop, []).append((listener, delta))
            if delta.request_finished:
                del self._listeners[delta.request_id]
        self._send(parcels)

    def _send(self, parcels: dict[asyncio.AbstractEventLoop,
                                  list[tuple[_Listener, Delta | BaseException]]]) -> None:
        """Wakes each event loop once, whatever the number of its requests."""
        for loop, parcel in parcels.items():
            try:
                loop.call_soon_threadsafe(_unpack, parcel)
            except RuntimeError:  # that loop is closed: nobody is left to read
                for name in [n for n, one in self._listeners.items() if one.loop is loop]:
                    self._drop(name, self._listeners[name])

    def _end(self) -> None:
        """No command comes any more: tell everybody who waits, also those whose command was not reached."""
        while not self._commands.empty():
            command = self._commands.get()
            if command is not None:
                _quietly(command)  # a submission is refused now, its caller is told
        failure = self._failure
        assert failure is not None
        parcels: dict[asyncio.AbstractEventLoop, list[tuple[_Listener, Delta | BaseException]]] = {}
        for listener in self._listeners.values():
            told = JinferError(str(failure))  # each task its own: a raised exception collects a traceback
            told.__cause__ = failure.__cause__
            parcels.setdefault(listener.loop, []).append((listener, told))
        self._send(parcels)
        self._listeners.clear()
        _quietly(self.engine.close)


def _unpack(parcel: list[tuple[_Listener, Delta | BaseException]]) -> None:
    for listener, item in parcel:
        listener.queue.put_nowait(item)


def _quietly(action: Callable[[], None]) -> None:
    """For a broken engine: the first failure is the one to report."""
    try:
        action()
    except Exception:
        return
