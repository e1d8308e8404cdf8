"""Engine: the loop. Plan, dispatch, collect the step before; requests in, deltas out."""

import functools
import itertools
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from jinfer.config import EngineConfig, SamplingParams, ServiceParams
from jinfer.engine.admission import Admission
from jinfer.engine.build import build
from jinfer.engine.choice import Choice
from jinfer.engine.outputs import Delta, RequestOutput, Timing, TokenLogprob
from jinfer.engine.results import StepResults, score_prompt
from jinfer.engine.worker import Worker
from jinfer.errors import CapacityError, JinferError, OverloadError, RequestError
from jinfer.observe.stalls import StallMeter, cause_of
from jinfer.scheduler import Chunk, FinishReason, Request, StepPlan

UNFILLED_EVERY = 16  # steps: the one gauge that costs O(rows)


class Engine:
    """Continuous batching of one model. Single-threaded: whoever calls `step` owns it.

    Attributes:
      config, model_config, tokenizer: what it was built from. max_context: longest sequence, tokens.
      metrics: counters, updated in place. draining: it takes no more requests.
    """

    def __init__(self, model: str | Path, config: EngineConfig | None = None, *,
                 on_progress: Callable[[str], None] | None = None):
        """Loads and compiles everything.

        Args:
          model: a folder, a .gguf file, the name of the embedded default, or a Hub id.
          on_progress: told in a few words what is going on.

        Raises:
          ConfigError, LayoutError, CheckpointError, TokenizerError, CacheError: one line each.
        """
        parts = build(model, config or EngineConfig(), on_progress or (lambda text: None))
        self.config = parts.config
        self.model_config = parts.model
        self.tokenizer = parts.tokenizer
        self.max_context = parts.admission.max_context
        self.metrics = parts.metrics
        self._admission: Admission = parts.admission
        self._fleet = parts.fleet
        self._outputs: dict[str, RequestOutput] = {}
        self._choices: dict[str, list[Choice]] = {}
        self._by_request: dict[Request, Choice] = {}
        self._deltas: list[Delta] = []  # of cancellations, handed out by the next step
        self._ids = (f"req-{i}" for i in itertools.count())
        self._pins: dict[str, Callable[[], None] | None] = {}  # by request: gives it up; None while it is computed
        self._stalls = StallMeter()
        self.draining = self._failed = self._closed = False

    @property
    def has_work(self) -> bool:
        """Something to compute, to collect or to hand out."""
        return not self._closed and (bool(self._deltas) or self._fleet.has_work)

    @property
    def workers(self) -> list[Worker]:
        """The device groups it drives, those that are lost too."""
        return self._fleet.workers

    def submit(self, prompt: str | Sequence[int], params: SamplingParams | None = None, *,
               service: ServiceParams | None = None, request_id: str | None = None, add_special: bool = True) -> str:
        """Queues a request; its deltas come out of `step`.

        Args:
          service: how urgently it is served, its timeout and its use of the prefix cache.
          add_special: add the beginning-of-sequence token to text as the tokenizer is configured (not for
            rendered chat templates, which hold it already).

        Returns:
          The request's id.

        Raises:
          RequestError, CapacityError: the request is refused and nothing else is disturbed.
          OverloadError: the queue is full (`takes`) or the engine drains.
          JinferError: the engine is closed, or failed before.
        """
        self._check_usable()
        if self.draining:
            self.metrics.requests_rejected += 1
            raise OverloadError("the engine is draining and takes no more requests")
        start = time.perf_counter()
        params = params or SamplingParams()
        if request_id is None:
            request_id = next(name for name in self._ids if name not in self._outputs and name not in self._pins)
        if request_id in self._outputs or request_id in self._pins:
            raise RequestError("request_id", f"{request_id!r} is in use")
        # The last words of a cancelled request of that name would be taken for the new one's.
        self._deltas = [delta for delta in self._deltas if delta.request_id != request_id]
        ids = self._admission.tokens(prompt, add_special)
        now = time.perf_counter()
        requests = self._admission.requests(request_id, ids, params, now, service or ServiceParams())
        try:
            self._fleet.add(requests)
        except OverloadError:
            self.metrics.requests_rejected += 1
            raise
        named = self._admission.named_stops(params)
        choices = [Choice(request, self.tokenizer, named) for request in requests]
        self._choices[request_id] = choices
        self._by_request.update(zip(requests, choices, strict=True))
        self._outputs[request_id] = RequestOutput(
            request_id, prompt if isinstance(prompt, str) else None, ids, [c.completion for c in choices],
            None if params.prompt_logprobs is None else [TokenLogprob(ids[0], None)] * len(ids),
            Timing(arrived=now, tokenise=now - start))
        self.metrics.prompt_tokens += len(ids)
        self._gauge()
        return request_id

    def cancel(self, request_id: str) -> bool:
        """Ends a request in whatever state it is; False if it is not there any more.

        The next `step` hands out its last deltas, unless its id is used again before.
        """
        if request_id not in self._choices:
            return False
        self.metrics.requests_cancelled += 1
        self._stop(request_id, "cancelled")
        return True

    def takes(self, choices: int = 1) -> bool:
        """True if the queue has room for a request of so many choices now, and the engine does not drain."""
        most = self.config.max_waiting
        return not self.draining and (most is None or self._fleet.entrance.scheduler.waiting + choices <= most)

    def drain(self, hand_back: bool = False) -> list[str]:
        """Takes no more requests, until `resume`; what was taken is finished by `step` as ever.

        hand_back: those of which nothing is computed yet are handed back instead, for another engine to take.
        Returns their ids.
        """
        self.draining = True
        return self.hand_back(list(self._choices)) if hand_back else []

    def resume(self) -> None:
        """Ends a drain."""
        self.draining = False

    def hand_back(self, request_ids: Iterable[str]) -> list[str]:
        """Ends those of the requests of which nothing is computed yet; returns their ids.

        Their finish reason is `cancelled`, their `output.error` an OverloadError: they were never refused for
        themselves, and another engine can take them as they are.
        """
        given = [name for name in request_ids if name in self._outputs and self._outputs[name].timing.scheduled is None]
        for name in given:
            self._outputs[name].error = OverloadError("the engine is draining and hands this request back")
            self._stop(name, "cancelled")
        self.metrics.requests_handed_back += len(given)
        return given

    def pin(self, prompt: str | Sequence[int], service: ServiceParams | None = None, *,
            request_id: str | None = None, add_special: bool = True) -> str:
        """Queues a request that computes a prefix, if the cache lacks it, and holds its whole pages until `unpin`.

        Its last delta comes out of `step` when they are held. `output.prompt_token_ids` are the tokens held: a partly
        filled page at the end is not.

        Returns:
          The request's id, which is the pin's.

        Raises:
          RequestError: the prefix does not fill a page, or is not to be cached.
          CapacityError, OverloadError, JinferError: as `submit`. That one full context would not fit beside all pins
          is said later, by `output.error`.
        """
        if not self.config.prefix_cache or (service is not None and not service.cache):
            raise RequestError("cache", "is off: nothing can be pinned")
        ids, page = self._admission.tokens(prompt, add_special), self.config.page_size
        if len(ids) < page:
            raise RequestError("prompt", f"{len(ids)} tokens do not fill a page of {page}: nothing to pin")
        name = self.submit(ids[: len(ids) - len(ids) % page], SamplingParams(max_tokens=0), service=service,
                           request_id=request_id)
        self._pins[name] = None
        return name

    def unpin(self, name: str) -> None:
        """Gives up a pin; its pages stay cached until they are needed. Raises RequestError for what is none."""
        if name not in self._pins:
            raise RequestError("pin", f"{name!r} is not pinned")
        release = self._pins.pop(name)
        if release is None:
            self.cancel(name)
        else:
            release()
            self._gauge()

    def step(self) -> list[Delta]:
        """One turn: plans and dispatches the next step, then collects the one before it.

        Returns what that one added to each choice. Whatever is raised, by the device, a program or an interrupt,
        leaves the engine unusable: part of a step is lost.
        """
        self._check_usable()
        try:
            self._turn()
        except BaseException:
            self._failed = True
            raise
        deltas, self._deltas = self._deltas, []
        return deltas

    def _turn(self) -> None:
        """All workers dispatch before the first of them waits for results: device groups overlap."""
        start = time.thread_time()  # of this thread: on CPU the device's threads compete for the same cores
        now = time.perf_counter()
        self._end_late(now)
        dispatched = self._fleet.dispatch(now)
        self.metrics.steps += bool(dispatched)
        for pending in dispatched:
            for chunk in pending.plan.chunks:
                if chunk.joins:
                    self._count_join(chunk, pending.dispatched)
        self.metrics.host_seconds += time.thread_time() - start
        idle = not dispatched
        for results in self._fleet.collect():
            start = time.thread_time()
            self._process(results)
            self.metrics.host_seconds += time.thread_time() - start
            idle = False
        self._fleet.hand_over(wait=idle)
        self._gauge()

    def close(self) -> None:
        """Cancels what is left and frees the device arrays, the weights included. Harmless when done twice."""
        for request_id in list(self._choices):
            self.cancel(request_id)
        self._closed = True
        self._fleet.close()

    def _check_usable(self) -> None:
        if self._closed or self._failed:
            raise JinferError("the engine is closed" if self._closed else "the engine failed earlier; build a new one")

    def check(self) -> None:
        """Asserts the invariants of pages and slots (tests, idle moments)."""
        self._fleet.check()

    def _process(self, results: StepResults) -> None:
        now = time.perf_counter()
        for chunk, scores in results.scored():
            choice = self._by_request.get(chunk.request)
            if choice is not None:
                entries = self._outputs[chunk.request.id].prompt_logprobs
                assert entries is not None
                if not score_prompt(entries, chunk.request, chunk.start, scores):
                    self._fail(choice)
        for request, tokens, logprobs, finite in results.sampled():
            choice = self._by_request.get(request)
            if choice is None:
                continue
            if finite:
                self._take(choice, tokens, logprobs, now, results.plan)
            else:
                self._fail(choice)
        for chunk in results.plan.chunks:
            choice = self._by_request.get(chunk.request)
            if choice is not None and chunk.final and not chunk.samples:
                self._end(choice, "length", "", ())  # max_tokens 0: the prompt was only scored

    def _take(self, choice: Choice, tokens: list[int], logprobs: list[TokenLogprob], now: float,
              plan: StepPlan) -> None:
        """Hands a choice the tokens of one step, whose plan is given."""
        request = choice.request
        output = self._outputs[request.id]
        kept, text, reason = choice.push(tokens, logprobs)
        self._fleet.append(request, kept)
        self.metrics.output_tokens += len(kept)
        if request.index == 0:
            times = output.timing.token_times
            if times and self._stalls.stalled(now - times[-1], request.service.itl_target):
                self.metrics.count_stall(cause_of(plan, request))
            times.extend([now] * len(kept))
        if reason is not None:
            self._end(choice, reason, text, kept)
        else:
            self._deltas.append(choice.delta(text, kept, output, False))

    def _fail(self, choice: Choice) -> None:
        self.metrics.requests_failed += 1
        self._outputs[choice.request.id].error = RequestError("model", "produced logits that are not finite")
        self._end(choice, "error", "", ())

    def _end(self, choice: Choice, reason: FinishReason, text: str, tokens: Sequence[int]) -> None:
        """The one way a choice ends: slot, pages and records go, the last delta goes out."""
        request = choice.request
        choice.completion.finish_reason = reason
        if request.id in self._pins:
            self._hold(request, reason)
        self._fleet.finish(request, reason)
        del self._by_request[request]
        output = self._outputs[request.id]
        output.timing.preemptions += request.preemptions
        finished = output.finished and all(c.finish_reason for c in output.completions)
        if finished:
            output.timing.finished = time.perf_counter()
            del self._choices[request.id], self._outputs[request.id]
            self.metrics.requests_finished += reason not in ("cancelled", "timeout", "error")
        self._deltas.append(choice.delta(text, tokens, output, finished))

    def _stop(self, request_id: str, reason: FinishReason) -> None:
        """Ends all choices that still run; what they have is kept."""
        for choice in self._choices[request_id]:
            if choice.completion.finish_reason is None:
                text = choice.flush()
                choice.completion.text += text
                self._end(choice, reason, text, ())
        self._gauge()

    def _end_late(self, now: float) -> None:
        """Ends the requests whose timeout has passed."""
        for name in dict.fromkeys(request.id for request in self._fleet.expired(now)):
            self.metrics.requests_timed_out += 1
            self._stop(name, "timeout")

    def _hold(self, request: Request, reason: FinishReason) -> None:
        """The prefix of a pin is computed, and its pages are the request's still; or it ended before."""
        del self._pins[request.id]
        if reason != "length":
            return
        scheduler, output = self._fleet.scheduler_of(request), self._outputs[request.id]
        try:
            pin = scheduler.pin(request)
        except CapacityError as error:
            output.error = error
            return
        if pin is None:
            output.error = JinferError("the prefix cannot be pinned, it is not in the prefix cache")
        else:
            self._pins[request.id] = functools.partial(scheduler.unpin, pin)

    def _count_join(self, chunk: Chunk, now: float) -> None:
        """A request enters a slot: positions it need not compute, and those it computes again."""
        request, metrics, timing = chunk.request, self.metrics, self._outputs[chunk.request.id].timing
        if request.given is None:  # else others have computed them for this request
            metrics.saved_tokens += chunk.start
            if request.preemptions:
                metrics.restored_tokens += chunk.start
                metrics.recomputed_tokens += request.length - chunk.start
            elif request.index == 0:
                timing.cached_tokens = chunk.start
        timing.scheduled = timing.scheduled or now

    def _gauge(self) -> None:
        self._fleet.gauge(unfilled=self.metrics.steps % UNFILLED_EVERY == 0)
