"""Figure 11: training error against iterations, from the runs of figure 10 [MG15 §13]."""

from pathlib import Path

from matplotlib.figure import Figure

from kronfac.experiments.figures import second_experiment
from kronfac.experiments.figures.config import FigureConfig
from kronfac.experiments.figures.files import show, write, write_table
from kronfac.experiments.figures.lines import draw_curve, finish, legend_below, zoom
from kronfac.experiments.figures.methods import DIAGONAL, METHODS, TRIDIAGONAL


def make(config: FigureConfig) -> list[Path]:
    """A row a problem: all iterations, and as many as K-FAC with momentum takes."""
    results = second_experiment.run(config)
    title = "Figure 11: training error against iterations"
    setting = second_experiment.describe(config, results)
    figure = Figure(figsize=(11.5, 1.4 + 3.1 * len(results)), layout="constrained")
    figure.suptitle(f"{title}\n{setting}", fontsize=10.5)
    rows = figure.subplots(len(results), 2, squeeze=False)
    for (whole, part), result in zip(rows, results, strict=True):
        for method, curve in result.curves.items():
            draw_curve(whole, curve, "iteration", method.style)
            draw_curve(part, curve, "iteration", method.style)
        finish(whole, "iteration", result.title)
        finish(part, "iteration", f"{result.setting.problem.upper()}: K-FAC's iterations")
        end = max(result.curves[method].end("iteration") for method in (TRIDIAGONAL, DIAGONAL))
        zoom(part, result.curves.values(), "iteration", end)
    legend_below(figure, {method.name: method.style for method in METHODS}, columns=4)

    numbers = [n for r in results for n in second_experiment.numbers(r, "iteration")]
    paths = write(figure, numbers, "figure_11", config.output)
    curves = config.output / "figure_11_curves.csv"
    paths.append(write_table(second_experiment.points(results), curves))
    show(f"{title}\n{setting}", numbers, paths)
    return paths
