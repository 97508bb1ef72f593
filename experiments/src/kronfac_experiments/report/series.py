"""The numbers behind the plots, thinned and rounded, as `page.js` wants them."""

from typing import Any

import numpy as np

from kronfac_experiments.pages.styles import run_styles
from kronfac_experiments.report.runs import ERRORS, Run
from kronfac_experiments.report.thinning import thin

AXES = ("iteration", "cases", "seconds")
TRACES = ("lambda", "gamma", "alpha", "mu", "rho", "loss", "batch")

POINTS = 16_000
"""Most points of all curves together: half a megabyte beside the five of plotly.js."""
POINTS_OF_A_CURVE = (40, 400)
"""The fewest that still make a curve, the most that a screen can show."""

Series = dict[str, list[float] | None]


def plot_data(runs: list[Run]) -> dict[str, Any]:
    """A JSON object: for every run its curves (`errors`, `traces`) and milliseconds by part (`parts`).

    A curve is a list of values, and as many numbers for each x-axis, or null if the run lacks it.
    """
    few, many = POINTS_OF_A_CURVE
    points = POINTS // (len(runs) * (len(ERRORS) + len(TRACES)))
    points = min(max(points, few), many)
    # Of several runs people ask first which was faster.
    axes = AXES if len(runs) == 1 else (AXES[-1], *AXES[:-1])
    return {
        "axes": [axis for axis in axes if any(_has(run, axis) for run in runs)],
        "runs": [
            {
                "name": run.name,
                "colour": style.colour,
                "symbol": style.symbol,
                "errors": {name: _series(run, name, points) for name in ERRORS if _has(run, name)},
                "traces": {name: _series(run, name, points) for name in _traces(run)},
                "parts": {part: _rounded(time) for part, time in run.parts.items()},
            }
            for run, style in zip(runs, run_styles(len(runs)), strict=True)
        ],
    }


def _has(run: Run, name: str) -> bool:
    return bool(np.isfinite(run.columns[name]).any())


def _traces(run: Run) -> list[str]:
    """What the run has, without a mini-batch size that never changes."""
    batch = run.columns["batch"]
    constant = len(np.unique(batch[np.isfinite(batch)])) <= 1
    return [name for name in TRACES if _has(run, name) and not (name == "batch" and constant)]


def _series(run: Run, name: str, points: int) -> Series:
    rows = np.flatnonzero(np.isfinite(run.columns[name]))
    rows = rows[thin(run.columns[name][rows], points)]
    series: Series = {"value": [_rounded(value) for value in run.columns[name][rows]]}
    for axis in AXES:
        numbers = run.columns[axis][rows]
        whole = axis != "seconds"
        series[axis] = (
            [int(x) if whole else _rounded(x) for x in numbers]
            if np.isfinite(numbers).all()
            else None
        )
    return series


def _rounded(value: float) -> float:
    """To five significant digits: more cannot be seen."""
    return float(f"{value:.5g}")
