"""Plots as SVG, in the colours and markers of the report; no script, no network."""

import math
from collections.abc import Sequence
from html import escape

from kronfac_experiments.pages.document import BarPlot, Line, LogLogPlot
from kronfac_experiments.pages.styles import COLOURS, MARKERS, RunStyle, run_styles

WIDTH, HEIGHT = 640, 380
LEFT, RIGHT, TOP, BOTTOM = 76, 16, 12, 48
FEW = 8
BAR = 26
"""Height of a bar and the gap below it."""


class _Axis:
    """A logarithmic axis from the smallest to the largest value, in pixels."""

    def __init__(self, values: Sequence[float], start: float, end: float) -> None:
        self._values = sorted(set(values))
        low, high = math.log10(min(values)), math.log10(max(values))
        margin = 0.04 * (high - low) or 0.2
        self._low, self._high = low - margin, high + margin
        self._start, self._end = start, end

    def __call__(self, value: float) -> float:
        share = (math.log10(value) - self._low) / (self._high - self._low)
        return self._start + share * (self._end - self._start)

    @property
    def ticks(self) -> list[float]:
        """The values themselves if they are few; else 1, 2 and 5 in every decade, or 1 alone."""
        if len(self._values) <= FEW:
            return self._values
        decades = range(math.floor(self._low), math.ceil(self._high) + 1)
        steps = (1,) if self._high - self._low > 3 else (1, 2, 5)
        ticks = [step * 10.0**decade for decade in decades for step in steps]
        return [tick for tick in ticks if self._low <= math.log10(tick) <= self._high]


def log_log(plot: LogLogPlot) -> str:
    """HTML of the curves and what they are."""
    points = [
        [(x, y) for x, y in zip(a.x, a.y, strict=True) if x > 0 and y > 0] for a in plot.lines
    ]
    every = [point for line in points for point in line]
    if not every:
        return '<p class="note">Nothing to draw.</p>'
    x = _Axis([point[0] for point in every], LEFT, WIDTH - RIGHT)
    y = _Axis([point[1] for point in every], HEIGHT - BOTTOM, TOP)
    styles = run_styles(len(plot.lines))
    drawn = [
        _curve(line, [(x(a), y(b)) for a, b in own], own, style)
        for line, own, style in zip(plot.lines, points, styles, strict=True)
    ]
    key = "".join(
        f"<li>{style.swatch}{escape(line.name)}</li>"
        for line, style in zip(plot.lines, styles, strict=True)
    )
    return (
        f'<svg class="drawing" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'aria-label="{escape(plot.heading)}; the numbers are in the tables.">'
        f"{_grid(x, y)}{_labels(plot)}{''.join(drawn)}</svg>"
        f'<ul class="key">{key}</ul>'
    )


def _curve(
    line: Line,
    places: Sequence[tuple[float, float]],
    points: Sequence[tuple[float, float]],
    style: RunStyle,
) -> str:
    path = " ".join(f"{a:.1f},{b:.1f}" for a, b in places)
    dashes = ' stroke-dasharray="6 4"' if line.dashed else ""
    marks = "".join(
        f'<g transform="translate({a:.1f} {b:.1f})"><path d="{MARKERS[style.symbol]}" '
        f'fill="currentColor"/><title>{escape(line.name)}: {value:.4g} at {at:,g}</title></g>'
        for (a, b), (at, value) in zip(places, points, strict=True)
    )
    return (
        f'<g style="color:var({style.colour})"><polyline points="{path}" fill="none" '
        f'stroke="currentColor" stroke-width="2"{dashes}/>{marks}</g>'
    )


def _grid(x: _Axis, y: _Axis) -> str:
    right, bottom = WIDTH - RIGHT, HEIGHT - BOTTOM
    parts = [
        f'<path class="grid" d="M{x(tick):.1f},{TOP}V{bottom}"/><text x="{x(tick):.1f}" '
        f'y="{bottom + 18}" text-anchor="middle">{tick:,g}</text>'
        for tick in x.ticks
    ]
    parts += [
        f'<path class="grid" d="M{LEFT},{y(tick):.1f}H{right}"/><text x="{LEFT - 8}" '
        f'y="{y(tick) + 4:.1f}" text-anchor="end">{tick:,g}</text>'
        for tick in y.ticks
    ]
    frame = f'<path class="frame" d="M{LEFT},{TOP}V{bottom}H{right}"/>'
    return "".join(parts) + frame


def _labels(plot: LogLogPlot) -> str:
    middle_x, middle_y = (LEFT + WIDTH - RIGHT) / 2, (TOP + HEIGHT - BOTTOM) / 2
    return (
        f'<text x="{middle_x}" y="{HEIGHT - 10}" text-anchor="middle">{escape(plot.x_label)}</text>'
        f'<text transform="translate(16 {middle_y}) rotate(-90)" text-anchor="middle">'
        f"{escape(plot.y_label)}</text>"
    )


def bars(plot: BarPlot) -> str:
    """HTML of the bars and what their parts are."""
    parts = list(dict.fromkeys(part for _, lengths in plot.bars for part in lengths))
    longest = max((sum(lengths.values()) for _, lengths in plot.bars), default=0.0)
    if not longest:
        return '<p class="note">Nothing to draw.</p>'
    fills = {part: _fill(style, place) for place, (part, style) in enumerate(_styled(parts))}
    left = 12 + 7.5 * max(len(name) for name, _ in plot.bars)
    scale = (WIDTH - left - 70) / longest
    rows = []
    for row, (name, lengths) in enumerate(plot.bars):
        top = row * BAR
        rows.append(f'<text x="{left - 8}" y="{top + 17}" text-anchor="end">{escape(name)}</text>')
        at = float(left)
        for part in parts:
            length = scale * lengths.get(part, 0.0)
            rows.append(
                f'<rect x="{at:.1f}" y="{top + 4}" width="{length:.1f}" height="{BAR - 8}" '
                f"{fills[part]}><title>{escape(name)}, {escape(part)}: "
                f"{lengths.get(part, 0.0):.4g} {escape(plot.unit)}</title></rect>"
            )
            at += length
        rows.append(f'<text x="{at + 6:.1f}" y="{top + 17}">{sum(lengths.values()):.4g}</text>')
    key = "".join(
        '<li><svg class="swatch" viewBox="0 0 28 12" aria-hidden="true">'
        f'<rect width="28" height="12" {fills[part]}/></svg>{escape(part)}</li>'
        for part in parts
    )
    return (
        f'<svg class="drawing" viewBox="0 0 {WIDTH} {BAR * len(plot.bars)}" role="img" '
        f'aria-label="{escape(plot.heading)}; the numbers are in the tables.">{"".join(rows)}</svg>'
        f'<ul class="key">{key}</ul><p class="note">{escape(plot.unit)}</p>'
    )


def _styled(parts: Sequence[str]) -> list[tuple[str, RunStyle]]:
    return list(zip(parts, run_styles(len(parts)), strict=True))


def _fill(style: RunStyle, place: int) -> str:
    """A colour that comes back after seven parts is paler then."""
    return f'style="fill:var({style.colour});fill-opacity:{0.45 if place >= COLOURS else 1}"'
