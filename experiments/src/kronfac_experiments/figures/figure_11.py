"""Figure 11: training error against iterations, from the runs of figure 10 [MG15 §13]."""

from pathlib import Path

from matplotlib.figure import Figure

from kronfac_experiments.figures import second_experiment
from kronfac_experiments.figures.config import FigureConfig
from kronfac_experiments.figures.lines import (
    draw_curve,
    finish,
    leave_out_the_start,
    legend_below,
    zoom,
)
from kronfac_experiments.figures.methods import DIAGONAL, METHODS, TRIDIAGONAL


def make(config: FigureConfig) -> list[Path]:
    """A row a problem: all iterations, and as many as K-FAC with momentum takes."""
    results = second_experiment.run(config)
    title = f"Figure 11: training error against iterations\n{second_experiment.describe(config, results)}"
    figure = Figure(figsize=(11.5, 1.4 + 3.1 * len(results)), layout="constrained")
    figure.suptitle(title, fontsize=10.5)
    rows = figure.subplots(len(results), 2, squeeze=False)
    for (whole, part), result in zip(rows, results, strict=True):
        for method, curve in result.curves.items():
            draw_curve(whole, curve, "iteration", method.style)
            draw_curve(part, curve, "iteration", method.style)
        finish(whole, "iteration", result.title)
        finish(part, "iteration", f"{result.setting.problem.upper()}: K-FAC's iterations")
        end = max(result.curves[method].end("iteration") for method in (TRIDIAGONAL, DIAGONAL))
        zoom(part, result.curves.values(), "iteration", end)
        for axes in (whole, part):
            leave_out_the_start(axes, result.curves.values())
    legend_below(figure, {method.name: method.style for method in METHODS}, columns=4)
    return second_experiment.publish(config, figure, results, 11, "iteration", title)
