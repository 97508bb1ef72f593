"""Training loss over seconds and steps, validation loss over seconds: a row of plots for each problem."""

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from kronfac_experiments.bench.race.networks.network_race import NetworkRace
from kronfac_experiments.bench.race.networks.racers import FIELD
from kronfac_experiments.bench.race.networks.trials import MEASURES, SECONDS, STEP, Measure
from kronfac_experiments.pages.document import Picture
from kronfac_experiments.pages.drawn import BLACK, BLUE, GREEN, SKY, VERMILION, Style, png

ORANGE, PURPLE, GREY = "#E69F00", "#CC79A7", "#777777"
STYLES = {
    racer.name: style
    for racer, style in zip(
        FIELD,
        (
            Style(BLUE, "-", "o"),
            Style(SKY, "-", "D"),
            Style(GREY, "-", "P"),
            Style(ORANGE, ":", "v"),
            Style(VERMILION, "--", "s"),
            Style(BLACK, "-.", "^"),
            Style(GREEN, "--", "x"),
            Style(PURPLE, "-.", "*"),
        ),
        strict=True,
    )
}
PANELS: tuple[tuple[Measure, int], ...] = (
    ("training loss", SECONDS),
    ("training loss", STEP),
    ("validation loss", SECONDS),
)
SIZE = (3.7, 2.7)
"""Inches, of a small plot."""
CEILING = 1.2
"""Losses are shown up to so many times the first one: of a run that diverged only that it did."""
POINTS = 60


def draw(races: Sequence[NetworkRace]) -> Picture:
    """The plots of all problems in one picture."""
    figure = Figure(
        figsize=(SIZE[0] * len(PANELS), SIZE[1] * len(races) + 0.4), layout="constrained"
    )
    grid = figure.subplots(len(races), len(PANELS), squeeze=False)
    for race, row in zip(races, grid, strict=True):
        for (measure, axis), axes in zip(PANELS, row, strict=True):
            _panel(axes, race, measure, axis)
    handles = {
        label: handle
        for axes in grid.flat
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    figure.legend(handles.values(), handles.keys(), loc="outside upper center", ncols=6, fontsize=8)
    description = (
        "Training loss against seconds and against steps, and validation loss against seconds, a row for "
        "each problem: medians of the seeds, bands from the least to the most."
    )
    return Picture("Losses over seconds and steps", description, png(figure, dpi=110))


def _panel(axes: Axes, race: NetworkRace, measure: Measure, axis: int) -> None:
    """Median of the seeds as a line, least to most as a band, as far as all of them come."""
    low, high = np.inf, 0.0
    for racer in race.racers:
        trials = [t for t in race.found("race", racer) if len(t.rows) > 1]
        if not trials:
            continue
        style = STYLES[racer.name]
        end = min(float(t.column(axis)[-1]) for t in trials)
        first = 1.0 if axis == STEP else 0.0
        at = np.geomspace(1, end, POINTS) if axis == STEP else np.linspace(first, end, POINTS)
        values = np.array(
            [np.interp(at, t.column(axis), t.column(MEASURES[measure])) for t in trials]
        )  # (seeds, points)
        high = max(high, CEILING * float(values[:, 0].max()))
        values = values.clip(max=CEILING * values[:, :1])
        low = min(low, float(values.min()))
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
            label=racer.label,
        )
    axes.set_yscale("log")
    if axis == STEP:
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    if 0 < low < high:
        axes.set_ylim(0.9 * low, high)
        # With less than two decades there is room for more than powers of ten.
        subs = (1.0,) if high / low > 100 else (1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
        axes.yaxis.set_major_locator(LogLocator(subs=subs, numticks=9))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_title(f"{race.problem.name}: {measure}", fontsize=9)
    axes.set_xlabel("steps" if axis == STEP else "seconds of optimiser time", fontsize=8)
    axes.tick_params(labelsize=7)
    axes.grid(True, alpha=0.25)
