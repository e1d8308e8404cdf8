"""AsyncLLM: an engine on a thread of its own behind asyncio, for servers and other concurrent callers."""

import asyncio
import concurrent.futures
import itertools
import queue
import threading
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from jinfer.config.engine import EngineConfig
from jinfer.config.sampling import SamplingParams
from jinfer.config.service import ServiceParams
from jinfer.engine.outputs import Delta, RequestOutput
from jinfer.errors import JinferError, OverloadError, RequestError
from jinfer.llm import DEFAULT_MODEL, build_engine, check_pinned
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
        self._listeners: dict[str, _Listener] = {}  # touched by the engine's thread only, as what follows
        self._idlers: list[concurrent.futures.Future[None]] = []  # who waits until nothing runs
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
                       service: ServiceParams | None = None, request_id: str | None = None) -> RequestOutput:
        """Completes a prompt (text or token ids) or answers a conversation.

        A refusal raises RequestError; a full queue or a drain OverloadError, also one that hands the request back.
        """
        output = await _last(self.stream(prompt, params, service=service, request_id=request_id))
        if isinstance(output.error, OverloadError):
            raise output.error
        return output

    def stream(self, prompt: Prompt | Messages, params: SamplingParams | None = None, *,
               service: ServiceParams | None = None, request_id: str | None = None) -> AsyncGenerator[Delta, None]:
        """Yields the Deltas of one request; the last has `request_finished` and the whole output.

        The request is handed in when the first Delta is asked for; closing the generator cancels it.
        """
        name = next(self._names) if request_id is None else request_id

        def hand_in() -> None:
            text, add_special = prepare(prompt, self.engine.tokenizer)
            self.engine.submit(text, params or SamplingParams(), service=service, request_id=name,
                               add_special=add_special)
        return self._listen(name, hand_in)

    async def pin(self, prompt: Prompt | Messages, service: ServiceParams | None = None) -> str:
        """Computes a prefix, if the prefix cache lacks it, and holds its whole pages until `unpin`; see `LLM.pin`."""
        name = next(self._names)

        def hand_in() -> None:
            text, add_special = prepare(prompt, self.engine.tokenizer, answer=False)
            self.engine.pin(text, service, request_id=name, add_special=add_special)
        try:
            check_pinned(await _last(self._listen(name, hand_in)))
        except asyncio.CancelledError:  # perhaps just after it was held
            self._post(lambda: _quietly(lambda: self.engine.unpin(name)), strict=False)
            raise
        return name

    async def unpin(self, name: str) -> None:
        """Gives up a pin; its pages stay cached until they are needed."""
        await self._ask(lambda: self.engine.unpin(name))

    async def drain(self, hand_back: bool = False) -> list[str]:
        """Takes no more requests (OverloadError, until `resume`), and returns when nothing runs any more.

        hand_back: requests of which nothing is computed yet end at once, and their callers get OverloadError; their ids
        are returned, for another engine to take them.
        """
        names = await self._ask(lambda: self.engine.drain(hand_back))
        idle: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._post(lambda: self._idlers.append(idle))
        await asyncio.wrap_future(idle)
        return names

    async def resume(self) -> None:
        """Ends a drain."""
        await self._ask(self.engine.resume)

    async def _ask[T](self, action: Callable[[], T]) -> T:
        """What `action` returns or raises on the engine's thread."""
        answer: concurrent.futures.Future[T] = concurrent.futures.Future()

        def act() -> None:
            if not answer.set_running_or_notify_cancel():
                return
            try:
                if self._failure is not None:  # queued before the end, reached after it
                    raise JinferError(str(self._failure)) from self._failure
                answer.set_result(action())
            except Exception as error:
                answer.set_exception(error)
        self._post(act)
        return await asyncio.wrap_future(answer)

    async def _listen(self, name: str, hand_in: Callable[[], None]) -> AsyncGenerator[Delta, None]:
        """The Deltas of what `hand_in`, called on the engine's thread, submits under this name."""
        listener = _Listener(asyncio.get_running_loop())
        self._post(lambda: self._submit(name, listener, hand_in))
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
            if self._idlers and not self.engine.has_work:
                for idle in self._idlers:
                    if idle.set_running_or_notify_cancel():
                        idle.set_result(None)
                self._idlers.clear()
            try:
                command = self._commands.get(block=not self.engine.has_work)
            except queue.Empty:
                return True
            if command is None:
                return False
            command()

    def _submit(self, name: str, listener: _Listener, hand_in: Callable[[], None]) -> None:
        try:
            if self._failure is not None:  # queued before the end, reached after it
                raise JinferError(str(self._failure)) from self._failure
            if name in self._listeners:
                raise RequestError("request_id", f"{name} is in use")
            hand_in()
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
        for idle in self._idlers:
            if idle.set_running_or_notify_cancel():
                idle.set_exception(JinferError(str(failure)))
        self._idlers.clear()
        self._listeners.clear()
        _quietly(self.engine.close)


async def _last(stream: AsyncGenerator[Delta, None]) -> RequestOutput:
    """Reads to the end; leaving early closes the stream, which cancels its request."""
    output: RequestOutput | None = None
    try:
        async for delta in stream:
            output = delta.output
    finally:
        await stream.aclose()
    assert output is not None  # a request's last delta carries it
    return output


def _unpack(parcel: list[tuple[_Listener, Delta | BaseException]]) -> None:
    for listener, item in parcel:
        listener.queue.put_nowait(item)


def _quietly(action: Callable[[], None]) -> None:
    """For a broken engine: the first failure is the one to report."""
    try:
        action()
    except Exception:
        return
