"""An engine without a model, for tests of what sits on one: the interface and habits of jinfer's Engine.

It speaks bytes (ids 0..255, BOS 256, EOS 257) and continues by a table on the last token, as the table model
of tests/data/models/table_open does: `L` gives `yz`, `u` gives `é漢😀!`, `r` never ends, a chat turn gives
`OQ`, anything else ends at once. Results come one step late. It can be told to fail, and to be slow. Requests start in
order of priority; a timeout is seen at the start of a step; a pin is a request like others.
"""

import codecs
import itertools
import re
import time
from collections import deque

from jinfer.config import EngineConfig, SamplingParams, ServiceParams
from jinfer.engine.outputs import Completion, Delta, RequestOutput, TokenLogprob
from jinfer.errors import CapacityError, OverloadError, RequestError, TokenizerError
from jinfer.observe.metrics import Metrics

BOS, EOS = 256, 257
SPECIAL = {"<s>": BOS, "<|im_start|>": 259, "<|im_end|>": 260}
NEXT = {ord("L"): ord("y"), ord("y"): ord("z"), ord("r"): ord("r"), ord("\n"): ord("O"), ord("O"): ord("Q")}
NEXT |= dict(itertools.pairwise([ord("u"), *"é漢😀!".encode()]))


class FakeChat:
    def render(self, messages, *, add_generation_prompt=True):
        if any(m["role"] == "alien" for m in messages):
            raise TokenizerError("chat template: unknown role alien")
        turns = "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>" for m in messages)
        return "<s>" + turns + ("<|im_start|>assistant\n" if add_generation_prompt else "")


class FakeTokenizer:
    def __init__(self, chat=True):
        self.chat = FakeChat() if chat else None

    def encode(self, text, *, add_special=True):
        ids = [BOS] if add_special else []
        for part in re.split("(<s>|<[|]im_start[|]>|<[|]im_end[|]>)", text):
            ids.extend([SPECIAL[part]] if part in SPECIAL else part.encode())
        return ids

    def decode(self, ids, *, skip_special=True):
        return bytes(i for i in ids if i < 256).decode(errors="replace")


class Running:
    def __init__(self, output, params, service):
        self.output, self.params, self.service = output, params, service
        self.decoders = [codecs.getincrementaldecoder("utf-8")("replace") for _ in output.completions]
        self.started = False


class FakeEngine:
    def __init__(self, *, max_rows=4, max_context=256, max_waiting=None, chat=True, fail_at=None, slow=0.0):
        self.config = EngineConfig(max_rows=max_rows, max_waiting=max_waiting)
        self.tokenizer = FakeTokenizer(chat)
        self.max_context = max_context
        self.metrics = Metrics(pages_total=65, pages_free=64)
        self.fail_at, self.slow = fail_at, slow
        self.closed = False
        self.turns = 0
        self.most_running = 0
        self.most_waiting = 0
        self.cancelled = []
        self.services = {}  # request id -> ServiceParams it came with
        self.pins = {}  # name -> token ids, None while it is computed
        self.draining = False
        self._ids = itertools.count()
        self._waiting, self._running, self._late = deque(), {}, []

    def submit(self, prompt, params, *, service=None, request_id=None, add_special=True):
        if self.draining:
            self.metrics.requests_rejected += 1
            raise OverloadError("the engine is draining and takes no more requests")
        ids = self.tokenizer.encode(prompt, add_special=add_special) if isinstance(prompt, str) else prompt
        if any(token > 274 for token in ids):
            raise RequestError("prompt", f"token id {max(ids)} is outside the vocabulary of 275")
        if not ids:
            raise RequestError("prompt", "is empty")
        if len(ids) >= self.max_context:
            raise CapacityError(
                "prompt", f"{len(ids)} tokens are more than the context of {self.max_context}")
        if not self.takes(params.n):
            self.metrics.requests_rejected += 1
            raise OverloadError(f"{len(self._waiting)} requests wait")
        request_id = request_id or f"r{next(self._ids)}"
        self.services[request_id] = service
        choices = [Completion(i, logprobs=None if params.logprobs is None else []) for i in range(params.n)]
        output = RequestOutput(request_id, prompt if isinstance(prompt, str) else None, ids, choices)
        output.timing.arrived = time.monotonic()
        if params.prompt_logprobs is not None:
            output.prompt_logprobs = [TokenLogprob(t, None if i == 0 else -1.0) for i, t in enumerate(ids)]
        self._waiting.append(Running(output, params, service or ServiceParams()))
        self.most_waiting = max(self.most_waiting, len(self._waiting))
        self.metrics.prompt_tokens += len(ids)
        return request_id

    def cancel(self, request_id):
        if not self._stop(request_id, "cancelled"):
            return False
        self.cancelled.append(request_id)
        self.metrics.requests_cancelled += 1
        return True

    def _stop(self, request_id, reason, error=None):
        for one in [*self._waiting, *self._running.values()]:
            if one.output.request_id == request_id:
                if one in self._waiting:
                    self._waiting.remove(one)
                self._running.pop(request_id, None)
                self.pins.pop(request_id, None)
                one.output.error = error
                for choice in one.output.completions:
                    choice.finish_reason = choice.finish_reason or reason
                self._late.append(Delta(request_id, 0, "", (), None, reason, True, one.output))
                return True
        return False

    def takes(self, choices=1):
        most = self.config.max_waiting
        return not self.draining and (most is None or len(self._waiting) + choices <= most)

    def drain(self, hand_back=False):
        self.draining = True
        return self.hand_back([one.output.request_id for one in self._waiting]) if hand_back else []

    def resume(self):
        self.draining = False

    def hand_back(self, request_ids):
        fresh = {one.output.request_id for one in self._waiting}
        given = [name for name in request_ids if name in fresh]
        for name in given:
            self._stop(name, "cancelled", OverloadError("the engine is draining and hands this request back"))
        self.metrics.requests_handed_back += len(given)
        return given

    def pin(self, prompt, service=None, *, request_id=None, add_special=True):
        name = self.submit(prompt, SamplingParams(max_tokens=0), service=service, request_id=request_id,
                           add_special=add_special)
        self.pins[name] = None
        return name

    def unpin(self, name):
        if name not in self.pins:
            raise RequestError("pin", f"{name!r} is not pinned")
        if not self.cancel(name):
            del self.pins[name]

    @property
    def has_work(self):
        return bool(self._waiting or self._running or self._late)

    def step(self):
        time.sleep(self.slow)
        self.turns += 1
        if self.fail_at is not None and self.turns >= self.fail_at:
            raise RuntimeError("the device is on fire")
        ready, self._late = self._late, []
        for one in [*self._waiting, *self._running.values()]:
            if one.service.timeout is not None and time.monotonic() > one.output.timing.arrived + one.service.timeout:
                self._stop(one.output.request_id, "timeout")
                self.metrics.requests_timed_out += 1
        for one in list(self._running.values()):
            self._advance(one)
        while self._waiting and len(self._running) < self.config.max_rows:
            one = min(self._waiting, key=lambda one: one.service.priority)
            self._waiting.remove(one)
            self._running[one.output.request_id] = one
            one.output.timing.scheduled = time.monotonic()
            self.metrics.prefill_tokens += len(one.output.prompt_token_ids)
            self.metrics.prefill_seconds += 0.001
        self.most_running = max(self.most_running, len(self._running))
        return ready

    def _advance(self, one):
        self.metrics.decode_seconds += 0.001
        output = one.output
        limit = one.params.max_tokens
        if limit is None:
            limit = self.max_context - len(output.prompt_token_ids)
        for choice, decoder in zip(output.completions, one.decoders, strict=True):
            if choice.finish_reason is not None:
                continue
            made = ()
            if limit > 0:
                token = NEXT.get((output.prompt_token_ids + choice.token_ids)[-1], EOS)
                choice.token_ids.append(token)
                made = (token,)
                if choice.index == 0:
                    output.timing.token_times.append(time.monotonic())
                self.metrics.output_tokens += 1
                if token == EOS:
                    choice.finish_reason = "stop"
            if choice.finish_reason is None and len(choice.token_ids) >= limit:
                choice.finish_reason = "length"
            text = decoder.decode(bytes(t for t in made if t < 256), choice.finish_reason is not None)
            choice.text += text
            probs = None
            if choice.logprobs is not None:
                probs = tuple(TokenLogprob(t, -0.5, ((t, -0.5), (0, float("-inf")))) for t in made)
                choice.logprobs.extend(probs)
            if output.finished:
                self._running.pop(output.request_id)
                output.timing.finished = time.monotonic()
                if output.request_id in self.pins:
                    self.pins[output.request_id] = output.prompt_token_ids
            self._late.append(Delta(output.request_id, choice.index, text, made, probs, choice.finish_reason,
                                    output.finished, output))

    def check(self):
        assert not self._running
        assert not self._waiting

    def close(self):
        self.closed = True
