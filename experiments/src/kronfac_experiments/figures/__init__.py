"""The figures of [MG15] that show data, each made by one function and written as PNG, PDF and CSV.

| figure | shows |
| --- | --- |
| 2 | the exact Fisher F, F̃ and their difference |
| 3 | F̃, its inverse, and the averages of the inverse's blocks |
| 5 | F̃ beside its approximations F̆ and F̂ |
| 6 | their inverses |
| 7 | the improvement of a step against γ, with and without re-scaling and momentum |
| 9 | training error for several sizes of the mini-batch |
| 10 | training error against time, four methods on three problems |
| 11 | the same against iterations |
"""

from collections.abc import Callable
from pathlib import Path

import torch

from kronfac_experiments.figures import figure_2, figure_3, figure_7, figure_9
from kronfac_experiments.figures.comparison import figure_5, figure_6
from kronfac_experiments.figures.config import FigureConfig
from kronfac_experiments.figures.second_experiment import figure_10, figure_11

FIGURES: dict[int, Callable[[FigureConfig], list[Path]]] = {
    2: figure_2.make,
    3: figure_3.make,
    5: figure_5,
    6: figure_6,
    7: figure_7.make,
    9: figure_9.make,
    10: figure_10,
    11: figure_11,
}

__all__ = ["FIGURES", "FigureConfig", "figure_command", "make_figure"]


def make_figure(config: FigureConfig) -> list[Path]:
    """Make one figure, say what it shows and what was written, and return the paths.

    Raises:
        ValueError: there is no figure of that number that shows data.
    """
    if config.number not in FIGURES:
        available = ", ".join(map(str, FIGURES))
        raise ValueError(
            f"The figures of the paper that kronfac makes are {available}; got {config.number}."
        )
    threads = torch.get_num_threads()
    torch.set_num_threads(config.threads)
    try:
        return FIGURES[config.number](config)
    finally:
        torch.set_num_threads(threads)


def figure_command(config: FigureConfig) -> None:
    """`kronfac figure`: the figure itself says what it wrote."""
    make_figure(config)
