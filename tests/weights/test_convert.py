"""Conversion: what is written reads back bit for bit, whole or not at all, in bounded memory."""

import errno
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jinfer.errors import CheckpointError, ConfigError
from jinfer.tokenizer import load_tokenizer
from jinfer.weights import open_checkpoint, orbax_write, slabs
from jinfer.weights.convert import convert
from jinfer.weights.files import check_target, new_folder
from jinfer.weights.hf_config import read_hf_config
from jinfer.weights.hf_write import hf_config, hf_generation_config
from jinfer.weights.orbax import OrbaxReader
from jinfer.weights.orbax_write import BAND_BYTES, CHUNK_BYTES, chunk_shape
from tests.tokenizer.conftest import bpe_vocabulary, spm_vocabulary
from tests.weights.gguf_files import LLAMA_PLAIN, write_llama

MODELS = Path(__file__).resolve().parents[1] / "data" / "models"
PLAIN = MODELS / "llama_plain"
CONFIG = json.loads((PLAIN / "config.json").read_text())


def write_folder(path, tensors, **config):
    path.mkdir()
    save_file(tensors, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(CONFIG | config))
    (path / "chat_template.jinja").write_text("{{ messages }}\r\n", newline="")
    return path


def mixed_tensors():
    """bfloat16 and one float32 tensor, and one that is large enough to be cut into several slabs and chunks."""
    arrays = load_file(PLAIN / "model.safetensors")
    out = {name: array.astype(ml_dtypes.bfloat16) if array.ndim == 2 else array for name, array in arrays.items()}
    draw = np.random.default_rng(0).integers(0, 2**16, (1100, 10240), np.uint16)
    return out | {"extra.large": draw.view(ml_dtypes.bfloat16)}  # 22 MB of any bits, NaNs included


def bits(array):
    return np.ascontiguousarray(array).view(np.uint8)


def assert_same(folder, tensors):
    reader = open_checkpoint(folder).reader
    assert sorted(reader.names()) == sorted(tensors)
    for name, want in tensors.items():
        got = reader.read(name)
        assert (got.dtype, got.shape) == (want.dtype, want.shape), name
        np.testing.assert_array_equal(bits(got), bits(want), err_msg=name)


def test_safetensors_to_orbax_and_back_bit_for_bit(tmp_path):
    tensors = mixed_tensors()
    source = write_folder(tmp_path / "a", tensors)
    seen = []
    convert(source, tmp_path / "b", "orbax", progress=lambda done, total: seen.append((done, total)))
    convert(tmp_path / "b", tmp_path / "c", "safetensors", shard_bytes=1 << 20)
    convert(tmp_path / "c", tmp_path / "d", "orbax")
    total = sum(array.nbytes for array in tensors.values())
    assert seen[-1] == (total, total)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert len(seen) > len(tensors)  # the large one came in parts
    for name in "bcd":
        assert_same(tmp_path / name, tensors)
        for file in ("config.json", "chat_template.jinja"):
            assert (tmp_path / name / file).read_bytes() == (source / file).read_bytes()
    shards = sorted((tmp_path / "c").glob("*.safetensors"))
    assert [shard.name for shard in shards] == [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
    # and by the library that the format belongs to
    library = load_file(shards[0]) | load_file(shards[1]) | load_file(shards[2])
    assert all((bits(library[name]) == bits(array)).all() for name, array in tensors.items())
    assert not (tmp_path / "b" / "model.safetensors.index.json").exists()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "b", "c", "d"]  # no scratch is left


@pytest.mark.parametrize("to", ["safetensors", "orbax"])
def test_dtype(tmp_path, to):
    tensors = load_file(PLAIN / "model.safetensors")
    source = write_folder(tmp_path / "a", tensors, torch_dtype="float32", quantization_config={})
    convert(source, tmp_path / "b", to, dtype="bfloat16")
    assert_same(tmp_path / "b", {name: array.astype(ml_dtypes.bfloat16) for name, array in tensors.items()})
    assert open_checkpoint(tmp_path / "b").stored_dtype == "bfloat16"
    config = json.loads((tmp_path / "b" / "config.json").read_text())
    assert config == CONFIG | {"torch_dtype": "bfloat16"}  # and tensors are packed no more


@pytest.mark.parametrize("to", ["safetensors", "orbax"])
def test_numbers_beyond_float16_are_refused(tmp_path, to):
    tensors = {name: array.astype(ml_dtypes.bfloat16) for name, array in load_file(PLAIN / "model.safetensors").items()}
    tensors["model.norm.weight"][3] = np.inf  # what is none already may stay
    convert(write_folder(tmp_path / "a", tensors), tmp_path / "b", to, dtype="float16")
    tensors["model.norm.weight"][5] = -1e5
    source = write_folder(tmp_path / "c", tensors)
    with pytest.raises(CheckpointError, match=r"tensor model\.norm\.weight: -99840 is beyond float16"):
        convert(source, tmp_path / "d", to, dtype="float16")
    assert not (tmp_path / "d").exists()


@pytest.mark.parametrize("to", ["safetensors", "orbax"])
def test_packed_weights_are_stored_plainly(tmp_path, to):
    source = MODELS / "gpt_oss_mxfp4"
    convert(source, tmp_path / "b", to)
    reader, before = open_checkpoint(source).reader, open_checkpoint(source)
    assert before.reader.bytes_by_dtype()["quantized"]
    assert_same(tmp_path / "b", {name: reader.read(name) for name in reader.names()})
    after = open_checkpoint(tmp_path / "b")
    assert (after.config, set(after.reader.bytes_by_dtype())) == (before.config, {"float32"})
    assert "quantization_config" not in json.loads((tmp_path / "b" / "config.json").read_text())


def gguf_with_vocabulary(path, kind):
    """A llama of 300 tokens with the vocabulary of the tokenizer's tests."""
    if kind == "gpt2":
        tokens, types, merges = bpe_vocabulary()
        keys = {"tokenizer.ggml.merges": merges, "tokenizer.ggml.pre": "smollm"}
    else:
        tokens, scores, types = spm_vocabulary()
        keys = {"tokenizer.ggml.scores": scores}
    control = [i for i, value in enumerate(types) if value == 3]
    metadata = LLAMA_PLAIN | keys | {
        "tokenizer.ggml.model": kind, "tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.bos_token_id": control[0], "tokenizer.ggml.eos_token_id": control[1],
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.chat_template": "{{ bos_token }}{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}\n"}
    return write_llama(path, load_file(PLAIN / "model.safetensors"), metadata=metadata)


@pytest.mark.parametrize("to", ["safetensors", "orbax"])
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_gguf(tmp_path, kind, to):
    path, decoded = gguf_with_vocabulary(tmp_path / "a.gguf", kind)
    convert(path, tmp_path / "b", to)
    assert_same(tmp_path / "b", {name: array.astype(np.float32) if array.dtype != np.float16 else array
                                 for name, array in decoded.items()})
    before, after = open_checkpoint(path), open_checkpoint(tmp_path / "b")
    assert after.config == before.config
    old, new = load_tokenizer(path), load_tokenizer(tmp_path / "b")
    for field in ("vocab_size", "bos_id", "eos_ids", "special_ids", "prefix", "specials"):
        assert getattr(old, field) == getattr(new, field), field
    texts = ["hello w123", " don't\n\n  x", "漢字😀 é", "".join(old.specials) + " he", "<tool call>\t"]
    for text in texts:
        ids = old.encode(text)
        assert new.encode(text) == ids
        assert new.decode(ids) == old.decode(ids)
        assert new.decode(ids, skip_special=False) == old.decode(ids, skip_special=False)
    named = json.loads((tmp_path / "b" / "tokenizer_config.json").read_text())
    assert [old.specials[named[name]] for name in ("bos_token", "eos_token")] == [old.bos_id, old.eos_ids[0]]
    messages = [{"role": "user", "content": "hi"}]
    assert new.chat.render(messages) == old.chat.render(messages) != "hi"


@pytest.mark.parametrize("folder", sorted(MODELS.iterdir()), ids=lambda folder: folder.name)
def test_config_json_of_every_model_reads_back(tmp_path, folder):
    config = read_hf_config(folder)
    (tmp_path / "config.json").write_text(json.dumps(hf_config(config, "float32")))
    (tmp_path / "generation_config.json").write_text(json.dumps(hf_generation_config(config)))
    assert read_hf_config(tmp_path) == config


# --- Orbax's side

@pytest.fixture(scope="module")
def orbax_folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("orbax")
    tensors = {"model.norm.weight": load_file(PLAIN / "model.safetensors")["model.norm.weight"]}
    tensors["w"] = np.random.default_rng(1).standard_normal((2048, 1024), np.float32)
    convert(write_folder(root / "a", tensors), root / "b", "orbax")
    return root / "b", tensors


def test_plain_orbax_restores_into_any_mesh(orbax_folder):
    import orbax.checkpoint as ocp
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    folder, tensors = orbax_folder
    for shape, spec in (((1, 8), PartitionSpec(None, "x")), ((2, 4), PartitionSpec("y", "x")), ((1, 1), PartitionSpec())):
        mesh = Mesh(np.array(jax.devices()[: np.prod(shape)]).reshape(shape), ("y", "x"))
        sharding = {name: NamedSharding(mesh, spec if name != "model.norm.weight" else PartitionSpec())
                    for name, array in tensors.items()}
        target = {name: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding[name])
                  for name, array in tensors.items()}
        with ocp.StandardCheckpointer() as checkpointer:
            restored = checkpointer.restore(folder / "orbax", target)
        for name, array in tensors.items():
            assert restored[name].sharding == sharding[name]
            np.testing.assert_array_equal(restored[name], array)


def test_orbax_checkpoint_of_others_opens(tmp_path):
    """A nested tree of jax.Arrays saved with Orbax's defaults."""
    import orbax.checkpoint as ocp

    arrays = {name: jax.numpy.asarray(array) for name, array in load_file(PLAIN / "model.safetensors").items()}
    tree = {"model": {name.removeprefix("model."): array for name, array in arrays.items() if "model." in name}}
    tree |= {name: array for name, array in arrays.items() if "model." not in name}
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "m" / "orbax", tree)
    shutil.copy(PLAIN / "config.json", tmp_path / "m")
    assert_same(tmp_path / "m", {name: np.asarray(array) for name, array in arrays.items()})


def bytes_read():
    import tensorstore

    found = tensorstore.experimental_collect_matching_metrics("/tensorstore/kvstore/file/bytes_read")
    return int(sum(value["value"] for metric in found for value in metric["values"]))


@pytest.mark.parametrize("index", [(slice(256, 512),), (slice(None), slice(128, 256)), (slice(0, 1024), slice(512, 1024))])
def test_a_part_reads_its_part_only(orbax_folder, index):
    folder, tensors = orbax_folder
    reader = OrbaxReader(folder / "orbax")
    reader.shape("w")
    before = bytes_read()
    part = reader.read("w", index)
    np.testing.assert_array_equal(part, tensors["w"][index])
    assert part.nbytes <= bytes_read() - before < 1.02 * part.nbytes + 20_000  # the index of chunks besides


@pytest.mark.parametrize(("shape", "itemsize"), [
    ((64,), 4), ((49152, 576), 4), ((576, 576), 4), ((128256, 8192), 2), ((28672, 8192), 2), ((3, 5), 4),
    ((128, 2880, 5760), 2), ((1, 100_000_000), 2), ((7, 1 << 20), 4)])
def test_chunks(shape, itemsize):
    chunk = chunk_shape(shape, itemsize)
    size = np.prod(chunk) * itemsize
    assert all(1 <= c <= n for c, n in zip(chunk, shape, strict=True))
    assert size <= CHUNK_BYTES[1]
    assert chunk == shape or size >= CHUNK_BYTES[0] // 2
    assert chunk[0] == 1 or chunk[0] * np.prod(shape[1:]) * itemsize <= BAND_BYTES
    if np.prod(shape) * itemsize >= 64 * CHUNK_BYTES[0] and shape[0] >= 8:
        assert all(-(-n // c) >= 8 for n, c in zip(shape, chunk, strict=True))


@pytest.mark.parametrize("spoil", ["tree", "chunks", "leaf"])
def test_broken_orbax(tmp_path, orbax_folder, spoil):
    folder = tmp_path / "m"
    shutil.copytree(orbax_folder[0], folder)
    tree = folder / "orbax" / "_METADATA"
    match spoil:
        case "tree":
            tree.unlink()
        case "chunks":
            shutil.rmtree(folder / "orbax" / "d")
            shutil.rmtree(folder / "orbax" / "ocdbt.process_0")
        case "leaf":
            tree.write_text(tree.read_text().replace("np.ndarray", "scalar"))
    with pytest.raises(CheckpointError, match="orbax"):
        open_checkpoint(folder)


# --- whole or not at all

def test_existing_target(tmp_path):
    source = write_folder(tmp_path / "a", load_file(PLAIN / "model.safetensors"))
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "mine.txt").write_text("keep")
    with pytest.raises(CheckpointError, match="b: exists"):
        convert(source, tmp_path / "b", "safetensors")
    with pytest.raises(CheckpointError, match="no model"):
        convert(source, tmp_path / "b", "safetensors", overwrite=True)
    (tmp_path / "b" / "config.json").write_text("{}")  # many programs have one
    with pytest.raises(CheckpointError, match="no model"):
        convert(source, tmp_path / "b", "safetensors", overwrite=True)
    (tmp_path / "b" / "model.safetensors").write_bytes(b"broken")
    convert(source, tmp_path / "b", "safetensors", overwrite=True)
    assert_same(tmp_path / "b", load_file(PLAIN / "model.safetensors"))
    assert not (tmp_path / "b" / "mine.txt").exists()
    with pytest.raises(CheckpointError, match="holds the source"):
        convert(source, tmp_path / "a", "safetensors", overwrite=True)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "b"]


def test_every_file_is_on_the_disk_before_the_rename(tmp_path, monkeypatch):
    synced, fsync = set(), os.fsync

    def record(descriptor):
        fsync(descriptor)
        synced.add(os.fstat(descriptor).st_ino)

    monkeypatch.setattr(os, "fsync", record)
    convert(write_folder(tmp_path / "a", load_file(PLAIN / "model.safetensors")), tmp_path / "b", "safetensors")
    assert {path.stat().st_ino for path in (tmp_path / "b").iterdir()} <= synced


def test_a_target_that_cannot_be_moved(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match=r"^\.: cannot be written"):
        convert(PLAIN, Path("."), "safetensors", overwrite=True)
    assert list(tmp_path.iterdir()) == []


def test_options_are_checked():
    with pytest.raises(ConfigError, match="to: 'pickle'"):
        convert(PLAIN, Path("x"), "pickle")
    with pytest.raises(ConfigError, match="dtype: 'int4'"):
        convert(PLAIN, Path("x"), "orbax", dtype="int4")


def test_a_failing_reader_leaves_nothing(tmp_path, monkeypatch):
    from jinfer.weights.safetensors import SafetensorsReader

    read = SafetensorsReader.read
    monkeypatch.setattr(SafetensorsReader, "read", lambda self, name, index=(): (
        read(self, name, index) if index == (slice(0, 1),) or "norm" not in name else (_ for _ in ()).throw(
            CheckpointError("tensor norm: cannot be read"))))
    for to in ("safetensors", "orbax"):
        with pytest.raises(CheckpointError, match="tensor norm"):
            convert(PLAIN, tmp_path / "b", to)
    assert list(tmp_path.iterdir()) == []


def test_no_space_is_seen_before(tmp_path):
    with pytest.raises(CheckpointError, match=r"b: no space: .* MB needed, .* MB free"), \
            new_folder(tmp_path / "b", need=1 << 60, overwrite=False):
        pass
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("to", ["safetensors", "orbax"])
def test_a_disk_that_becomes_full(tmp_path, to):
    """The limit on the size of a file stands for it: the system's error comes from the same calls."""
    source = write_folder(tmp_path / "a", mixed_tensors())
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    try:
        with pytest.raises(CheckpointError, match=r"b: cannot be written: File too large$"):
            convert(source, tmp_path / "b", to)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [p.name for p in tmp_path.iterdir()] == ["a"]
    readers = [thread for thread in threading.enumerate() if thread.name.startswith(slabs.READERS)]
    assert not readers, "threads left for the garbage collector to join, where it may wait for ever"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_no_permission(tmp_path):
    (tmp_path / "locked").mkdir(mode=0o500)
    with pytest.raises(CheckpointError, match="locked/b: cannot be written: Permission denied"):
        convert(PLAIN, tmp_path / "locked" / "b", "safetensors")


def test_a_target_that_may_not_be_seen(tmp_path, monkeypatch):
    def refused(path, **_):
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(Path, "stat", refused)
    with pytest.raises(CheckpointError, match="locked/b: cannot be written: Permission denied"):
        check_target(tmp_path / "locked" / "b", overwrite=False)


def test_weights_that_may_not_be_read(tmp_path, monkeypatch):
    write_folder(tmp_path / "a", load_file(PLAIN / "model.safetensors"))
    opened = Path.open

    def refused(path, *args, **kwargs):
        if path.suffix == ".safetensors":
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return opened(path, *args, **kwargs)

    monkeypatch.setattr(Path, "open", refused)
    with pytest.raises(CheckpointError, match="safetensors: cannot be read: Permission denied"):
        open_checkpoint(tmp_path / "a")


def test_no_folder_can_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="file/b: cannot be written"):
        convert(PLAIN, tmp_path / "file" / "b", "safetensors")


def test_killed_conversions_leave_nothing_that_opens(tmp_path):
    source, formats = write_folder(tmp_path / "a", mixed_tensors()), ("safetensors", "orbax")
    code = """import sys, time
from pathlib import Path
from jinfer.weights.convert import convert
def stop(done, total):
    if done > total // 2:
        print("half", flush=True)
        time.sleep(60)
convert(Path("a"), Path("to") / sys.argv[1], sys.argv[1], progress=stop)
"""
    processes = [subprocess.Popen([sys.executable, "-c", code, to], cwd=tmp_path, stdout=subprocess.PIPE,
                                  env=os.environ | {"PYTHONPATH": str(MODELS.parents[2]), "JAX_PLATFORMS": "cpu"})
                 for to in formats]
    for process in processes:
        assert process.stdout.readline() == b"half\n"
        process.send_signal(signal.SIGKILL)
        process.communicate()
    left = sorted(p.name.split(".")[1] for p in (tmp_path / "to").iterdir())
    assert left == ["orbax", "safetensors"]  # the scratch folders: .orbax.*.incomplete
    for folder in (tmp_path / "to").iterdir():
        with pytest.raises(ConfigError, match=r"config\.json"):
            open_checkpoint(folder)
    convert(source, tmp_path / "to" / "orbax", "orbax")  # they are not in the way
    assert_same(tmp_path / "to" / "orbax", mixed_tensors())


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads Linux's /proc")
@pytest.mark.parametrize("to", ["safetensors", "orbax"])
def test_memory_does_not_grow_with_the_model(tmp_path, to, monkeypatch):
    monkeypatch.setattr(slabs, "SLAB_BYTES", 2 << 20)  # the allocator keeps several times what is in use
    monkeypatch.setattr(orbax_write, "COMMIT_BYTES", 4 << 20)
    tensors = {f"t{i}": np.zeros((4096, 4096), ml_dtypes.bfloat16) for i in range(10)}  # 335 MB
    source = write_folder(tmp_path / "a", tensors)
    del tensors

    def held():
        status = Path("/proc/self/status").read_text()
        return int(status.split("RssAnon:")[1].split()[0]) << 10

    before, peak = held(), 0

    def look(done, total):
        nonlocal peak
        peak = max(peak, held())

    convert(source, tmp_path / "b", to, dtype="float16", progress=look)  # as stored, pieces would be views of the file
    assert peak - before < 150e6
