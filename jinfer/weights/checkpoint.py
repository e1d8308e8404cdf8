"""A model on disk: its configuration and a lazy reader of its tensors."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from jinfer.config.model import ModelConfig
from jinfer.errors import CheckpointError
from jinfer.weights.gguf_config import read_gguf_config
from jinfer.weights.gguf_meta import read_head
from jinfer.weights.hf_config import read_hf_config
from jinfer.weights.hf_section import Section
from jinfer.weights.hf_storage import read_storage
from jinfer.weights.orbax import FOLDER, OrbaxReader
from jinfer.weights.packed import unpacked
from jinfer.weights.safetensors import SafetensorsReader


class TensorReader(Protocol):
    """Tensors of a checkpoint under Hugging Face names and orientation ([out, in]). Thread safe."""

    def names(self) -> list[str]:
        """Every tensor that a model must consume."""
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of the whole tensor. CheckpointError if it does not exist."""
        ...

    def read(self, name: str, index: tuple[slice, ...] = ()) -> np.ndarray:
        """The part `index` of a tensor (missing axes are whole); nothing else is read or dequantised.

        float32, float16 or ml_dtypes.bfloat16 as stored; float32 for quantised tensors.
        """
        ...

    def nbytes(self) -> int:
        """Bytes the tensors take in storage."""
        ...

    def bytes_by_dtype(self) -> dict[str, int]:
        """The same by stored type: float32, float16, bfloat16 and quantized."""
        ...


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Attributes:
    config: shapes and options of the model.
    reader: its tensors.
    path: the folder or .gguf file it came from.
    stored_dtype: type of most of its bytes: float32, bfloat16, float16 or quantized.
    """

    config: ModelConfig
    reader: TensorReader
    path: Path
    stored_dtype: str


def open_checkpoint(path: Path) -> Checkpoint:
    """Opens a Hugging Face folder (of safetensors, or with an Orbax checkpoint in `orbax/`) or a .gguf file.

    Reads no weights yet.

    Raises ConfigError (unsupported configuration) or CheckpointError (broken files), naming what is wrong.
    """
    path = Path(path)
    if path.is_dir():
        return _open_folder(path)
    if path.is_file() and path.suffix == ".gguf":
        return _open_gguf(path)
    raise CheckpointError(f"{path}: neither a model folder nor a .gguf file")


def _open_folder(path: Path) -> Checkpoint:
    if not (path / "config.json").exists() and (files := sorted(file.name for file in path.glob("*.gguf"))):
        raise CheckpointError(f"{path}: is no model folder; give a .gguf file in it: {', '.join(files)}")
    config = read_hf_config(path)
    if (path / FOLDER).is_dir():
        return _checkpoint(config, OrbaxReader(path / FOLDER), path)
    storage = read_storage(Section(path / "config.json"))
    stored = SafetensorsReader(path, packed=storage.packing is not None, ignored=storage.ignored,
                               renamed=storage.renamed)
    _check_buffers(stored, config)
    return _checkpoint(config, unpacked(stored, storage.packing), path)


def _open_gguf(path: Path) -> Checkpoint:
    from jinfer.weights.gguf import GgufReader  # the gguf package takes half a second to import

    head = read_head(path)
    reader = GgufReader(path, head)
    config = read_gguf_config(path, head, reader.rope_factors())
    return _checkpoint(config, reader, path)


def _checkpoint(config: ModelConfig, reader: TensorReader, path: Path) -> Checkpoint:
    by_dtype = reader.bytes_by_dtype()
    if not by_dtype:
        raise CheckpointError(f"{path}: holds no tensors")
    return Checkpoint(config, reader, path, max(by_dtype, key=lambda dtype: by_dtype[dtype]))


def _check_buffers(reader: SafetensorsReader, config: ModelConfig) -> None:
    """Old checkpoints store the rotary frequencies, unscaled; they must agree with the configuration."""
    if not reader.buffers():
        return
    from jinfer.models.rope import inverse_frequencies  # imports JAX, which few checkpoints need here

    plain, _ = inverse_frequencies(dataclasses.replace(config.rope, kind="default"), config.head_dim)
    scaled, _ = inverse_frequencies(config.rope, config.head_dim)
    for name in reader.buffers():
        stored = reader.read(name).astype(np.float32)
        # tolerance: the tables may have been rounded to 16 bits
        if not any(stored.shape == want.shape and np.allclose(stored, want, rtol=1e-2, atol=1e-6)
                   for want in (plain, scaled)):
            raise CheckpointError(f"tensor {name} does not match the rope parameters of config.json")
