"""Packing: named int32 arrays in one flat int32 vector, so that a call uploads one array."""

import math
from typing import Any

import jax
import numpy as np


class Packing[Fields: tuple[Any, ...]]:
    """Lays out a NamedTuple of int32 arrays with fixed shapes.

    The host fills views of a fresh vector, the program reads slices of it. A vector is never reused: on CPU the
    device may read the host's memory itself, after the call has returned.
    """

    def __init__(self, fields: type[Fields], **shapes: tuple[int, ...]):
        names: tuple[str, ...] = fields._fields  # type: ignore[attr-defined]
        assert set(shapes) == set(names), (names, shapes)
        self.fields = fields
        self.shapes = [shapes[name] for name in names]
        ends = np.cumsum([math.prod(shape) for shape in self.shapes]).tolist()
        self.size = ends[-1]
        self._parts = [slice(a, b) for a, b in zip([0, *ends[:-1]], ends, strict=True)]

    def empty(self) -> tuple[np.ndarray, Fields]:
        """A zeroed vector and writable views of its fields."""
        vector = np.zeros(self.size, np.int32)
        return vector, self._split(vector)

    def unpack(self, vector: jax.Array) -> Fields:
        """The fields inside a program."""
        return self._split(vector)

    def _split(self, vector: Any) -> Fields:
        return self.fields(*(vector[p].reshape(s) for p, s in zip(self._parts, self.shapes, strict=True)))
