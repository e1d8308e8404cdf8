"""A finished request -> one record of the output file, in the shape its row came in."""

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from jinfer.batch.rows import BadRow, Row
from jinfer.engine.outputs import Completion, RequestOutput, TokenLogprob
from jinfer.errors import OverloadError, RequestError

if TYPE_CHECKING:
    from jinfer.tokenizer import Tokenizer


def success_record(row: Row, output: RequestOutput, tokenizer: "Tokenizer | None") -> dict[str, Any]:
    """The record of a request that ran to its end."""
    if row.kind == "plain":
        return _plain(row, output, tokenizer)
    return {"id": f"batch_req_{row.line}", "custom_id": row.custom_id,
            "response": {"status_code": 200, "request_id": output.request_id,
                         "body": _openai_body(row, output, tokenizer)},
            "error": None}


def error_record(row: Row | BadRow, error: Exception) -> dict[str, Any]:
    """The record of a row that has no answer. `custom_id` is null when the row has none of its own."""
    refused = isinstance(error, RequestError)
    code = "invalid_request" if refused else "overloaded" if isinstance(error, OverloadError) else "failed"
    return {"id": f"batch_req_{row.line}", "custom_id": row.custom_id, "line": row.line, "response": None,
            "error": {"code": code, "message": str(error),
                      "param": error.field if isinstance(error, RequestError) else None}}


def _plain(row: Row, output: RequestOutput, tokenizer: "Tokenizer | None") -> dict[str, Any]:
    choices = [_plain_choice(choice, tokenizer) for choice in output.completions]
    timing = output.timing
    record: dict[str, Any] = {"custom_id": row.custom_id, **(choices[0] if len(choices) == 1 else {})}
    if len(choices) != 1:
        record["choices"] = choices
    if output.prompt_logprobs is not None:
        record["prompt_logprobs"] = [_entry(one, tokenizer) for one in output.prompt_logprobs]
    record["prompt_tokens"] = len(output.prompt_token_ids)
    record["cached_tokens"] = output.cached_tokens
    record["output_tokens"] = sum(len(choice.token_ids) for choice in output.completions)
    seconds = {"queue": timing.queue, "prefill": timing.prefill, "ttft": timing.ttft, "e2e": timing.e2e}
    record["seconds"] = {name: None if value is None else round(value, 6) for name, value in seconds.items()}
    return record


def _plain_choice(choice: Completion, tokenizer: "Tokenizer | None") -> dict[str, Any]:
    record: dict[str, Any] = {"text": choice.text, "token_ids": choice.token_ids,
                              "finish_reason": choice.finish_reason, "stop_reason": choice.stop_reason}
    if choice.logprobs is not None:
        record["logprobs"] = [_entry(one, tokenizer) for one in choice.logprobs]
    return record


def _openai_body(row: Row, output: RequestOutput, tokenizer: "Tokenizer | None") -> dict[str, Any]:
    chat = row.kind == "chat"
    choices = []
    for choice in output.completions:
        answer: dict[str, Any] = {"index": choice.index}
        if chat:
            answer["message"] = {"role": "assistant", "content": choice.text}
        else:
            answer["text"] = choice.text
        answer["logprobs"] = None
        if choice.logprobs is not None:
            style = _chat_logprobs if chat else _completion_logprobs
            answer["logprobs"] = style(choice.logprobs, tokenizer)
        answer["finish_reason"] = choice.finish_reason
        choices.append(answer)
    prompt = len(output.prompt_token_ids)
    made = sum(len(choice.token_ids) for choice in output.completions)
    return {"id": f"{'chatcmpl' if chat else 'cmpl'}-{output.request_id}",
            "object": "chat.completion" if chat else "text_completion", "created": int(time.time()),
            "model": row.model, "choices": choices,
            "usage": {"prompt_tokens": prompt, "completion_tokens": made, "total_tokens": prompt + made,
                      "prompt_tokens_details": {"cached_tokens": output.cached_tokens}}}


def _piece(token_id: int, tokenizer: "Tokenizer | None") -> str:
    return "" if tokenizer is None else tokenizer.decode([token_id], skip_special=False)


def _entry(one: TokenLogprob, tokenizer: "Tokenizer | None") -> dict[str, Any]:
    return {"token": _piece(one.token_id, tokenizer), "token_id": one.token_id, "logprob": _json(one.logprob),
            "top": [{"token": _piece(i, tokenizer), "token_id": i, "logprob": _json(value)}
                    for i, value in one.top]}


def _json(logprob: float | None) -> float | None:
    """JSON has no infinity; OpenAI writes -9999 for a token that cannot be."""
    return None if logprob is None else max(logprob, -9999.0)


def _chat_logprobs(entries: Sequence[TokenLogprob], tokenizer: "Tokenizer | None") -> dict[str, Any]:
    def one(token_id: int, logprob: float | None) -> dict[str, Any]:
        piece = _piece(token_id, tokenizer)
        return {"token": piece, "logprob": _json(logprob), "bytes": list(piece.encode())}
    return {"content": [{**one(entry.token_id, entry.logprob),
                         "top_logprobs": [one(*pair) for pair in entry.top]} for entry in entries]}


def _completion_logprobs(entries: Sequence[TokenLogprob], tokenizer: "Tokenizer | None") -> dict[str, Any]:
    tokens = [_piece(entry.token_id, tokenizer) for entry in entries]
    offsets = [0]
    for piece in tokens[:-1]:
        offsets.append(offsets[-1] + len(piece))
    return {"tokens": tokens, "token_logprobs": [_json(entry.logprob) for entry in entries],
            "top_logprobs": [{_piece(i, tokenizer): _json(value) for i, value in entry.top}
                             for entry in entries],
            "text_offset": offsets[:len(tokens)]}
