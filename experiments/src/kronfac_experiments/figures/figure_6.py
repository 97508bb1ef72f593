"""Figure 6: F̃⁻¹ beside its approximations F̆⁻¹ and F̂⁻¹ [MG15 §4.4]."""

from pathlib import Path

from kronfac_experiments.diagnostics import white_level
from kronfac_experiments.figures.comparison import Pair, draw, numbers_of
from kronfac_experiments.figures.config import FigureConfig
from kronfac_experiments.figures.files import Number, show, write
from kronfac_experiments.figures.network import example
from kronfac_experiments.figures.panels import INVERSE_QUANTILE


def make(config: FigureConfig) -> list[Path]:
    """|F̃⁻¹|, |F̆⁻¹|, |F̃⁻¹ − F̆⁻¹| above |F̃⁻¹|, |F̂⁻¹|, |F̃⁻¹ − F̂⁻¹|, all in the same grey levels."""
    network = example(config)
    damped = network.kronecker_fisher().damped(network.gamma)
    reference = damped.inverse()
    pairs = [
        Pair("F̆⁻¹", r"\breve{F}^{-1}", damped.block_diagonal_inverse()),
        Pair("F̂⁻¹", r"\hat{F}^{-1}", damped.block_tridiagonal_inverse()),
    ]
    numbers = numbers_of("F̃⁻¹", reference, pairs)
    numbers += [
        Number("share of Σ |F̃⁻¹| off the block diagonal", reference.mass_beyond(0)),
        Number("share of Σ |F̃⁻¹| off the block tridiagonal", reference.mass_beyond(1)),
        Number("γ", network.gamma),
    ]
    title = "Figure 6: the inverse of F̃ and its two approximations, all damped by γ"
    figure = draw(
        title,
        network.setting,
        r"\tilde{F}^{-1}",
        reference,
        pairs,
        white_level(reference, INVERSE_QUANTILE),
    )
    paths = write(figure, numbers, "figure_6", config.output)
    show(f"{title}\n{network.setting}", numbers, paths)
    return paths
