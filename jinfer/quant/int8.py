"""int8 weights and activations (W8A8): symmetric, a scale per output channel and one per token.

LLM.int8 (arXiv 2208.07339) without its outlier path: x . w = (x_q . w_q) * scale_x * scale_w, the product in int32.
"""

import dataclasses

import numpy as np

from jinfer.models.parameter import Index, Parameter, Reader
from pallas_kernels.grouped_matmul.reference import SMALLEST


def quantised_rows(weight: Parameter) -> tuple[Parameter, Parameter]:
    """Symmetric int8 with one float32 scale per output channel: (values [*out, in], scale [*out])."""
    whole = slice(0, weight.shape[-1])  # a channel's scale looks at all its inputs

    def scale_of(rows: np.ndarray) -> np.ndarray:
        return np.maximum(np.abs(rows).max(axis=-1), np.float32(SMALLEST)) / np.float32(127.0)

    def read_scale(reader: Reader, index: Index) -> np.ndarray:
        return scale_of(weight.read(reader, (*index, whole)).astype(np.float32))

    def read_values(reader: Reader, index: Index) -> np.ndarray:
        rows = weight.read(reader, (*index[:-1], whole)).astype(np.float32)
        return np.rint(rows / scale_of(rows)[..., None]).astype(np.int8)[..., index[-1]]

    values = dataclasses.replace(weight, read=read_values, dtype=np.dtype(np.int8))
    scale = dataclasses.replace(weight, shape=weight.shape[:-1], axes=weight.axes[:-1], read=read_scale)
    return values, scale
