"""Pictures of a race: a panel for each problem, a line for each contestant."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from kronfac_experiments.pages.document import Picture
from kronfac_experiments.pages.drawn import BLACK, BLUE, GREEN, SKY, VERMILION, Style, png
from kronfac_experiments.race.plan import Lane
from kronfac_experiments.race.records import SECONDS, STEP, TRAINING, VALIDATION, Run

STYLES = (
    Style(BLUE, "-", "o"),
    Style(VERMILION, "--", "s"),
    Style(GREEN, "-.", "^"),
    Style(BLACK, ":", "d"),
    Style("#CC79A7", "--", "x"),
    Style(SKY, "-", "v"),
)
COLUMNS = 3
SIZE = (3.6, 2.7)
"""Inches, of a panel."""
CEILING = 1.2
"""Losses are shown up to so many times the first one: of a run that diverged only that it did."""
POINTS, START = 60, 3
"""Of a line, and the first that decides where the axis ends."""
TICKS = {10.0: (1.0, 1.5, 2.0, 3.0, 5.0, 7.0), 100.0: (1.0, 2.0, 5.0)}
"""Ticks within a decade, for axes whose ends are less than so many times apart."""
Numbers = npt.NDArray[np.float64]


def draw(
    lanes: dict[str, list[Lane]], seconds: float, along: int = SECONDS, shown: int | None = None
) -> Picture:
    """A panel for each problem with runs: what decides on it, or its metric, over seconds or steps."""
    lanes = {name: own for name, own in lanes.items() if any(lane.runs for lane in own)}
    count = max(1, len(lanes))
    columns = min(COLUMNS, count)
    rows = -(-count // columns)
    scale = 1.8 if count == 1 else 1.0
    size = scale * SIZE[0] * columns, scale * SIZE[1] * rows + 0.4
    figure = Figure(figsize=size, layout="constrained")
    panels = list(figure.subplots(rows, columns, squeeze=False).flat)
    for own, axes in zip(lanes.values(), panels, strict=False):
        _panel(axes, own, seconds, along, shown)
    for axes in panels[len(lanes) :]:
        axes.set_axis_off()
    handles = {
        label: handle
        for axes in panels
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    figure.legend(
        handles.values(), handles.keys(), loc="outside upper center", ncols=columns + 1, fontsize=8
    )
    heading = (
        f"{'Loss' if shown is None else 'Metric'} over {'steps' if along == STEP else 'seconds'}"
    )
    description = (
        f"{heading}, a panel for each problem: medians of the seeds, bands from the least to the most, in "
        f"{seconds:g} seconds."
    )
    return Picture(heading, description, png(figure, dpi=110))


def _panel(
    axes: Axes, lanes: Sequence[Lane], seconds: float, along: int, shown: int | None
) -> None:
    problem = lanes[0].problem
    column = TRAINING if problem.judged_by == "training" else VALIDATION
    column = column if shown is None else shown
    for lane, style in zip(lanes, STYLES, strict=False):
        runs = [run for run in lane.runs if len(run.rows) > 1]
        if not runs:
            continue
        end = seconds if along == SECONDS else max(run.rows[-1][STEP] for run in runs)
        at = np.linspace(0, end, POINTS)
        values = np.array([_values(run, column, along, at) for run in runs])
        values = values.clip(1e-12, CEILING * values[:, :1])
        axes.fill_between(
            at, values.min(axis=0), values.max(axis=0), color=style.colour, alpha=0.15, linewidth=0
        )
        axes.plot(
            at,
            np.median(values, axis=0),
            color=style.colour,
            linestyle=style.line,
            marker=style.marker,
            markersize=3,
            markevery=POINTS // 6,
            linewidth=1.3,
            label=lane.contestant.label,
        )
    _scale(axes)
    what = f"{problem.judged_by} loss" if shown is None else problem.metric_name
    axes.set_title(f"{problem.name}: {what}", fontsize=9)
    axes.set_xlabel("steps" if along == STEP else "seconds", fontsize=8)
    axes.tick_params(labelsize=7)
    axes.grid(True, alpha=0.25)


def _scale(axes: Axes) -> None:
    """A logarithmic axis that leaves out the first falls, which are the same for all."""
    axes.set_yscale("log")
    medians = [np.asarray(line.get_ydata(), dtype=np.float64) for line in axes.lines]
    low = min(values.min() for values in medians)
    high = max(values[START:].max() for values in medians)
    margin = max(1.02, (high / low) ** 0.05)
    axes.set_ylim(low / margin, high * margin)
    ticks = next((within for ratio, within in TICKS.items() if high < ratio * low), (1.0,))
    axes.yaxis.set_major_locator(LogLocator(subs=ticks, numticks=6))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())


def _values(run: Run, column: int, along: int, at: Numbers) -> Numbers:
    """The numbers at these seconds or steps.

    A run's clock is stretched to its budget: its steps were counted to fit it on a quiet machine.
    """
    rows = np.array(run.rows, dtype=np.float64)
    places = rows[:, along]
    if along == SECONDS and not run.message and rows[-1, STEP]:
        places = places * (at[-1] / places[-1])
    return np.interp(at, places, rows[:, column])
