"""The plots and pictures of a report, drawn by matplotlib as PNG files."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from numpy.typing import NDArray

from kronfac_experiments.pages.drawn import png
from kronfac_experiments.report.runs import Run

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#444444", "#e69f00", "#56b4e9")
"""Okabe and Ito's, told apart by all kinds of colour vision."""
DASHES = ("-", "--", "-.", ":")
ERRORS = {
    "train_error": (1.0, 1.6),
    "test_error": (0.5, 1.0),
    "averaged_train_error": (0.9, 0.8),
}
"""Opacity and width of the lines."""
AXES = {"seconds": "seconds", "iteration": "iterations", "cases": "cases"}
TRACES = {
    "lambda": ("λ, damping of the quadratic model", "log"),
    "gamma": ("γ, damping of the inverse", "log"),
    "alpha": ("α, coefficient of the direction", "log"),
    "mu": ("μ, coefficient of the last update", "linear"),
    "rho": ("ρ, decrease over the predicted one", "linear"),
    "loss": ("loss of the mini-batch", "log"),
    "batch": ("examples in a mini-batch", "linear"),
}
RHO_RANGE = -1.0, 3.0


def line_of(index: int) -> tuple[str, Any]:
    """Colour and dashes of a run by its place: after seven the dashes change."""
    return COLOURS[index % len(COLOURS)], DASHES[index // len(COLOURS) % len(DASHES)]


def errors(runs: Sequence[Run]) -> bytes | None:
    """Errors against seconds, iterations and cases; None if nothing has been evaluated."""
    axes_known = [name for name in AXES if any(_known(run, name) for run in runs)]
    if not any(np.isfinite(run.columns[name]).any() for run in runs for name in ERRORS):
        return None
    figure = Figure(figsize=(4.6 * len(axes_known), 4.2), layout="constrained")
    panels = figure.subplots(1, len(axes_known), sharey=True, squeeze=False)[0]
    for axes, axis in zip(panels, axes_known, strict=True):
        for index, run in enumerate(runs):
            colour, dashes = line_of(index)
            for name, (alpha, width) in ERRORS.items():
                look = {"color": colour, "linestyle": dashes, "alpha": alpha, "linewidth": width}
                _line(axes, run.columns[axis], run.columns[name], **look)
        axes.set_xlabel(AXES[axis])
        axes.grid(True, alpha=0.3)
        if any((run.columns[name] > 0).any() for run in runs for name in ERRORS):
            axes.set_yscale("log")
    panels[0].set_ylabel("error")
    lines = [
        Line2D([], [], color=colour, linestyle=dashes, label=run.name.replace("$", r"\$"))
        for run, (colour, dashes) in zip(runs, map(line_of, range(len(runs))), strict=True)
    ]
    figure.legend(handles=lines, loc="outside lower center", ncols=4, fontsize=9)
    return png(figure, dpi=110)


def traces(runs: Sequence[Run]) -> bytes | None:
    """λ, γ, α, μ, ρ, the loss and the mini-batch by iteration, those that some run has and that change."""
    shown = [name for name in TRACES if any(_changes(run.columns[name]) for run in runs)]
    if not shown:
        return None
    rows = -(-len(shown) // 3)
    figure = Figure(figsize=(13, 2.7 * rows), layout="constrained")
    panels = list(figure.subplots(rows, 3, squeeze=False).flat)
    for axes, name in zip(panels, shown, strict=False):
        heading, scale = TRACES[name]
        for index, run in enumerate(runs):
            values = run.columns[name]
            if name == "rho":
                values = values.clip(*RHO_RANGE)
            colour, dashes = line_of(index)
            look = {"color": colour, "linestyle": dashes, "linewidth": 1.1}
            _line(axes, run.columns["iteration"], values, **look)
        if scale == "log" and any((run.columns[name] > 0).any() for run in runs):
            axes.set_yscale("log")
        axes.set_title(heading, fontsize=10)
        axes.grid(True, alpha=0.3)
    for axes in panels[len(shown) :]:
        axes.set_axis_off()
    return png(figure, dpi=90)


def _known(run: Run, name: str) -> bool:
    return bool(np.isfinite(run.columns[name]).any())


def _changes(values: NDArray[np.float64]) -> bool:
    finite = values[np.isfinite(values)]
    return len(finite) > 1 and bool((finite != finite[0]).any())


def _line(axes: Axes, x: NDArray[np.float64], y: NDArray[np.float64], **look: object) -> None:
    finite = np.isfinite(x) & np.isfinite(y)
    if finite.any():
        axes.plot(x[finite], y[finite], **look)  # type: ignore[arg-type]
