"""`jinfer inspect` and `jinfer convert`: what they print, and what they do not import."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from jinfer.cli import main as cli
from jinfer.cli.inspect import parse_size
from jinfer.errors import ConfigError
from jinfer.observe.card import KINDS, count_parameters, kind_of, read_card
from jinfer.weights import open_checkpoint
from tests.weights.test_convert import MODELS, gguf_with_vocabulary


@pytest.fixture
def jinfer(monkeypatch, capsys):
    def run(*args):
        monkeypatch.setattr(sys, "argv", ["jinfer", *map(str, args)])
        monkeypatch.setenv("COLUMNS", "200")
        status = 0
        try:
            cli.main()
        except SystemExit as done:
            status = done.code
        return status, *capsys.readouterr()

    return run


def test_card_of_a_folder(jinfer):
    status, out, _ = jinfer("inspect", MODELS / "table_open", "--memory", "1MiB", "--memory", "16GiB")
    assert status == 0
    lines = [" ".join(line.split()) for line in out.splitlines()]
    for line in ("layers 1 x full attention", "parameters 184,608", "embedding 79,200", "head 79,200",
                 "stored 0.7 MB float32; files of 0.7 MB", "vocabulary 275 rows, 267 tokens in the tokenizer",
                 "tokenizer tokenizer.json, byte-level, adds the beginning token",
                 "end tokens 257 '</s>', 258 '<|eot|>'", "KV a token 64 bytes in bfloat16", "KV a page 4,096 bytes, 64 tokens"):
        assert line in lines
    assert any(line.startswith("chat template {{ bos_token }}{% for m in messages %}") for line in lines)
    assert "│ 16.0 GiB │ float32, 0.00 GiB │ 256 │ 256 │ 256 │" in lines
    # 90 % of a MiB less 369,216 bytes of weights are 574,502: 140 pages of 64 positions of 64 bytes
    assert "│ 0.0 GiB │ bfloat16, 0.00 GiB │ 256 │ 256 │ 128 │" in lines
    _, out, _ = jinfer("inspect", MODELS / "table_open", "--memory", "992000", "--json")  # 127 pages
    assert [fit["context"] for fit in json.loads(out)["fits"] if fit["dtype"] == "bfloat16"] == [256, 256, 64]


def test_weights_that_do_not_fit(jinfer):
    _, out, _ = jinfer("inspect", MODELS / "table_open", "--memory", "0.5MiB")
    line = next(line for line in out.splitlines() if "float32, " in line)
    assert line.count("too large") == 3


def test_a_head_that_is_the_embedding_counts_once():
    once, twice = (read_card(MODELS / name, []) for name in ("llama_tied", "llama_tied_extra_head"))
    assert (twice.parameters, twice.total) == (once.parameters, once.total)
    assert twice.stored != once.stored


def test_json_and_unknown_tokenizer(jinfer):
    status, out, _ = jinfer("inspect", MODELS / "llama_tied", "--json", "--memory", "1GiB")
    card = json.loads(out)
    arrays = load_file(MODELS / "llama_tied" / "model.safetensors")
    assert status == 0
    assert card["total"] == card["active"] == sum(card["parameters"].values()) == sum(a.size for a in arrays.values())
    assert card["parameters"]["embedding"] == arrays["model.embed_tokens.weight"].size
    assert card["parameters"]["head"] == 0
    assert card["stored"] == {"float32": sum(a.nbytes for a in arrays.values())}
    assert card["files"] == os.path.getsize(MODELS / "llama_tied" / "model.safetensors")
    assert (card["tokenizer"], card["chat_template"], card["end_tokens"]) == (None, None, {"257": None})
    assert "no tokenizer.json" in card["problem"]
    assert "unknown: " in jinfer("inspect", MODELS / "llama_tied")[1]


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_gguf_and_its_conversions_have_one_card(tmp_path, jinfer, kind):
    path, _ = gguf_with_vocabulary(tmp_path / "a.gguf", kind)
    first = read_card(path, [1 << 30])
    assert first.end_tokens == {265: "<|im_end|>"} if kind == "gpt2" else {2: "</s>"}
    assert first.chat_template.startswith("{{ bos_token }}")
    for to in ("safetensors", "orbax"):
        status, _, err = jinfer("convert", path, tmp_path / to, "--to", to, "--dtype", "float32")
        assert status == 0
        assert f"{tmp_path / to}: 0.00 GB in " in err
        card = read_card(tmp_path / to, [1 << 30])
        for field in ("config", "layers", "parameters", "cache", "fits", "vocabulary", "chat_template", "end_tokens"):
            assert getattr(card, field) == getattr(first, field), field
    status, _, err = jinfer("convert", path, tmp_path / "orbax", "--to", "orbax")
    assert (status, err.count("\n")) == (1, 1)
    assert "exists" in err


def test_kinds_of_tensors():
    layer = "model.layers.3."
    names = {
        "model.embed_tokens.weight": "embedding", "lm_head.weight": "head", "model.norm.weight": "norms",
        layer + "self_attn.qkv_proj.weight": "attention", layer + "self_attn.q_norm.weight": "norms",
        layer + "self_attn.sinks": "attention", layer + "self_attn.kv_a_layernorm.weight": "norms",
        layer + "mlp.gate_up_proj.weight": "feed-forward", layer + "mlp.shared_experts.up_proj.weight": "feed-forward",
        layer + "mlp.experts.7.up_proj.weight": "experts", layer + "mlp.experts.gate_up_proj": "experts",
        layer + "block_sparse_moe.experts.0.w1.weight": "experts", layer + "block_sparse_moe.gate.weight": "router",
        layer + "mlp.gate.e_score_correction_bias": "router", layer + "mlp.router.weight": "router",
        layer + "mlp.gate_proj.weight": "feed-forward", "vision.patch.weight": "other"}
    assert {name: kind_of(name) for name in names} == names
    assert set(names.values()) == set(KINDS)


def test_every_model_is_counted_whole():
    for folder in MODELS.iterdir():
        if "missing" in folder.name or not (folder / "model.safetensors").exists():
            continue
        reader = open_checkpoint(folder).reader
        counts = count_parameters(reader)
        assert sum(counts.values()) == sum(int(np.prod(reader.shape(name))) for name in reader.names())
        assert counts["other"] == 0, folder.name


@pytest.mark.parametrize(("text", "size"), [
    ("16GiB", 16 << 30), ("80GB", 80 * 10**9), ("80 g", 80 * 10**9), ("1.5Ti", 3 << 39), ("1000", 1000), ("7 b", 7)])
def test_sizes(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "-1GB", "0", "1XB", "1GiBB", "nan", "i"])
def test_no_sizes(text):
    with pytest.raises(ConfigError, match="memory: must be a size"):
        parse_size(text)


def test_a_card_needs_no_jax(tmp_path):
    path, _ = gguf_with_vocabulary(tmp_path / "a.gguf", "gpt2")
    code = ("import sys; from pathlib import Path; from jinfer.observe.card import read_card; "
            "read_card(Path(sys.argv[1]), [1 << 30]); read_card(Path(sys.argv[2]), [1 << 30]); "
            "print([name for name in ('jax', 'flax', 'orbax', 'tensorstore') if name in sys.modules])")
    done = subprocess.run([sys.executable, "-c", code, str(path), str(MODELS / "table_open")], check=True, text=True,
                          capture_output=True, env=os.environ | {"PYTHONPATH": str(Path(cli.__file__).parents[2])})
    assert done.stdout == "[]\n"
