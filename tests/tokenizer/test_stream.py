"""Streamed text against whole text and the libraries' own decoders, on random ids (cases C01, C04)."""

import dataclasses
import json

import pytest
import sentencepiece
import tokenizers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jinfer.tokenizer import Tokenizer
from tests.tokenizer.conftest import DATA

KINDS = ["table_open", "sp", "gguf_bpe", "gguf_spm"]
quick = settings(max_examples=300, deadline=None, derandomize=True,
                 suppress_health_check=[HealthCheck.function_scoped_fixture])


def streamed(tokenizer: Tokenizer, ids, prompt=(), **kwargs) -> list[str]:
    stream = tokenizer.stream(prompt, **kwargs)
    return [*(stream.push(i) for i in ids), stream.flush()]


def shared_length(a: str, b: str) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def ids_of(tokenizer: Tokenizer):
    """Random ids; parts of characters, spaces and specials are drawn more often than words."""
    size = tokenizer.vocab_size
    pieces = {i: tokenizer.token_bytes(i) for i in range(size)}
    byte_like = [i for i, piece in pieces.items() if len(piece) == 1 and piece >= b"\x80"]
    spaces = [i for i, piece in pieces.items() if piece.startswith(b" ")]
    return st.lists(st.one_of(
        st.integers(0, size + 2), st.sampled_from(byte_like), st.sampled_from(spaces),
        st.sampled_from(sorted(tokenizer.special_ids))), max_size=12)


@pytest.fixture(params=KINDS)
def tokenizer(request) -> Tokenizer:
    return request.getfixturevalue(request.param)


@quick
@given(data=st.data(), skip=st.booleans())
def test_stream_is_decode(tokenizer, data, skip):
    ids = data.draw(ids_of(tokenizer))
    assert "".join(streamed(tokenizer, ids, skip_special=skip)) == tokenizer.decode(ids, skip_special=skip)


@quick
@given(data=st.data(), skip=st.booleans())
def test_after_a_prompt_text_is_the_difference(tokenizer, data, skip):
    prompt, new = data.draw(ids_of(tokenizer)), data.draw(ids_of(tokenizer))
    before = tokenizer.decode(prompt, skip_special=skip)
    whole = tokenizer.decode(prompt + new, skip_special=skip)
    # A prompt that stops inside a character has U+FFFD where the whole text has the character.
    expected = whole[shared_length(before, whole):]
    assert "".join(streamed(tokenizer, new, prompt, skip_special=skip)) == expected


@quick
@given(data=st.data())
def test_no_delta_holds_half_a_character(tokenizer, data):
    """Every prefix of the deltas is a prefix of the text: nothing already shown is ever taken back."""
    ids = data.draw(ids_of(tokenizer))
    whole, shown = tokenizer.decode(ids), ""
    for delta in streamed(tokenizer, ids):
        shown += delta
        delta.encode()
        assert whole.startswith(shown)


@quick
@given(data=st.data())
def test_byte_level_matches_tokenizers(table_open, data):
    library = tokenizers.Tokenizer.from_file(str(DATA / "models" / "table_open" / "tokenizer.json"))
    ids = data.draw(ids_of(table_open))
    for skip in (True, False):
        assert table_open.decode(ids, skip_special=skip) == library.decode(ids, skip_special_tokens=skip)


@quick
@given(data=st.data())
def test_sentencepiece_matches_library(sp, data):
    library = sentencepiece.SentencePieceProcessor(model_file=str(DATA / "tokenizer" / "sp.model"))
    ids = [i for i in data.draw(ids_of(sp)) if i < sp.vocab_size]
    assert sp.decode(ids) == library.decode(ids)


@quick
@given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=30))
def test_decode_undoes_encode(tokenizer, text):
    text = text.replace("\u2581", "")  # sentencepiece's own space cannot survive
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_table_open_goldens(table_open):
    golden = json.loads((DATA / "golden" / "table_open_expected.json").read_text("utf-8"))
    checked = 0
    for name, case in golden.items():
        if not isinstance(case, dict) or "new_ids" not in case:
            continue
        assert table_open.encode(case["prompt"]) == case["prompt_ids"], name
        deltas = streamed(table_open, case["new_ids"], case["prompt_ids"])
        assert "".join(deltas) == case["text"], name
        assert any("\ufffd" in delta for delta in deltas) == ("\ufffd" in case["text"]), name
        checked += 1
    assert checked >= 10


def test_cut_inside_a_character(table_open):
    prompt, ids = [256, 117], [195, 169, 230, 188]
    assert streamed(table_open, ids, prompt) == ["", "é", "", "", "\ufffd"]
    assert table_open.decode(ids) == "é\ufffd"


@pytest.mark.parametrize("told", [1, 2, 3])
def test_prompt_that_ends_inside_a_character(table_open, sp, told):
    for tokenizer in (table_open, sp):
        ids = tokenizer.encode("ab😀", add_special=False)
        before, rest = ids[:len(ids) - 4 + told], ids[len(ids) - 4 + told:]
        assert "".join(streamed(tokenizer, rest, before)) == "😀"
        assert "".join(streamed(tokenizer, [], before)) == ""
        word = tokenizer.encode("c", add_special=False)
        assert "".join(streamed(tokenizer, word, before)).lstrip() == "c"


def test_sentencepiece_cases(sp):
    cases = json.loads((DATA / "tokenizer" / "sp_cases.json").read_text("utf-8"))
    for case in cases["decode"]:
        assert sp.encode(case["text_in"], add_special=False) == case["ids"]
        assert "".join(streamed(sp, case["ids"])) == case["decode_all"] == sp.decode(case["ids"])
    for case in cases["continuation"]:
        assert sp.encode(case["prompt"]) == case["prompt_ids"]
        assert "".join(streamed(sp, case["new_ids"], case["prompt_ids"])) == case["prefix_difference_text"]


def test_special_tokens_can_be_shown(table_open, gguf_spm):
    assert table_open.decode([256, 104, 257], skip_special=False) == "<s>h</s>"
    assert table_open.decode([256, 104, 257]) == "h"
    ids = gguf_spm.encode("hello<turn> world")
    assert gguf_spm.decode(ids, skip_special=False).startswith("<s> hello<turn>")


def test_cost_does_not_grow(table_open):
    """A decoder that has seen much holds no more than one that has seen nothing."""
    calls = 0
    piece = table_open.rules.piece

    def counted(token_id: int) -> bytes:
        nonlocal calls
        calls += 1
        return piece(token_id)

    counting = dataclasses.replace(table_open, rules=dataclasses.replace(table_open.rules, piece=counted))
    stream = counting.stream([256] + [97] * 50_000)
    for _ in range(100):
        stream.push(98)
    assert calls < 120
