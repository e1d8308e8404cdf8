"""Encoding: BOS exactly once, special tokens in the text, what the JSON files beside a tokenizer change."""

import json
import shutil

import pytest
import tokenizers

from jinfer.errors import TokenizerError
from jinfer.tokenizer import load_tokenizer
from tests.tokenizer.conftest import DATA

TABLE_OPEN = DATA / "models" / "table_open"


@pytest.fixture
def folder(tmp_path):
    """A copy of table_open's tokenizer files to change."""
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "config.json"):
        shutil.copyfile(TABLE_OPEN / name, tmp_path / name)

    def change(name: str, **values):
        file = tmp_path / name
        old = json.loads(file.read_text("utf-8")) if file.exists() else {}
        new = {k: v for k, v in {**old, **values}.items() if v is not None}
        file.write_text(json.dumps(new), "utf-8")
        return tmp_path

    change.path = tmp_path
    return change


def test_facts(table_open, sp):
    assert (table_open.vocab_size, table_open.bos_id, table_open.eos_ids) == (267, 256, (257, 258))
    assert table_open.add_bos
    assert table_open.special_ids == frozenset(range(256, 262))
    assert (sp.vocab_size, sp.bos_id, sp.eos_ids, sp.add_bos, sp.chat) == (330, 1, (2,), True, None)


def test_bos_is_never_doubled(table_open, sp, gguf_bpe, gguf_spm):
    for tokenizer, spelled in ((table_open, "<s>"), (sp, "<s>"), (gguf_bpe, "<|bos|>"), (gguf_spm, "<s>")):
        bos = tokenizer.bos_id
        plain = tokenizer.encode("hello", add_special=False)
        assert bos not in plain
        assert tokenizer.encode("hello") == [bos, *plain]
        assert tokenizer.encode(f"{spelled}hello") == tokenizer.encode(f"{spelled}hello", add_special=False)
        assert tokenizer.encode(f"{spelled}hello").count(bos) == 1
        assert tokenizer.encode("") == [bos]
        assert tokenizer.encode("", add_special=False) == []


def test_chat_prompt_is_the_golden(table_open):
    golden = json.loads((DATA / "golden" / "table_open_expected.json").read_text("utf-8"))["chat"]
    rendered = table_open.chat.render(golden["messages"])
    assert rendered == golden["rendered"]
    assert table_open.encode(rendered, add_special=False) == golden["right_ids"]


def test_add_bos_token_false_wins_over_the_post_processor(folder):
    tokenizer = load_tokenizer(folder("tokenizer_config.json", add_bos_token=False))
    assert not tokenizer.add_bos
    assert tokenizer.bos_id == 256
    assert tokenizer.encode("L") == [76]
    assert tokenizer.encode("<s>L") == [256, 76]


def test_add_bos_token_true_without_post_processor(folder):
    assert load_tokenizer(folder("tokenizer.json", post_processor=None)).encode("L") == [256, 76]
    assert load_tokenizer(folder("tokenizer_config.json", add_bos_token=None)).encode("L") == [76]


def test_post_processor_alone_decides_without_a_switch(folder):
    assert load_tokenizer(folder("tokenizer_config.json", add_bos_token=None)).encode("L") == [256, 76]


def test_template_without_bos(folder):
    tokenizer = load_tokenizer(folder("tokenizer_config.json", chat_template="{{ messages[0].content }}"))
    rendered = tokenizer.chat.render([{"role": "user", "content": "hi"}])
    assert tokenizer.encode(rendered, add_special=False) == [104, 105]


def test_end_ids_are_united(folder):
    folder("config.json", eos_token_id=[260, 257])
    tokenizer = load_tokenizer(folder("generation_config.json", eos_token_id=258))
    assert tokenizer.eos_ids == (257, 258, 260)


def test_special_token_by_its_text(table_open, sp):
    assert table_open.token_id("<|im_end|>") == 260
    assert table_open.token_id("a") is None
    assert table_open.token_id("nothing") is None
    assert sp.token_id("</s>") == 2
    # A user-defined piece is visible text, so a stop string finds it there.
    assert sp.token_id("<|im_end|>") is None
    assert sp.decode([3]) == "<|im_end|>"


def test_tokens_only_tokenizer_config_knows(folder):
    tokenizer = load_tokenizer(folder("tokenizer_config.json", added_tokens_decoder={
        "267": {"content": "<think>", "special": False}, "268": {"content": "<|call|>", "special": True}}))
    assert tokenizer.encode("a<think>b<|call|>", add_special=False) == [97, 267, 98, 268]
    assert tokenizer.vocab_size == 269
    assert tokenizer.decode([97, 267, 98, 268]) == "a<think>b"
    with pytest.raises(TokenizerError, match="id 300"):
        load_tokenizer(folder("tokenizer_config.json", added_tokens_decoder={"300": {"content": "<gap>"}}))


def test_named_tokens_become_special(folder):
    tokenizer = load_tokenizer(folder("special_tokens_map.json", additional_special_tokens=["AB"]))
    assert 262 in tokenizer.special_ids
    assert tokenizer.decode([262, 104]) == "h"


def test_lone_surrogate(table_open, sp, gguf_bpe, gguf_spm):
    for tokenizer in (table_open, sp, gguf_bpe, gguf_spm):
        with pytest.raises(TokenizerError, match="lone surrogate at character 2"):
            tokenizer.encode("ab\ud83d")


def test_sentencepiece_folder(tmp_path):
    shutil.copyfile(DATA / "tokenizer" / "sp.model", tmp_path / "tokenizer.model")
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [2, 331]}')
    config = {"add_bos_token": False, "chat_template": "{{ bos_token }}{{ messages[0].content }}<|call|>",
              "added_tokens_decoder": {"330": {"content": "<|call|>", "special": True},
                                       "331": {"content": "<|end|>", "special": True}}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = load_tokenizer(tmp_path)
    assert (tokenizer.vocab_size, tokenizer.eos_ids, tokenizer.add_bos) == (332, (2, 331), False)
    rendered = tokenizer.chat.render([{"role": "user", "content": "hello"}])
    assert rendered == "<s>hello<|call|>"
    ids = tokenizer.encode(rendered, add_special=False)
    assert (ids[0], ids[-1]) == (1, 330)
    assert tokenizer.decode(ids) == "hello"
    assert tokenizer.token_id("<|end|>") == 331


def test_space_after_special_tokens_follows_legacy(tmp_path):
    shutil.copyfile(DATA / "tokenizer" / "sp.model", tmp_path / "tokenizer.model")
    space, text = 300, "hello</s>hello"
    assert load_tokenizer(tmp_path).encode(text, add_special=False).count(space) == 2
    (tmp_path / "tokenizer_config.json").write_text('{"legacy": false}')
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.encode(text, add_special=False).count(space) == 1
    assert tokenizer.decode(tokenizer.encode(text)) == "hellohello"


def test_llama_style_tokenizer_json(tmp_path, gguf_spm):
    """The decoder Replace, ByteFallback, Fuse, Strip of converted sentencepiece models."""
    vocab = {f"<0x{byte:02X}>": byte for byte in range(256)}
    vocab |= {"\u2581a": 256, "\u2581": 257, "b": 258, "a": 259}
    spec = {
        "version": "1.0", "added_tokens": [],
        "normalizer": {"type": "Sequence", "normalizers": [
            {"type": "Prepend", "prepend": "\u2581"},
            {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}]},
        "decoder": {"type": "Sequence", "decoders": [
            {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "}, {"type": "ByteFallback"},
            {"type": "Fuse"}, {"type": "Strip", "content": " ", "start": 1, "stop": 0}]},
        "model": {"type": "BPE", "vocab": vocab, "merges": [["\u2581", "a"]], "byte_fallback": True,
                  "fuse_unk": False, "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
                  "end_of_word_suffix": None}}
    (tmp_path / "tokenizer.json").write_text(json.dumps(spec))
    library = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(tmp_path)
    for text in ("a", " a", "  b", "ab a", "é漢😀", "a 😀b", "\n", ""):
        ids = library.encode(text).ids
        assert tokenizer.encode(text) == ids
        assert tokenizer.decode(ids) == library.decode(ids) == text
    stream = tokenizer.stream([256])
    assert stream.push(256) == " a"


@pytest.mark.parametrize(("prepare", "message"), [
    (lambda path: None, "holds no tokenizer.json"),
    (lambda path: (path / "tokenizer.json").write_text("{"), "not a usable tokenizer.json"),
    (lambda path: (path / "tokenizer.model").write_bytes(b"\x00\x01no"), "not a usable sentencepiece model"),
    (lambda path: (path / "tekken.json").write_text("{}"), "tekken.json is not supported"),
    (lambda path: [(path / name).write_bytes(b"") for name in ("a.model", "b.model")], "several"),
])
def test_broken_folder(tmp_path, prepare, message):
    prepare(tmp_path)
    with pytest.raises(TokenizerError, match=message) as caught:
        load_tokenizer(tmp_path)
    assert "\n" not in str(caught.value)


def test_broken_settings(folder):
    (folder.path / "tokenizer_config.json").write_text("{oops")
    with pytest.raises(TokenizerError, match=r"tokenizer_config\.json: cannot be read as JSON"):
        load_tokenizer(folder.path)
    with pytest.raises(TokenizerError, match="no such file"):
        load_tokenizer(folder.path / "missing")


def test_unknown_decoder_is_named(folder):
    path = folder("tokenizer.json", decoder={"type": "WordPiece", "prefix": "##", "cleanup": True})
    with pytest.raises(TokenizerError, match="decoder WordPiece is not supported"):
        load_tokenizer(path)
