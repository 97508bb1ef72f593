"""Training loss over seconds, a small plot for each problem, all in one picture."""

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from kronfac_experiments.bench.ordinary.run import MARKS
from kronfac_experiments.bench.ordinary.score import FLOOR, Line, runs_of
from kronfac_experiments.bench.ordinary.trials import ADAMW_NAME, KFAC_NAME, Trials
from kronfac_experiments.pages.document import Picture
from kronfac_experiments.pages.drawn import BLUE, VERMILION, Style, png

STYLES = {KFAC_NAME: Style(BLUE, "-", "o"), ADAMW_NAME: Style(VERMILION, "--", "s")}
COLUMNS = 3
SIZE = (3.4, 2.6)
"""Inches, of a small plot."""
CEILING = 10.0
"""Losses are shown up to so many times the first one: of a run that diverged only that it did."""


def draw(lines: Sequence[Line], trials: Trials, seconds: float) -> Picture:
    """The plots of all problems in one picture."""
    columns = min(COLUMNS, len(lines))
    rows = -(-len(lines) // columns)
    figure = Figure(figsize=(SIZE[0] * columns, SIZE[1] * rows), layout="constrained")
    panels = list(figure.subplots(rows, columns, squeeze=False).flat)
    for line, axes in zip(lines, panels, strict=False):
        _panel(axes, line, trials, seconds)
    for axes in panels[len(lines) :]:
        axes.set_axis_off()
    description = (
        f"Training loss of K-FAC and of AdamW over {seconds:g} seconds, a plot for each problem: medians "
        "of the seeds, bands from the least to the most."
    )
    return Picture("Training loss over seconds", description, png(figure))


def _panel(axes: Axes, line: Line, trials: Trials, seconds: float) -> None:
    """Median of the seeds as a line, least to most as a band; nothing below a tenth of the floor."""
    at = np.array(MARKS) * seconds
    for (name, style), lr in zip(STYLES.items(), (None, line.lr), strict=True):
        runs = runs_of(line.problem, name, lr, trials, line.kfac.runs)
        losses = np.array([trial.losses for trial in runs])  # (seeds, marks)
        losses = losses.clip(FLOOR / 10, CEILING * losses[:, :1])
        axes.fill_between(
            at, losses.min(axis=0), losses.max(axis=0), color=style.colour, alpha=0.2, linewidth=0
        )
        axes.plot(
            at,
            np.median(losses, axis=0),
            color=style.colour,
            linestyle=style.line,
            marker=style.marker,
            markersize=3,
            markevery=4,
            linewidth=1.4,
            label=name,
        )
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(numticks=6))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_title(line.problem, fontsize=9)
    axes.set_xlabel("seconds of optimiser time", fontsize=8)
    axes.set_ylabel("training loss", fontsize=8)
    axes.tick_params(labelsize=7)
    axes.grid(True, alpha=0.25)
    axes.legend(fontsize=7)
