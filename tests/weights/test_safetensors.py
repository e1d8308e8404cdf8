"""Lazy reading of safetensors folders: single, sharded, broken (cases C24, C25)."""

import json
import shutil
import threading
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jinfer.errors import CheckpointError
from jinfer.weights import open_checkpoint
from jinfer.weights.safetensors import SafetensorsReader

MODELS = Path(__file__).parents[1] / "data/models"
PLAIN = load_file(MODELS / "llama_plain/model.safetensors")


@pytest.fixture
def sharded(tmp_path):
    """llama_plain in two shards with an index; its folder."""
    shutil.copy(MODELS / "llama_plain/config.json", tmp_path)
    names = sorted(PLAIN)
    parts = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for file, members in parts.items():
        save_file({name: PLAIN[name] for name in members}, tmp_path / file)
    weight_map = {name: file for file, members in parts.items() for name in members}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return tmp_path


def test_single_file():
    checkpoint = open_checkpoint(MODELS / "llama_plain")
    assert sorted(checkpoint.reader.names()) == sorted(PLAIN)
    assert checkpoint.stored_dtype == "float32"
    assert checkpoint.reader.nbytes() == sum(array.nbytes for array in PLAIN.values())
    assert checkpoint.config.num_layers == 2
    for name, want in PLAIN.items():
        assert checkpoint.reader.shape(name) == want.shape
        np.testing.assert_array_equal(checkpoint.reader.read(name), want)


def test_slices():
    reader = SafetensorsReader(MODELS / "llama_plain")
    name = "model.layers.0.mlp.down_proj.weight"  # [32, 48]
    for index in [(slice(4, 20),), (slice(None), slice(7, 9)), (slice(31, 32), slice(24, None))]:
        np.testing.assert_array_equal(reader.read(name, index), PLAIN[name][index])


def test_shards_read_like_one_file(sharded):
    checkpoint = open_checkpoint(sharded)
    assert sorted(checkpoint.reader.names()) == sorted(PLAIN)
    for name, want in PLAIN.items():
        np.testing.assert_array_equal(checkpoint.reader.read(name, (slice(1, 3),)), want[1:3])


def test_reads_from_threads_agree(sharded):
    reader, bad = SafetensorsReader(sharded), []

    def work(seed):
        rng = np.random.default_rng(seed)
        for name in rng.permutation(sorted(PLAIN)):
            start = int(rng.integers(0, PLAIN[name].shape[0]))
            if not np.array_equal(reader.read(name, (slice(start, None),)), PLAIN[name][start:]):
                bad.append(name)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not bad


@pytest.mark.parametrize(("dtype", "name"), [(ml_dtypes.bfloat16, "bfloat16"), (np.float16, "float16")])
def test_stored_dtypes(tmp_path, dtype, name):
    shutil.copy(MODELS / "llama_plain/config.json", tmp_path)
    norm = "model.norm.weight"
    arrays = {key: value if key == norm else value.astype(dtype) for key, value in PLAIN.items()}
    save_file(arrays, tmp_path / "model.safetensors")
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.stored_dtype == name  # the one float32 norm does not decide
    part = checkpoint.reader.read("lm_head.weight", (slice(3, 5), slice(1, 4)))
    assert part.dtype == dtype
    np.testing.assert_array_equal(part, arrays["lm_head.weight"][3:5, 1:4])
    assert checkpoint.reader.read(norm).dtype == np.float32


def test_tied_checkpoints_show_what_is_stored():
    tied, extra, missing = (SafetensorsReader(MODELS / f"llama_{kind}").names()
                            for kind in ("tied", "tied_extra_head", "untied_missing_head"))
    assert "lm_head.weight" not in tied
    assert "lm_head.weight" in extra
    assert "lm_head.weight" not in missing


def test_missing_tensor_is_named():
    reader = SafetensorsReader(MODELS / "llama_untied_missing_head")
    for call in (reader.shape, reader.read):
        with pytest.raises(CheckpointError, match=r"lm_head\.weight"):
            call("lm_head.weight")


def test_rotary_tables_of_old_checkpoints_are_compared_not_loaded(tmp_path):
    shutil.copy(MODELS / "llama_plain/config.json", tmp_path)
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    good = np.asarray([1, 0.1, 0.01, 0.001], np.float16)
    save_file(PLAIN | {name: good}, tmp_path / "model.safetensors")
    assert name not in open_checkpoint(tmp_path).reader.names()
    save_file(PLAIN | {name: good * np.float16(0.5)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="rotary_emb"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("keep", [0, 5, 100, -1])
def test_truncated_file(sharded, keep):
    shard = sharded / "model-00002-of-00002.safetensors"
    shard.write_bytes(shard.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match="model-00002-of-00002") as caught:
        open_checkpoint(sharded)
    assert "\n" not in str(caught.value)


def test_missing_shard(sharded):
    (sharded / "model-00001-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model-00001-of-00002.*missing"):
        open_checkpoint(sharded)


def test_index_that_names_an_absent_tensor(sharded):
    index = sharded / "model.safetensors.index.json"
    data = json.loads(index.read_text())
    data["weight_map"]["model.layers.9.mlp.up_proj.weight"] = "model-00001-of-00002.safetensors"
    index.write_text(json.dumps(data))
    with pytest.raises(CheckpointError, match=r"model\.layers\.9\.mlp\.up_proj\.weight"):
        open_checkpoint(sharded)


@pytest.mark.parametrize("text", ["{", "[]", '{"weight_map": 3}', '{"weight_map": {"a": 1}}',
                                  '{"weight_map": {"a": "../a.safetensors"}}'])
def test_broken_index(sharded, text):
    (sharded / "model.safetensors.index.json").write_text(text)
    with pytest.raises(CheckpointError, match="not a safetensors index"):
        open_checkpoint(sharded)


def test_tensor_outside_the_index_is_still_seen(sharded):
    """A forgotten bias must reach the loader, which refuses tensors nothing consumes."""
    shard = sharded / "model-00001-of-00002.safetensors"
    save_file(load_file(shard) | {"model.layers.0.self_attn.q_proj.bias": np.ones(32, np.float32)}, shard)
    assert "model.layers.0.self_attn.q_proj.bias" in open_checkpoint(sharded).reader.names()


def test_unsupported_type_is_named(tmp_path):
    shutil.copy(MODELS / "llama_plain/config.json", tmp_path)
    save_file({"lm_head.weight": np.zeros((2, 2), np.int8)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"lm_head\.weight.*I8"):
        open_checkpoint(tmp_path)


def test_folder_without_weights(tmp_path):
    shutil.copy(MODELS / "llama_plain/config.json", tmp_path)
    with pytest.raises(CheckpointError, match=r"neither model\.safetensors"):
        open_checkpoint(tmp_path)
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(CheckpointError, match=r"\.bin"):
        open_checkpoint(tmp_path)


def test_what_lies_there_instead_is_told(tmp_path):
    folder = tmp_path / "m"
    folder.mkdir()
    (folder / "m.gguf").touch()
    with pytest.raises(CheckpointError, match=r"is no model folder; give a \.gguf file in it: m\.gguf"):
        open_checkpoint(folder)
    shutil.copy(MODELS / "llama_plain/config.json", folder)
    (folder / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    with pytest.raises(CheckpointError, match=r"safetensors: is a pointer of Git LFS"):
        open_checkpoint(folder)


def test_path_that_is_nothing(tmp_path):
    with pytest.raises(CheckpointError, match="neither a model folder"):
        open_checkpoint(tmp_path / "nowhere")
