"""The comparison in tables and a picture."""

import math
from collections.abc import Sequence
from statistics import median

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from kronfac_experiments.bench.physics.config import PhysicsConfig
from kronfac_experiments.bench.physics.equations import WEIGHT, Equation
from kronfac_experiments.bench.physics.methods import METHODS, Method
from kronfac_experiments.bench.physics.runs import MARKS, Trial, Trials, best_setting
from kronfac_experiments.pages.document import Picture, Table, spread
from kronfac_experiments.pages.drawn import BLACK, BLUE, GREEN, VERMILION, Style, png

STYLES = (
    Style(BLUE, "-", "o"),
    Style(GREEN, "-.", "^"),
    Style(BLACK, ":", "d"),
    Style(VERMILION, "--", "s"),
)
COLUMNS = 2
SIZE = (4.6, 3.2)
"""Inches, of a panel."""
LEVELS = (1e-3, 1e-4, 1e-5, 1e-6)
"""Errors that the time to is given of."""
METHOD = (
    "K-FAC is KFAC(model, loss), nothing else given. Points are drawn "
    "once and are the same for all; every step is over all of them. The loss is the mean squared residual "
    f"plus {WEIGHT:g} times the mean squared difference at the boundary and at the start. Error: "
    "‖u − u*‖ / ‖u*‖ over 4,000 other points, of the current parameters. Median of the seeds "
    "(smallest – largest). Only steps are on the clock."
)


def tables(config: PhysicsConfig, trials: Trials) -> list[Table]:
    """All of them; settings only if some method has any."""
    tuning = [_tuning(config, trials)] if any(method.grid for method in config.solvers) else []
    return [
        _errors(config, trials),
        _times(config, trials),
        _steps(config, trials),
        *tuning,
        Table("Equations", ("name", "what"), [(e.name, e.description) for e in config.chosen]),
    ]


def runs_of(equation: Equation, method: Method, trials: Trials, seeds: int) -> list[Trial]:
    """The runs that count, by seed."""
    setting = best_setting(equation.name, method, trials)
    return [trials[equation.name, method.name, setting, seed] for seed in range(seeds)]


def _errors(config: PhysicsConfig, trials: Trials) -> Table:
    rows = []
    for equation in config.chosen:
        cells = []
        for method in config.solvers:
            ends = [run.end for run in runs_of(equation, method, trials, config.starts)]
            cells.append(spread(ends, lambda error: f"{error:.1e}"))
        rows.append((equation.name, *cells))
    columns = ("equation", *(method.name for method in config.solvers))
    return Table("Relative L² error at the end", columns, rows, METHOD)


def _times(config: PhysicsConfig, trials: Trials) -> Table:
    rows = []
    for equation in config.chosen:
        for level in LEVELS:
            cells = []
            for method in config.solvers:
                runs = runs_of(equation, method, trials, config.starts)
                cells.append(_seconds([_time_to(run, level) * config.duration for run in runs]))
            rows.append((f"{equation.name}, {level:g}", *cells))
    columns = ("equation, error", *(method.name for method in config.solvers))
    note = (
        "Median of the seeds, to the next mark of the clock; – if most of them did not get there."
    )
    return Table("Seconds to an error", columns, rows, note)


def _time_to(run: Trial, level: float) -> float:
    """Share of the run after which the error was this low for the first time."""
    reached = (mark for mark, error in zip(MARKS, run.curve, strict=True) if error <= level)
    return next(reached, math.inf)


def _seconds(times: Sequence[float]) -> str:
    middle = median(times)
    return f"{middle:.1f}" if math.isfinite(middle) else "–"


def _steps(config: PhysicsConfig, trials: Trials) -> Table:
    rows = []
    for equation in config.chosen:
        runs = [runs_of(equation, method, trials, config.starts) for method in config.solvers]
        rows.append((equation.name, *(f"{median(run.steps for run in own):g}" for own in runs)))
    columns = ("equation", *(method.name for method in config.solvers))
    note = "L-BFGS takes up to 20 of its iterations in a step."
    return Table("Steps", columns, rows, note)


def _tuning(config: PhysicsConfig, trials: Trials) -> Table:
    tuned = [method for method in config.solvers if method.grid]
    rows = []
    for equation in config.chosen:
        chosen = [best_setting(equation.name, method, trials) for method in tuned]
        cells = [
            f"{value:g}{' !' if value in (method.grid[0], method.grid[-1]) else ''}"
            for method, value in zip(tuned, chosen, strict=True)
        ]
        rows.append((equation.name, *cells))
    columns = ("equation", *(f"{method.name}: {method.setting}" for method in tuned))
    tried = "; ".join(f"{m.name}: {', '.join(f'{x:g}' for x in m.grid)}" for m in tuned)
    return Table(
        "Settings that were chosen",
        columns,
        rows,
        f"Tried were {tried}; with ! the first or last of them.",
    )


def draw(config: PhysicsConfig, trials: Trials) -> Picture:
    """Error over seconds, a panel for each equation."""
    count = len(config.chosen)
    columns = min(COLUMNS, count)
    rows = -(-count // columns)
    figure = Figure(figsize=(SIZE[0] * columns, SIZE[1] * rows), layout="constrained")
    panels = list(figure.subplots(rows, columns, squeeze=False).flat)
    for equation, axes in zip(config.chosen, panels, strict=False):
        _panel(axes, equation, trials, config)
    for axes in panels[count:]:
        axes.set_axis_off()
    description = (
        f"Relative L² error of every method over {config.duration:g} seconds, a panel for each equation: "
        "medians of the seeds, bands from the least to the most."
    )
    return Picture("Error over seconds", description, png(figure))


def _panel(axes: Axes, equation: Equation, trials: Trials, config: PhysicsConfig) -> None:
    at = np.array(MARKS) * config.duration
    for method in config.solvers:
        style = STYLES[METHODS.index(method)]
        runs = runs_of(equation, method, trials, config.starts)
        errors = np.array([run.curve for run in runs]).clip(max=10.0)  # (seeds, marks)
        low, high = errors.min(axis=0), errors.max(axis=0)
        axes.fill_between(at, low, high, color=style.colour, alpha=0.15, linewidth=0)
        axes.plot(
            at,
            np.median(errors, axis=0),
            color=style.colour,
            linestyle=style.line,
            marker=style.marker,
            markersize=3,
            markevery=6,
            linewidth=1.4,
            label=method.name,
        )
    axes.set_yscale("log")
    axes.set_title(equation.name, fontsize=9)
    axes.set_xlabel("seconds of optimiser time", fontsize=8)
    axes.set_ylabel("relative L² error", fontsize=8)
    axes.tick_params(labelsize=7)
    axes.grid(True, alpha=0.25)
    axes.legend(fontsize=7)
