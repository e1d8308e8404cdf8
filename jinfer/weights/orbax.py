"""Lazy reader of Orbax checkpoints, through TensorStore: only the chunks that hold what is asked for are read."""

import functools
import json
import math
from pathlib import Path
from typing import Any

import numpy as np

from jinfer.errors import CheckpointError

FOLDER = "orbax"  # inside a model folder
TREE = "_METADATA"
_DTYPES = ("float32", "float16", "bfloat16")
_ARRAYS = ("jax.Array", "np.ndarray")


class OrbaxReader:
    """Tensors of an Orbax checkpoint; their names are the keys of its tree, joined by dots. Thread safe.

    Raises CheckpointError naming the path or tensor for what is no complete checkpoint, for leaves that are no arrays
    and for types other than float32, float16 and bfloat16.
    """

    def __init__(self, path: Path):
        import tensorstore  # other formats do without

        self._ts = tensorstore
        self._path = path
        tree = _tree(path)
        self._names = _array_names(path, tree)
        self._driver = "zarr3" if tree.get("use_zarr3") else "zarr"
        self._packed = (path / "manifest.ocdbt").exists()
        # The pool holds the index of chunks; more threads than these only take turns.
        self._context = tensorstore.Context({"cache_pool": {"total_bytes_limit": 64 << 20},
                                             "file_io_concurrency": {"limit": 8}})
        self._store = functools.cache(self._open)

    def names(self) -> list[str]:
        return list(self._names)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._store(name).shape)

    def read(self, name: str, index: tuple[slice, ...] = ()) -> np.ndarray:
        """The part `index` (missing axes are whole) in the stored dtype."""
        store = self._store(name)
        bounds = tuple(slice(*part.indices(n)) for part, n in zip(index, store.shape, strict=False))
        try:
            return np.asarray((store[bounds] if bounds else store).read().result())
        except (ValueError, OSError) as error:
            raise CheckpointError(f"tensor {name}: cannot be read: {' '.join(str(error).split())}") from None

    def nbytes(self) -> int:
        return sum(self.bytes_by_dtype().values())

    def bytes_by_dtype(self) -> dict[str, int]:
        """Bytes stored in each dtype (`float32`, `float16`, `bfloat16`)."""
        total: dict[str, int] = {}
        for name in self._names:
            store = self._store(name)
            dtype = store.dtype.name
            total[dtype] = total.get(dtype, 0) + math.prod(store.shape) * store.dtype.numpy_dtype.itemsize
        return total

    def _open(self, name: str) -> Any:
        if name not in self._names:
            raise CheckpointError(f"tensor {name} is missing from {self._path}")
        file = {"driver": "file", "path": f"{self._path.absolute()}/"}
        kvstore = {"driver": "ocdbt", "base": file, "path": f"{name}/"} if self._packed else {
            **file, "path": f"{self._path.absolute()}/{name}/"}
        try:
            store = self._ts.open({"driver": self._driver, "kvstore": kvstore, "recheck_cached_data": False,
                                   "recheck_cached_metadata": False, "fill_missing_data_reads": False},
                                  open=True, read=True, context=self._context).result()
        except (ValueError, OSError) as error:
            raise CheckpointError(
                f"{self._path}: tensor {name}: cannot be opened: {' '.join(str(error).split())}") from None
        if store.dtype.name not in _DTYPES:
            raise CheckpointError(f"{self._path}: tensor {name} has the unsupported type {store.dtype.name}")
        return store


def _tree(path: Path) -> dict[str, Any]:
    try:
        tree = json.loads((path / TREE).read_text("utf-8"))
    except (OSError, ValueError):
        tree = None
    if not isinstance(tree, dict) or not isinstance(tree.get("tree_metadata"), dict):
        raise CheckpointError(f"{path}: is no complete Orbax checkpoint of a tree ({TREE} is missing or broken)")
    return tree


def _array_names(path: Path, tree: dict[str, Any]) -> dict[str, None]:
    """Names in the order of the tree."""
    names: dict[str, None] = {}
    for entry in tree["tree_metadata"].values():
        try:
            name = ".".join(str(key["key"]) for key in entry["key_metadata"])
            kind = entry["value_metadata"]["value_type"]
        except (KeyError, TypeError):
            raise CheckpointError(f"{path}: {TREE} holds a malformed entry") from None
        if kind not in _ARRAYS:
            raise CheckpointError(f"{path}: {name} is of type {kind!r}, not an array")
        names[name] = None
    return names
