"""Error curves on logarithmic axes, for figures 9, 10 and 11."""

from collections.abc import Iterable

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from kronfac_experiments.error_curve import Axis, ErrorCurve
from kronfac_experiments.pages.drawn import Style

AXES: dict[Axis, str] = {
    "iteration": "iterations",
    "cases": "training cases processed",
    "seconds": "seconds of optimiser time",
}
MARKERS = 12
"""On a line, about."""


def draw_curve(axes: Axes, curve: ErrorCurve, axis: Axis, style: Style) -> None:
    """Error, on a logarithmic axis, against `axis`."""
    axes.plot(
        curve.along(axis),
        curve.error,
        color=style.colour,
        linestyle=style.line,
        marker=style.marker,
        markersize=4,
        markevery=max(1, len(curve.error) // MARKERS),
        linewidth=1.6,
    )


def finish(axes: Axes, axis: Axis, title: str) -> None:
    """Labels, grid, and ticks that also label a range of less than a decade; after the lines."""
    axes.set_yscale("log")
    _plain_ticks(axes)
    axes.set_xlabel(AXES[axis], fontsize=9)
    axes.set_ylabel("training error", fontsize=9)
    axes.set_title(title, fontsize=9.5)
    axes.tick_params(labelsize=8)
    axes.grid(True, which="both", alpha=0.2)


def leave_out_the_start(axes: Axes, curves: Iterable[ErrorCurve]) -> None:
    """Let the errors begin with the second evaluation: the fall to it is the same for all methods."""
    second = [float(curve.error[1]) for curve in curves if len(curve.error) > 1]
    if second:
        axes.set_ylim(top=1.3 * max(second))


def zoom(axes: Axes, curves: Iterable[ErrorCurve], axis: Axis, end: float) -> None:
    """Show the axis up to `end`, and the errors there."""
    inside = np.concatenate([curve.error[curve.along(axis) <= end] for curve in curves])
    axes.set_xlim(-0.03 * end, 1.03 * end)
    axes.set_ylim(bottom=float(inside.min()) / 1.15)


def legend_below(figure: Figure, styles: dict[str, Style], columns: int) -> None:
    """One legend under all axes, where it covers nothing."""
    lines = [
        Line2D([], [], color=s.colour, linestyle=s.line, marker=s.marker, markersize=5, label=name)
        for name, s in styles.items()
    ]
    figure.legend(handles=lines, loc="outside lower center", ncols=columns, fontsize=9)


def _plain_ticks(axes: Axes) -> None:
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
