"""Figure 10: training error against time, four methods on three problems [MG15 §13]."""

from pathlib import Path

from matplotlib.figure import Figure

from kronfac.experiments.figures import second_experiment
from kronfac.experiments.figures.config import FigureConfig
from kronfac.experiments.figures.files import show, write, write_table
from kronfac.experiments.figures.lines import draw_curve, finish, legend_below
from kronfac.experiments.figures.methods import METHODS


def make(config: FigureConfig) -> list[Path]:
    """A row a problem."""
    results = second_experiment.run(config)
    title = "Figure 10: training error against time"
    setting = second_experiment.describe(config, results)
    figure = Figure(figsize=(8.5, 1.4 + 3.1 * len(results)), layout="constrained")
    figure.suptitle(f"{title}\n{setting}", fontsize=10.5)
    rows = figure.subplots(len(results), squeeze=False)[:, 0]
    for axes, result in zip(rows, results, strict=True):
        for method, curve in result.curves.items():
            draw_curve(axes, curve, "seconds", method.style)
        finish(axes, "seconds", result.title)
    legend_below(figure, {method.name: method.style for method in METHODS}, columns=2)

    numbers = [n for r in results for n in second_experiment.numbers(r, "seconds")]
    paths = write(figure, numbers, "figure_10", config.output)
    curves = config.output / "figure_10_curves.csv"
    paths.append(write_table(second_experiment.points(results), curves))
    show(f"{title}\n{setting}", numbers, paths)
    return paths
