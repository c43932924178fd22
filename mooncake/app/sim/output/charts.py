"""Small charts as SVG text: lines, distributions, bars. They know only numbers and labels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

import numpy as np

WIDTH, HEIGHT = 460, 260
LEFT, RIGHT, TOP, BOTTOM = 56, 12, 30, 40
COLOURS = ("#1f6feb", "#d29922", "#cf222e", "#2da44e", "#8250df", "#57606a", "#bf3989", "#0a7ea4")
CHARACTER = 6  # width of one in a label
ENTRY, LEGEND_ROW = 30, 14  # of a legend: width of an entry besides its label, height of a row
MAX_POINTS = 600


@dataclass(frozen=True, slots=True)
class Series:
    label: str
    x: Sequence[float]
    y: Sequence[float]


def cdf(label: str, values: Sequence[float]) -> Series:
    """The cumulative distribution of ``values``."""
    ordered = np.sort(np.asarray(values, dtype=float))
    shares = np.arange(1, len(ordered) + 1) / max(len(ordered), 1)
    return Series(label, ordered.tolist(), shares.tolist())


def lines(
    title: str,
    x_label: str,
    y_label: str,
    series: Sequence[Series],
    log_x: bool = False,
    names: Sequence[str] = (),
    end: float = 0.0,
) -> str:
    """A chart with one line per series; only a frame if there are no points. ``names``: what x = 0, 1, … stand for.
    The x axis reaches ``end`` at least."""
    series = [_thin(one, log_x) for one in series]
    xs = [x for one in series for x in one.x]
    ys = [y for one in series for y in one.y]
    if not xs:
        return _frame(title, x_label, y_label, "")
    low_x, high_x = min(xs), max(*xs, end)
    high_y = max(max(ys), 1e-12)
    scale_x = _Scale(low_x if log_x else min(low_x, 0.0), high_x, LEFT, WIDTH - RIGHT, log_x)
    scale_y = _Scale(0.0, high_y, HEIGHT - BOTTOM, TOP, False)
    if max(map(len, names), default=0) * CHARACTER * max(len(names) - 1, 1) > WIDTH - LEFT - RIGHT:
        x_label += ": " + ", ".join(f"{at} {name}" for at, name in enumerate(names))
        names = [str(at) for at in range(len(names))]
    marks = [(float(at), name) for at, name in enumerate(names)]
    if not names:
        marks = [(x, short(x)) for x in (_powers(low_x, high_x) if log_x else ticks(min(low_x, 0.0), high_x))]
    parts = [_grid(scale_x, scale_y, marks, high_y)]
    for at, one in enumerate(series):
        colour = COLOURS[at % len(COLOURS)]
        points = " ".join(f"{scale_x(x):.1f},{scale_y(y):.1f}" for x, y in zip(one.x, one.y, strict=True))
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
    legend, num_rows = _legend([one.label for one in series])
    return _frame(title, x_label, y_label, "".join(parts) + legend, HEIGHT + num_rows * LEGEND_ROW)


def _legend(labels: Sequence[str]) -> tuple[str, int]:
    """Below the chart, where no line is: as many entries to a row as there is room for, and the number of rows."""
    parts, x, row = [], LEFT, 0
    for at, label in enumerate(labels):
        if not label:
            continue
        width = len(label) * CHARACTER + ENTRY
        if x > LEFT and x + width > WIDTH:
            x, row = LEFT, row + 1
        y, colour = HEIGHT + row * LEGEND_ROW + 6, COLOURS[at % len(COLOURS)]
        parts.append(f'<line x1="{x}" x2="{x + 14}" y1="{y - 4}" y2="{y - 4}" stroke="{colour}" stroke-width="1.5"/>')
        parts.append(f'<text x="{x + 18}" y="{y}" class="legend">{escape(label)}</text>')
        x += width
    return "".join(parts), row + 1 if parts else 0


class _Scale:
    def __init__(self, low: float, high: float, start: float, end: float, log: bool) -> None:
        self._log = log
        self._low = float(np.log(low)) if log else low
        high = float(np.log(high)) if log else high
        self._start = start
        self._factor = (end - start) / (high - self._low) if high > self._low else 0.0

    def __call__(self, value: float) -> float:
        value = float(np.log(value)) if self._log else value
        return float(self._start + (value - self._low) * self._factor)


def _grid(scale_x: _Scale, scale_y: _Scale, marks: Sequence[tuple[float, str]], high_y: float) -> str:
    parts = []
    for value in ticks(0.0, high_y):
        y = scale_y(value)
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" class="grid"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{short(value)}</text>')
    for value, name in marks:
        x = scale_x(value)
        parts.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}" class="grid"/>')
        parts.append(f'<text x="{x:.1f}" y="{HEIGHT - BOTTOM + 15}" text-anchor="middle">{escape(name)}</text>')
    return "".join(parts)


def ticks(low: float, high: float) -> list[float]:
    """About five round numbers between ``low`` and ``high``."""
    span = high - low
    if span <= 0:
        return [low]
    step = 10.0 ** np.floor(np.log10(span / 4))
    step *= next(factor for factor in (1, 2, 5, 10) if span / (step * factor) <= 5)
    first = np.ceil(low / step) * step
    return [float(value) for value in np.arange(first, high + step * 1e-6, step)]


def _powers(low: float, high: float) -> list[float]:
    """Powers of ten between ``low`` and ``high``; where they are few, others that are round, too."""
    exponents = range(int(np.floor(np.log10(low))), int(np.floor(np.log10(high))) + 1)
    for factors in ((1,), (1, 2, 5), range(1, 10)):
        found = [value for power in exponents for factor in factors if low <= (value := factor * 10.0**power) <= high]
        if len(found) > 1:
            return found
    return ticks(low, high)


def short(value: float) -> str:
    for limit, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= limit:
            return f"{value / limit:.3g}{letter}"
    return f"{value:.3g}"


def _frame(title: str, x_label: str, y_label: str, inside: str, height: int = HEIGHT) -> str:
    return (
        f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(title)}">'
        f'<text x="{LEFT}" y="16" class="title">{escape(title)}</text>{inside}'
        f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 6}" text-anchor="middle">{escape(x_label)}</text>'
        f'<text transform="translate(12 {HEIGHT / 2}) rotate(-90)" text-anchor="middle">{escape(y_label)}</text></svg>'
    )


def _thin(series: Series, log_x: bool) -> Series:
    """Fewer points, and only positive x on a logarithmic axis."""
    pairs = [(x, y) for x, y in zip(series.x, series.y, strict=True) if x == x and y == y and (x > 0 or not log_x)]
    if len(pairs) > MAX_POINTS:
        kept = np.unique(np.linspace(0, len(pairs) - 1, MAX_POINTS).round().astype(int))
        pairs = [pairs[at] for at in kept]
    return Series(series.label, [x for x, _ in pairs], [y for _, y in pairs])
