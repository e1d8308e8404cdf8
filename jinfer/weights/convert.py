"""Conversion of checkpoints: any that opens -> a folder of safetensors or of an Orbax checkpoint."""

import contextlib
import dataclasses
import json
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import ml_dtypes
import numpy as np

from jinfer.config.model import ModelConfig
from jinfer.errors import CheckpointError, ConfigError
from jinfer.tokenizer import load_tokenizer
from jinfer.tokenizer.hf_write import has_gguf_tokenizer, write_gguf_tokenizer
from jinfer.weights.checkpoint import Checkpoint, open_checkpoint
from jinfer.weights.files import CONFIG, new_folder, reason, synced
from jinfer.weights.hf_config import read_hf_config
from jinfer.weights.hf_section import Section
from jinfer.weights.hf_text import reads_images
from jinfer.weights.hf_write import hf_config, hf_generation_config
from jinfer.weights.orbax import FOLDER
from jinfer.weights.safetensors_write import SHARD_BYTES, safetensors_targets, write_safetensors
from jinfer.weights.slabs import Target, read_slabs, stored_dtype

Format = Literal["safetensors", "orbax"]
StoredType = Literal["keep", "float32", "bfloat16", "float16"]
Progress = Callable[[int, int], None]

GENERATION = "generation_config.json"
_DTYPES: dict[str, Any] = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
_COPIED = ("*.json", "*.model", "*.model.v*", "*.jinja", "*.txt", "LICENSE*", "NOTICE*", "README*")
_NOT_COPIED = (".safetensors.index.json", ".bin.index.json", f"/{CONFIG}")


def convert(source: Path, target: Path, to: Format, *, dtype: StoredType = "keep", overwrite: bool = False,
            progress: Progress | None = None, shard_bytes: int = SHARD_BYTES) -> None:
    """Writes the model at `source` as the folder `target`, which appears when it is complete.

    Tensors are read and written a few rows at a time; besides them nothing grows with the model.

    Args:
      source: a model folder or .gguf file.
      to: `safetensors`, a Hugging Face folder; `orbax`, the same with the tensors in an Orbax checkpoint in its
        sub-folder `orbax`: a flat tree of their Hugging Face names.
      dtype: of the stored tensors; `keep` keeps float types and stores quantised tensors as float32.
      overwrite: replace `target` if it exists and is a model.
      progress: told bytes written and bytes in all.
      shard_bytes: largest safetensors file, if no tensor is larger.

    Raises ConfigError (unsupported model or option), CheckpointError (broken source; target exists, has no space or
    cannot be written).
    """
    if to not in ("safetensors", "orbax"):
        raise ConfigError(f"to: {to!r} is not supported; supported: safetensors, orbax")
    if dtype != "keep" and dtype not in _DTYPES:
        raise ConfigError(f"dtype: {dtype!r} is not supported; supported: keep, {', '.join(_DTYPES)}")
    checkpoint = open_checkpoint(source)
    if target.resolve() in (source.resolve(), *source.resolve().parents):
        raise CheckpointError(f"{target}: holds the source {source}")
    targets = _targets(checkpoint, to, dtype)
    total, done = sum(t.nbytes for t in targets.values()), 0

    def written(nbytes: int) -> None:
        nonlocal done
        done += nbytes
        if progress is not None:
            progress(done, total)

    config = _config(checkpoint, dtype)
    # Closed here, whatever happens: left to the garbage collector, it may join its threads inside a lock they wait for.
    reading = contextlib.closing(read_slabs(checkpoint.reader, targets))
    need = total + total // 50 + (32 << 20)
    with new_folder(target, need=need, overwrite=overwrite) as folder, reading as slabs:
        _write_side_files(checkpoint, folder)
        if to == "safetensors":
            write_safetensors(folder, targets, slabs, written, shard_bytes=shard_bytes)
        else:
            _write_orbax(folder / FOLDER, target, targets, slabs, written)
        with synced(folder / CONFIG) as out:
            out.write(config.encode())


def _targets(checkpoint: Checkpoint, to: Format, dtype: StoredType) -> dict[str, Target]:
    reader = checkpoint.reader
    names = reader.names()
    shapes = {name: tuple(reader.shape(name)) for name in names}
    for name, shape in shapes.items():
        if not shape or min(shape) < 1:
            raise CheckpointError(f"tensor {name} of shape {list(shape)} holds no values or is a scalar")
    dtypes = {name: stored_dtype(reader, name) if dtype == "keep" else np.dtype(_DTYPES[dtype]) for name in names}
    if to == "safetensors":
        return safetensors_targets(shapes, dtypes)
    from jinfer.weights.orbax_write import orbax_targets  # Orbax takes two seconds to import

    return orbax_targets(shapes, dtypes)


def _write_orbax(path: Path, target: Path, targets: dict[str, Target], slabs: Any,
                 written: Callable[[int], None]) -> None:
    from jinfer.weights.orbax_write import write_orbax

    try:
        write_orbax(path, targets, slabs, written)
    except (ValueError, RuntimeError) as error:  # what TensorStore makes of the system's errors
        raise CheckpointError(f"{target}: cannot be written: {reason(error)}") from None


def _write_side_files(checkpoint: Checkpoint, folder: Path) -> None:
    """Tokenizer, chat template and whatever lies beside config.json."""
    path = checkpoint.path
    if path.is_dir():
        for file in sorted({file for pattern in _COPIED for file in path.glob(pattern)}):
            if file.is_file() and not file.as_posix().endswith(_NOT_COPIED):
                shutil.copyfile(file, folder / file.name)
        return
    (folder / GENERATION).write_text(_generation(checkpoint), "utf-8")
    if has_gguf_tokenizer(path):
        write_gguf_tokenizer(path, folder)


def _config(checkpoint: Checkpoint, dtype: StoredType) -> str:
    """The new config.json: the old one if there is one of a language model, told how tensors are stored now."""
    stored = checkpoint.stored_dtype if dtype == "keep" else dtype
    stored = "float32" if stored == "quantized" else stored
    if checkpoint.path.is_dir() and not reads_images(Section(checkpoint.path / CONFIG)):
        return _edited((checkpoint.path / CONFIG).read_text("utf-8"), None if dtype == "keep" else stored)
    text = _json(hf_config(checkpoint.config, stored))
    with tempfile.TemporaryDirectory() as trial:
        (Path(trial) / CONFIG).write_text(text, "utf-8")
        (Path(trial) / GENERATION).write_text(_generation(checkpoint), "utf-8")
        read = read_hf_config(Path(trial))
    _check_same(checkpoint.config, read)
    return text


def _generation(checkpoint: Checkpoint) -> str:
    """generation_config.json; end tokens that only the tokenizer knows are among its ids."""
    config = checkpoint.config
    if has_gguf_tokenizer(checkpoint.path):
        eos = tuple(dict.fromkeys(config.eos_ids + load_tokenizer(checkpoint.path).eos_ids))
        config = dataclasses.replace(config, eos_ids=eos)
    return _json(hf_generation_config(config))


def _check_same(wanted: ModelConfig, read: ModelConfig) -> None:
    """What config.json cannot say must not get lost."""
    for field in dataclasses.fields(ModelConfig):
        values = [_plain(config, field.name) for config in (wanted, read)]
        if values[0] != values[1] and field.name != "eos_ids":
            raise ConfigError(f"model.{field.name}: config.json of {read.family} says {values[1]!r} where the source "
                              f"has {values[0]!r}")


def _plain(config: ModelConfig, name: str) -> Any:
    """One spelling of what has several."""
    if name == "layers":
        return config.layer_kinds
    if name == "query_scale" and config.query_scale is None:
        return config.head_dim**-0.5
    return getattr(config, name)


def _edited(text: str, dtype: str | None) -> str:
    """config.json of another format: tensors are stored plainly, as `dtype` (None: as they were)."""
    config = json.loads(text)
    changed = config.pop("quantization_config", None) is not None
    if changed and dtype is None:
        dtype = "float32"  # what packed weights become
    keys = [key for key in ("dtype", "torch_dtype") if key in config]
    if dtype is not None and any(config[key] != dtype for key in keys):
        config.update(dict.fromkeys(keys, dtype))
        changed = True
    return _json(config) if changed else text


def _json(values: dict[str, Any]) -> str:
    return json.dumps(values, indent=2, ensure_ascii=False) + "\n"
