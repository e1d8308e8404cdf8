"""gpt-oss's experts: GGUF keeps gate, up and down as [E, out, in]; Hugging Face one matrix [E, in, out] or bias.

Its gate and up are one tensor there, their outputs taking turns along the last axis.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from jinfer.weights.gguf_blocks import Stored

FUSED: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "mlp.experts.gate_up_proj": ("weight", ("ffn_gate_exps", "ffn_up_exps")),
    "mlp.experts.gate_up_proj_bias": ("bias", ("ffn_gate_exps", "ffn_up_exps")),
    "mlp.experts.down_proj": ("weight", ("ffn_down_exps",)),
    "mlp.experts.down_proj_bias": ("bias", ("ffn_down_exps",)),
}
"""Hugging Face part -> the kind and the parts of the file whose outputs take turns in it."""


@dataclass(frozen=True, slots=True)
class Fused:
    """Stored tensors of equal shape, [E, out, in] or [E, out], whose outputs take turns."""

    parts: tuple[Stored, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """[E, in, parts * out], or [E, parts * out] of biases."""
        experts, outputs, *inputs = self.parts[0].shape
        return (experts, *inputs, len(self.parts) * outputs)

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)

    @property
    def dtype(self) -> str:
        return self.parts[0].dtype

    def read(self, data: np.ndarray, index: tuple[slice, ...]) -> np.ndarray:
        """The part `index` (missing axes are whole); expert by expert, only the asked outputs and inputs."""
        experts, *inputs, outputs = (*index, *(slice(None),) * (len(self.shape) - len(index)))
        start, stop, step = outputs.indices(self.shape[-1])
        turns = len(self.parts)
        rows = slice(start // turns, -(-stop // turns))
        inside = slice(start - rows.start * turns, stop - rows.start * turns, step)
        if not inputs:
            values = np.stack([part.read(data, (experts, rows)) for part in self.parts], -1)
            return values.reshape(values.shape[0], -1)[:, inside]
        stacks = [part.unstacked()[experts] for part in self.parts]
        return np.stack([_transposed(data, same, rows, inputs[0])[:, inside] for same in zip(*stacks, strict=True)])


def _transposed(data: np.ndarray, parts: tuple[Stored, ...], rows: slice, inputs: slice) -> np.ndarray:
    """Rows of the parts in turn, as columns: [inputs, parts * rows]."""
    values = np.stack([part.read(data, (rows, inputs)) for part in parts], 1)
    return values.reshape(-1, values.shape[-1]).T
