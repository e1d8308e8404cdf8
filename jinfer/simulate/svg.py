"""Line and scatter plots as SVG text."""

import dataclasses
import html
import math
from collections.abc import Callable, Sequence

WIDTH, HEIGHT = 860, 260
LEFT, RIGHT, TOP, BOTTOM = 64, 12, 12, 36


@dataclasses.dataclass(frozen=True, slots=True)
class Series:
    """Points in order of x; y None or NaN is a gap. kind: line, area or dots. tone: number of its colour, 0..5."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    kind: str = "line"
    tone: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Plot:
    """Attributes:
      y_label: with its unit. log: a logarithmic y axis. least: the axis reaches at least so far. mark: a line across.
    """

    title: str
    y_label: str
    series: tuple[Series, ...]
    log: bool = False
    least: float = 0.0
    mark: float | None = None

    def svg(self) -> str:
        """The plot; colours come from the page's style."""
        points = [(x, y) for s in self.series for x, y in zip(s.x, s.y, strict=True) if _drawn(y, self.log)]
        last = max((x for s in self.series for x in s.x), default=1.0) or 1.0
        values = [y for _, y in points] + ([self.mark] if self.mark else [])
        top = max([*values, self.least]) or 1.0
        bottom = min(values, default=top / 10) if self.log else 0.0
        if self.log and bottom >= top:
            bottom = top / 10
        ticks = _log_ticks(bottom, top) if self.log else _ticks(top)
        bottom, top = (min(bottom, ticks[0]), max(top, ticks[-1])) if self.log else (0.0, max(top, ticks[-1]))

        def x_of(x: float) -> float:
            return LEFT + (WIDTH - LEFT - RIGHT) * x / last

        def y_of(y: float) -> float:
            share = math.log(y / bottom) / math.log(top / bottom) if self.log else (y - bottom) / (top - bottom)
            return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * share

        parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{html.escape(self.title)}">']
        for tick in ticks:
            y = y_of(tick)
            parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
                         f'<text class="y" x="{LEFT - 6}" y="{y + 4:.1f}">{_number(tick)}</text>')
        for tick in _ticks(last):
            if tick <= last:
                parts.append(f'<text class="x" x="{x_of(tick):.1f}" y="{HEIGHT - BOTTOM + 16}">{_number(tick)}</text>')
        parts.append(f'<text class="x" x="{(WIDTH + LEFT) / 2:.0f}" y="{HEIGHT - 4}">seconds</text>'
                     f'<text class="label" transform="rotate(-90)" x="{-(HEIGHT - BOTTOM) / 2:.0f}" y="12">'
                     f'{html.escape(self.y_label)}</text>')
        if self.mark:
            parts.append(f'<line class="mark" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y_of(self.mark):.1f}" '
                         f'y2="{y_of(self.mark):.1f}"/>')
        for series in self.series:
            parts.append(_draw(series, self.log, x_of, y_of, HEIGHT - BOTTOM))
        return "\n".join([*parts, "</svg>"])

    def legend(self) -> str:
        return "".join(f'<span class="key tone{s.tone}">{html.escape(s.name)}</span>' for s in self.series)


def _draw(series: Series, log: bool, x_of: Callable[[float], float], y_of: Callable[[float], float],
          floor: float) -> str:
    points = list(zip(series.x, series.y, strict=True))
    if series.kind == "dots":
        marks = "".join(f"M{x_of(x):.1f} {y_of(y):.1f}h0" for x, y in points if _drawn(y, log))
        return f'<path class="dots tone{series.tone}" d="{marks}"/>'
    runs: list[list[tuple[float, float]]] = [[]]
    for x, y in points:
        if _drawn(y, log):
            runs[-1].append((x_of(x), y_of(y)))
        elif runs[-1]:
            runs.append([])
    paths = []
    for run in filter(None, runs):
        line = "L".join(f"{x:.1f} {y:.1f}" for x, y in run)
        if series.kind == "area":
            paths.append(f'<path class="area tone{series.tone}" d="M{run[0][0]:.1f} {floor}L{line}'
                         f'L{run[-1][0]:.1f} {floor}Z"/>')
        paths.append(f'<path class="line tone{series.tone}" d="M{line}"/>')
    return "".join(paths)


def _drawn(y: float | None, log: bool) -> bool:
    return y is not None and math.isfinite(y) and (y > 0 or not log)


def _ticks(top: float) -> list[float]:
    """Round numbers from 0 to just above the top."""
    raw = top / 5
    power = 10 ** math.floor(math.log10(raw))
    step = next(power * m for m in (1, 2, 5, 10) if power * m >= raw)
    return [i * step for i in range(math.ceil(top / step - 1e-9) + 1)]


def _log_ticks(bottom: float, top: float) -> list[float]:
    return [10.0**e for e in range(math.floor(math.log10(bottom)), math.ceil(math.log10(top) - 1e-9) + 1)]


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:g}" if value < 1e-3 else f"{value:.4g}"
