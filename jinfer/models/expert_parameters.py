"""Parameters of a mixture of experts: one array for all experts of a layer, whatever the checkpoint stores."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from jinfer.models.layers import kernel_parameters
from jinfer.models.parameter import Index, Parameter, Precision, Reader


def stacked(experts: Sequence[Parameter]) -> Parameter:
    """Equal parameters, one an expert, as one [E, ...]; only the experts and parts asked for are read."""
    one = experts[0]

    def read(reader: Reader, index: Index) -> np.ndarray:
        chosen = experts[index[0]]
        out = np.empty((len(chosen), *(part.stop - part.start for part in index[1:])), one.dtype)
        for values, expert in zip(out, chosen, strict=True):  # one by one: an expert's float32 form is short-lived
            values[...] = expert.read(reader, index[1:])
        return out

    sources = {name: shape for expert in experts for name, shape in expert.sources.items()}
    return Parameter((len(experts), *one.shape), ("experts", *one.axes), sources, read, one.dtype)


def stacked_kernels(experts: Sequence[Parameter], precision: Precision) -> tuple[Parameter, Parameter | None]:
    """`kernel_parameters` of experts' matrices [out, in]: (kernel, scale or None).

    The kernel is [E, out, in], or [E, in, out] where precision has inputs first; the scale of int8 is [E, out].
    """
    pairs = [kernel_parameters(expert, precision) for expert in experts]
    scales = [scale for _, scale in pairs if scale is not None]
    return stacked([kernel for kernel, _ in pairs]), stacked(scales) if scales else None


def of_expert(name: str, shape: tuple[int, ...], expert: int, axes: tuple[str | None, ...]) -> Parameter:
    """One expert of a checkpoint tensor [E, ...], its axes reversed: a matrix stored [E, in, out] is [out, in]."""

    def read(reader: Reader, index: Index) -> np.ndarray:
        return reader.read(name, (slice(expert, expert + 1), *reversed(index)))[0].T

    return Parameter(shape[:0:-1], axes, {name: shape}, read)


def pairs_apart(pairs: Parameter, parts: int) -> Parameter:
    """Rows (gate, up) taking turns, [2 * F, ...], as `side_by_side` lays two tensors of F rows for `parts` devices.

    Row r of the result is in part r // (2 * share), share = F / parts; a part is `share` gates, then as many ups.
    """
    share = pairs.shape[0] // 2 // parts

    def read(reader: Reader, index: Index) -> np.ndarray:
        part, row = np.divmod(np.arange(index[0].start, index[0].stop), 2 * share)
        half, place = np.divmod(row, share)
        stored = 2 * (part * share + place) + half
        first = int(stored.min())
        rows = pairs.read(reader, (slice(first, int(stored.max()) + 1), *index[1:]))
        return rows[stored - first]

    return dataclasses.replace(pairs, read=read)
