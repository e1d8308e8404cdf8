"""The sampler in plain float64 NumPy, a row at a time, written from the definitions."""

from dataclasses import dataclass, field, replace

import numpy as np

from jinfer.sampling.blocks import WIDTH
from jinfer.sampling.sampler import RowParams

BIASES, STOPS = 3, 2


@dataclass
class Row:
    """One row's parameters with neutral defaults, and the tokens it has seen."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence: float = 0.0
    frequency: float = 0.0
    repetition: float = 1.0
    seed: int = 0
    position: int = 0
    stop_ids: list[int] = field(default_factory=list)
    min_position: int = 0
    bias: dict[int, float] = field(default_factory=dict)
    logprobs: int = -1
    prompt: list[int] = field(default_factory=list)
    output: list[int] = field(default_factory=list)

    def but(self, **changes: object) -> "Row":
        return replace(self, **changes)  # type: ignore[arg-type]


def stack(rows: list[Row]) -> RowParams:
    """RowParams of R rows as NumPy arrays."""

    def column(name: str, dtype: type) -> np.ndarray:
        return np.array([getattr(row, name) for row in rows], dtype)

    def padded(lists: list[list], width: int, fill: float, dtype: type) -> np.ndarray:
        return np.array([items + [fill] * (width - len(items)) for items in lists], dtype)

    floats = {
        n: column(n, np.float32)
        for n in ("temperature", "top_p", "min_p", "presence", "frequency", "repetition")
    }
    return RowParams(
        **floats,
        top_k=column("top_k", np.int32),
        seed=column("seed", np.uint32),
        position=column("position", np.int32),
        min_position=column("min_position", np.int32),
        logprobs=column("logprobs", np.int32),
        stop_ids=padded([r.stop_ids for r in rows], STOPS, -1, np.int32),
        bias_ids=padded([list(r.bias) for r in rows], BIASES, -1, np.int32),
        bias_values=padded([list(r.bias.values()) for r in rows], BIASES, 0, np.float32),
    )


def counts_of(rows: list[Row], slots: int, vocab: int) -> np.ndarray:
    """Token counts [slots + 1, V] with row i in slot i."""
    counts = np.zeros((slots + 1, vocab), np.int16)
    for i, row in enumerate(rows):
        for token in row.output:
            counts[i, token] += 2
        counts[i, row.prompt] |= 1
    return counts


def edited(logits: np.ndarray, row: Row) -> np.ndarray:
    """Logits [V] after bias, penalties and the end-token mask."""
    x = logits.astype(np.float64)
    for token, value in row.bias.items():
        x[token] += value
    for token in set(row.prompt) | set(row.output):
        x[token] = x[token] / row.repetition if x[token] > 0 else x[token] * row.repetition
    for token in set(row.output):
        x[token] -= row.presence + row.frequency * row.output.count(token)
    if row.position < row.min_position:
        x[row.stop_ids] = -np.inf
    return x


def weights(x: np.ndarray, row: Row) -> np.ndarray:
    """Probability over the best one's of every kept token [V], 0 for the others, by sorting."""
    w = np.exp((x - x.max()) / max(row.temperature, 1e-20))
    keep = np.ones(len(w), bool)
    if 0 < row.top_k < len(w):
        keep &= w >= np.sort(w)[-row.top_k]
    if row.top_p < 1:
        mass = np.where(keep, w, 0).sum()
        better = np.array([w[keep & (w > value)].sum() for value in w])
        keep &= (better < row.top_p * mass) | (w == w.max())
    keep &= w >= row.min_p * w.max()
    return np.where(keep, w, 0.0)


def candidates(w: np.ndarray, u: np.ndarray, slack: float = 2e-6) -> set[int]:
    """Tokens that the uniforms u [2] select from weights w [V]: one, or several if u is at a boundary."""
    blocks = np.pad(w, (0, -len(w) % WIDTH)).reshape(-1, WIDTH)

    def hits(mass: np.ndarray, u: float) -> list[int]:
        ends = np.cumsum(mass) / mass.sum()
        starts = ends - mass / mass.sum()
        return [i for i in range(len(mass)) if mass[i] > 0 and starts[i] - slack <= u < ends[i] + slack]

    return {b * WIDTH + t for b in hits(blocks.sum(axis=1), u[0]) for t in hits(blocks[b], u[1])}
