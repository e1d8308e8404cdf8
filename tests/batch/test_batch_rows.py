"""Rows of a batch file: both shapes, and every way to get one wrong."""

import json

import pytest

from jinfer.batch.rows import BadRow, Row, is_blank, parse_row


def parse(value, line=1, **defaults):
    data = value if isinstance(value, bytes) else json.dumps(value).encode()
    return parse_row(line, data, defaults)


def completion(**body):
    return {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"model": "m", **body}}


def chat(**body):
    body = {"messages": [{"role": "user", "content": "x"}], **body}
    return {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": body}


def test_plain_row():
    row = parse({"custom_id": "a", "prompt": "x", "temperature": 0, "stop": ".", "seed": None})
    assert isinstance(row, Row)
    assert (row.custom_id, row.kind, row.item) == ("a", "plain", "x")
    assert (row.params.temperature, row.params.stop, row.params.seed) == (0, (".",), None)


def test_plain_rows_need_no_id_and_take_ids_and_messages():
    assert parse({"prompt": [1, 2]}, line=7).custom_id == "line-7"
    assert parse({"messages": [{"role": "user", "content": "x"}]}).item[0]["content"] == "x"


def test_openai_rows():
    row = parse(completion(prompt="x", user="me", n=2, logprobs=3, top_k=5))
    assert (row.kind, row.model, row.params.n, row.params.logprobs) == ("completion", "m", 2, 3)
    assert (row.params.top_k, row.params.max_tokens) == (5, 16)  # OpenAI's default of a completion
    row = parse(chat(logprobs=True, top_logprobs=2, stream=False))
    assert (row.kind, row.params.logprobs, row.params.max_tokens) == ("chat", 2, None)
    assert parse(chat(logprobs=True)).params.logprobs == 0
    assert parse(chat(max_completion_tokens=5)).params.max_tokens == 5
    assert parse(chat(max_tokens=5, temperature=None)).params.temperature == 1.0


def test_defaults_yield_to_the_row():
    assert parse({"prompt": "x"}, max_tokens=3, temperature=0).params.max_tokens == 3
    assert parse({"prompt": "x", "max_tokens": 4}, max_tokens=3).params.max_tokens == 4
    assert parse(completion(prompt="x"), max_tokens=3).params.max_tokens == 3


@pytest.mark.parametrize(("value", "field", "words"), [
    (b"{", "row", "not valid JSON"),
    (b"\xff\xfe{}", "row", "not UTF-8 at byte 0"),
    (b"[" * 200_000, "row", "row"),
    (b'{"prompt": "x", "temperature": NaN}', "row", "NaN is not a JSON value"),
    (b'{"prompt": "x", "temperature": 1e999}', "temperature", "finite"),
    (b"3", "row", "object"),
    ({"custom_id": 3, "prompt": "x"}, "custom_id", "string"),
    ({"custom_id": "", "prompt": "x"}, "custom_id", "non-empty"),
    ({"custom_id": "\ud83d", "prompt": "x"}, "custom_id", "surrogate"),
    ({}, "prompt", "missing"),
    ({"prompt": "x", "messages": [{}]}, "prompt", "not both"),
    ({"prompt": ["a", "b"]}, "prompt", "text or a list of token ids"),
    ({"prompt": 3}, "prompt", "text or a list"),
    ({"messages": "x"}, "messages", "list"),
    ({"messages": []}, "messages", "list"),
    ({"prompt": "x", "temprature": 1}, "temprature", "unknown"),
    ({"prompt": "x", "temperature": -1}, "temperature", "between"),
    ({"prompt": "x", "priority": 1.5}, "priority", "integer"),
    ({"prompt": "x", "timeout": "soon"}, "timeout", "positive number of seconds"),
    ({"prompt": "x", "cache": 1}, "cache", "true or false"),
    ({"prompt": "x", "cache_slat": "a"}, "cache_slat", "cache_salt"),
    (chat(cache_salt=3), "cache_salt", "text"),
    (completion(), "prompt", "missing"),
    (completion(prompt="x", stream=True), "stream", "cannot stream"),
    (completion(prompt="x", echo=True), "echo", "not supported"),
    (completion(prompt="x", best_of=2), "best_of", "unknown"),
    (completion(prompt="x", max_tokens="many"), "max_tokens", "integer"),
    (chat(logprobs=3), "logprobs", "true or false"),
    (chat(top_logprobs=3), "top_logprobs", "logprobs"),
    (chat(tools=[{}]), "tools", "unknown"),
    ({**chat(), "method": "GET"}, "method", "POST"),
    ({**chat(), "url": "/v1/embeddings"}, "url", "/v1/completions"),
    ({**chat(), "url": ["/v1/completions"]}, "url", "/v1/completions"),
    ({**chat(), "body": [1]}, "body", "object"),
    ({**chat(), "extra": 1}, "extra", "unknown"),
    ({**chat(), "custom_id": None}, "custom_id", "missing"),
])
def test_bad_rows_name_the_field(value, field, words):
    row = parse(value)
    assert isinstance(row, BadRow)
    assert row.error.field == field
    assert words in str(row.error)


def test_a_bad_row_keeps_its_id():
    assert parse({"custom_id": "mine", "prompt": 3}).custom_id == "mine"
    assert parse({**completion(), "url": "x"}).custom_id == "a"


def test_byte_order_mark_on_the_first_line_only():
    data = b'\xef\xbb\xbf{"prompt": "x"}'
    assert isinstance(parse_row(1, data), Row)
    assert isinstance(parse_row(2, data), BadRow)


def test_blank():
    assert is_blank(b" \t\r\n")
    assert not is_blank("\u2028".encode())
