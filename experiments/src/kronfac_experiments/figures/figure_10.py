"""Figure 10: training error against time, four methods on three problems [MG15 §13]."""

from pathlib import Path

from matplotlib.figure import Figure

from kronfac_experiments.figures import second_experiment
from kronfac_experiments.figures.config import FigureConfig
from kronfac_experiments.figures.lines import draw_curve, finish, leave_out_the_start, legend_below
from kronfac_experiments.figures.methods import METHODS


def make(config: FigureConfig) -> list[Path]:
    """A row a problem."""
    results = second_experiment.run(config)
    title = f"Figure 10: training error against time\n{second_experiment.describe(config, results)}"
    figure = Figure(figsize=(8.5, 1.4 + 3.1 * len(results)), layout="constrained")
    figure.suptitle(title, fontsize=10.5)
    rows = figure.subplots(len(results), squeeze=False)[:, 0]
    for axes, result in zip(rows, results, strict=True):
        for method, curve in result.curves.items():
            draw_curve(axes, curve, "seconds", method.style)
        finish(axes, "seconds", result.title)
        leave_out_the_start(axes, result.curves.values())
    legend_below(figure, {method.name: method.style for method in METHODS}, columns=2)
    return second_experiment.publish(config, figure, results, 10, "seconds", title)
