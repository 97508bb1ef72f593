"""Figure 3: F̃, its damped inverse, and the averages of the inverse's blocks [MG15 §4.1]."""

from pathlib import Path

from matplotlib.axes import Axes
from torch import Tensor

from kronfac_experiments.diagnostics import BlockMatrix, kronecker_fisher
from kronfac_experiments.figures.config import FigureConfig
from kronfac_experiments.figures.files import Number, publish
from kronfac_experiments.figures.network import LABELS, example
from kronfac_experiments.figures.panels import (
    INVERSE_QUANTILE,
    draw_one,
    new_figure,
    white_level,
)


def make(config: FigureConfig) -> list[Path]:
    """|F̃| and |F̃⁻¹|, each in its own grey levels, and the 4 × 4 block averages of |F̃⁻¹|."""
    network = example(config)
    factors = kronecker_fisher(network.examples)
    F_tilde, inverse = factors.dense(), factors.damped(network.gamma).inverse()
    numbers = [
        Number("share of Σ |F̃| off the block diagonal", F_tilde.mass_beyond(0)),
        Number("share of Σ |F̃| off the block tridiagonal", F_tilde.mass_beyond(1)),
        Number("share of Σ |F̃⁻¹| off the block diagonal", inverse.mass_beyond(0)),
        Number("share of Σ |F̃⁻¹| off the block tridiagonal", inverse.mass_beyond(1)),
        Number("γ", network.gamma),
        Number("training error, %", network.error, 5.0),
    ]
    for name, matrix in (("F̃", F_tilde), ("F̃⁻¹", inverse)):
        means = matrix.block_means()
        for i in range(matrix.layers):
            for j in range(matrix.layers):
                block = f"average of |{name}| in the block of layers {i + 2} and {j + 2}"
                numbers.append(Number(block, float(means[i, j])))

    title = "Figure 3: the Kronecker-factored Fisher and its inverse"
    figure, axes = new_figure(title, network.setting)
    draw_one(axes[0][0], F_tilde, r"$|\tilde{F}|$", white_level(F_tilde), _beyond(F_tilde))
    draw_one(
        axes[0][1],
        inverse,
        r"$|\tilde{F}^{-1}|$, damped by $\gamma$",
        white_level(inverse, INVERSE_QUANTILE),
        _beyond(inverse),
    )
    _draw_means(axes[0][2], inverse.block_means())
    return publish(config, figure, f"{title}\n{network.setting}", numbers, numbers[:6])


def _beyond(matrix: BlockMatrix) -> str:
    return (
        f"{100 * matrix.mass_beyond(1):.1f} % of the absolute values are off the block tridiagonal"
    )


def _draw_means(axes: Axes, means: Tensor) -> None:
    image = axes.imshow(means.numpy(), cmap="gray", vmin=0.0)
    largest = float(means.max())
    for i in range(len(means)):
        for j in range(len(means)):
            value = float(means[i, j])
            colour = "black" if value > largest / 2 else "white"
            axes.text(j, i, f"{value:.3g}", ha="center", va="center", color=colour, fontsize=11)
    axes.set_xticks(range(len(means)), LABELS)
    axes.set_yticks(range(len(means)), LABELS, rotation=90, verticalalignment="center")
    axes.tick_params(length=0, labelsize=9)
    axes.set_title(r"block averages of $|\tilde{F}^{-1}|$", fontsize=13)
    figure = axes.get_figure()
    assert figure is not None
    figure.colorbar(image, ax=axes, shrink=0.8, pad=0.02)
