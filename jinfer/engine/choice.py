"""Choice: one of a request's completions as it grows on the host: text, stop strings, logprobs, its end."""

from collections.abc import Sequence

from jinfer.engine.outputs import Completion, Delta, RequestOutput, TokenLogprob
from jinfer.sampling.stops import StopStrings
from jinfer.scheduler import FinishReason, Request
from jinfer.tokenizer import Tokenizer


class Choice:
    """Turns sampled tokens into text and decides when the request ends.

    The device ends a row at a stop id or at its last position; only the host sees stop strings.
    """

    __slots__ = ("_decoder", "_keep_stop", "_named_stops", "_stops", "completion", "request")

    def __init__(self, request: Request, tokenizer: Tokenizer | None, named_stops: dict[int, str]):
        """named_stops: stop strings that are special tokens, by id; they never show in the text."""
        params = request.params
        self.request = request
        self.completion = Completion(request.index, logprobs=None if params.logprobs is None else [])
        self._decoder = None if tokenizer is None else tokenizer.stream(
            request.prompt, skip_special=params.skip_special_tokens)
        self._stops = StopStrings(params.stop, params.include_stop) if params.stop else None
        self._keep_stop = params.include_stop
        self._named_stops = named_stops

    def push(
        self, tokens: Sequence[int], logprobs: Sequence[TokenLogprob],
    ) -> tuple[list[int], str, FinishReason | None]:
        """Takes tokens of one step. Returns (tokens kept, text to emit, why it ended or None)."""
        request, completion = self.request, self.completion
        params = request.params
        kept: list[int] = []
        text = ""
        reason: FinishReason | None = None
        ending = ""  # a named stop to show: behind what was held back
        position = request.length
        for token in tokens:
            kept.append(token)
            position += 1
            if token in request.stop_ids:
                reason = "stop"
                if token in self._named_stops:
                    completion.stop_reason = self._named_stops[token]
                elif token in params.stop_token_ids:
                    completion.stop_reason = token
                if self._keep_stop:
                    ending = self._named_stops.get(token, "")
                    if not ending and completion.stop_reason is not None:
                        text += self._decode(token)
            else:
                text += self._decode(token)
                if self._stops is not None and self._stops.matched is not None:
                    reason = "stop"
                    completion.stop_reason = self._stops.matched
            if reason is None and position >= request.max_position:
                reason = "length"
            if reason is not None:
                break
        if reason is not None:
            text += self.flush()
            if self._stops is not None and self._stops.matched is not None:
                reason = "stop"  # a match that more text could still have changed
            else:
                text += ending
        completion.token_ids.extend(kept)
        completion.text += text
        if completion.logprobs is not None:
            completion.logprobs.extend(logprobs[: len(kept)])
        completion.finish_reason = reason
        return kept, text, reason

    def _decode(self, token: int) -> str:
        """Text that is safe to show with this token."""
        if self._decoder is None:
            return ""
        piece = self._decoder.push(token)
        return piece if self._stops is None else self._stops.push(piece)

    def flush(self) -> str:
        """Text held back as a possible stop or as half a character, when no more tokens come."""
        if self._decoder is None:
            return ""
        tail = self._decoder.flush()
        if self._stops is None:
            return tail
        text = self._stops.push(tail) + self._stops.flush()
        if self._stops.matched is not None:
            self.completion.stop_reason = self._stops.matched
        return text

    def delta(self, text: str, tokens: Sequence[int], output: RequestOutput, finished: bool) -> Delta:
        completion = self.completion
        logprobs = None
        if completion.logprobs is not None:
            logprobs = tuple(completion.logprobs[len(completion.logprobs) - len(tokens) :]) if tokens else ()
        return Delta(output.request_id, completion.index, text, tuple(tokens), logprobs, completion.finish_reason,
                     finished, output)
