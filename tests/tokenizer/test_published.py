"""Published vocabularies against their own libraries, on hundreds of awkward texts: ids, text and streamed text."""

import json
import re

import pytest
import sentencepiece
import tokenizers

from jinfer.tokenizer import Tokenizer, load_tokenizer
from jinfer.weights import resolve_model
from jinfer.weights.gguf_meta import read_metadata
from tests.tokenizer.awkward import awkward_texts
from tests.tokenizer.conftest import write_gguf
from tests.tokenizer.published import MISTRAL, mistral, tokenizer_json

pytestmark = pytest.mark.download
TEXTS = awkward_texts(400)
JSON = ("gemma3", "llama2", "llama3", "qwen3")


def agrees(tokenizer: Tokenizer, encode, decode, texts=TEXTS) -> None:
    """encode, decode: the library's. Lists every text where something differs."""
    wrong = []
    for text in texts:
        ids = encode(text)
        stream = tokenizer.stream()
        streamed = "".join([stream.push(i) for i in ids]) + stream.flush()
        if not (tokenizer.encode(text, add_special=False) == ids and tokenizer.decode(ids) == decode(ids) == streamed):
            wrong.append(text)
    assert not wrong, f"{len(wrong)} of {len(texts)}: {wrong[:5]!r}"


def between_controls(processor: sentencepiece.SentencePieceProcessor):
    """Sentencepiece's encoder for text that spells out control pieces, which it leaves to its callers."""
    controls = [processor.id_to_piece(i) for i in range(processor.vocab_size())
                if processor.is_control(i) or processor.is_unknown(i)]
    pattern = re.compile("(" + "|".join(map(re.escape, sorted(controls, key=len, reverse=True))) + ")")

    def encode(text: str) -> list[int]:
        ids = []
        for part in pattern.split(text):
            ids += [processor.piece_to_id(part)] if part in controls else processor.encode(part) if part else []
        return ids

    return encode, [text for text in TEXTS if not pattern.search(text)]


@pytest.mark.parametrize("version", MISTRAL)
def test_sentencepiece_files(version):
    processor = sentencepiece.SentencePieceProcessor(model_file=str(mistral(version)))
    tokenizer = load_tokenizer(mistral(version))
    encode, plain = between_controls(processor)
    agrees(tokenizer, encode, processor.decode)
    agrees(tokenizer, processor.encode, processor.decode, plain)
    assert len(plain) > 500
    assert tokenizer.encode("a") == [processor.bos_id(), *processor.encode("a")]


@pytest.mark.parametrize("name", JSON)
def test_tokenizer_json_files(name):
    library = tokenizers.Tokenizer.from_file(str(tokenizer_json(name) / "tokenizer.json"))
    agrees(load_tokenizer(tokenizer_json(name)), lambda text: library.encode(text, add_special_tokens=False).ids,
           library.decode)


@pytest.mark.parametrize("version", ["v1", "v3"])
def test_sentencepiece_inside_gguf(version, tmp_path):
    """The real pieces, scores and types, stored as llama.cpp's converter stores them."""
    processor = sentencepiece.SentencePieceProcessor(model_file=str(mistral(version)))
    ids = range(processor.vocab_size())
    types = [2 if processor.is_unknown(i) else 3 if processor.is_control(i) else 6 if processor.is_byte(i) else 1
             for i in ids]
    path = write_gguf(tmp_path / "m.gguf", "llama", [processor.id_to_piece(i) for i in ids], types,
                      add_token_scores=[processor.get_score(i) for i in ids], add_bos_token_id=1, add_eos_token_id=2)
    encode, _ = between_controls(processor)
    agrees(load_tokenizer(path), encode, processor.decode)


@pytest.mark.parametrize(("name", "pre"), [("llama3", "llama-bpe"), ("qwen3", "qwen2")])
def test_byte_level_inside_gguf(name, pre, tmp_path):
    file = tokenizer_json(name) / "tokenizer.json"
    library, content = tokenizers.Tokenizer.from_file(str(file)), json.loads(file.read_text("utf-8"))
    added = {token["id"]: token for token in content["added_tokens"]}
    words = {i: text for text, i in content["model"]["vocab"].items()} | {i: t["content"] for i, t in added.items()}
    types = [(3 if added[i]["special"] else 4) if i in added else 1 for i in range(len(words))]
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in content["model"]["merges"]]
    path = write_gguf(tmp_path / "m.gguf", "gpt2", [words[i] for i in range(len(words))], types,
                      add_token_merges=merges, add_tokenizer_pre=pre, add_eos_token_id=len(words) - 1)
    agrees(load_tokenizer(path), lambda text: library.encode(text, add_special_tokens=False).ids, library.decode)


@pytest.fixture(scope="module")
def gemma():
    return resolve_model("gemma3-270m")


def test_gemma_inside_gguf_is_its_tokenizer_json(gemma):
    """Merges there, scores here. GGUF calls unused tokens control, and sentencepiece shows an unknown one."""
    library = tokenizers.Tokenizer.from_file(str(tokenizer_json("gemma3") / "tokenizer.json"))
    tokenizer = load_tokenizer(gemma)
    assert (tokenizer.vocab_size, tokenizer.bos_id, tokenizer.add_bos) == (262144, 2, True)
    assert tokenizer.eos_ids == (1, library.token_to_id("<end_of_turn>"))

    def encode(text: str) -> list[int]:
        return library.encode(text, add_special_tokens=False).ids

    assert all(tokenizer.encode(text, add_special=False) == encode(text) for text in TEXTS)
    agrees(tokenizer, encode, library.decode, [t for t in TEXTS if "<unused" not in t and "<unk>" not in t])


def test_gemma_inside_gguf_is_sentencepiece(gemma):
    """A ModelProto built by protobuf from the stored pieces; sentencepiece matches user-defined pieces first."""
    pytest.importorskip("google.protobuf", reason="protobuf builds the sentencepiece model to compare with")
    from sentencepiece import sentencepiece_model_pb2

    values = {key: read_metadata(gemma)[f"tokenizer.ggml.{key}"] for key in ("tokens", "scores", "token_type")}
    proto = sentencepiece_model_pb2.ModelProto()
    for text, score, kind in zip(*values.values(), strict=True):
        kind = 2 if text == "<unk>" else kind
        proto.pieces.add(piece=text.replace(" ", "\u2581") if kind == 4 else text, score=score, type=kind)
    proto.trainer_spec.model_type, proto.trainer_spec.byte_fallback = proto.trainer_spec.BPE, True
    proto.trainer_spec.unk_id, proto.trainer_spec.bos_id, proto.trainer_spec.eos_id = 3, 2, 1
    proto.normalizer_spec.name, proto.normalizer_spec.add_dummy_prefix = "identity", False
    proto.normalizer_spec.remove_extra_whitespaces = False
    processor = sentencepiece.SentencePieceProcessor(model_proto=proto.SerializeToString())
    encode, plain = between_controls(processor)
    tokenizer = load_tokenizer(gemma)
    agrees(tokenizer, encode, processor.decode)
    agrees(tokenizer, processor.encode, processor.decode, plain)
    assert tokenizer.special_ids >= {0, 1, 2}
