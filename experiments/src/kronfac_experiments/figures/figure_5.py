"""Figure 5: F̃ beside its approximations F̆ (block-diagonal) and F̂ (block-tridiagonal inverse) [MG15 §4.4].

The caption does not say whether the matrices are damped; F̂ is not defined unless the factors are
invertible, and figure 6 is damped. So these are damped, too: the matrices that figure 6 inverts. The
table has the distances without damping beside them.
"""

from pathlib import Path

from kronfac.errors import NotPositiveDefiniteError
from kronfac_experiments.diagnostics import white_level
from kronfac_experiments.figures.comparison import Pair, draw, numbers_of
from kronfac_experiments.figures.config import FigureConfig
from kronfac_experiments.figures.files import show, write
from kronfac_experiments.figures.network import example


def make(config: FigureConfig) -> list[Path]:
    """|F̃|, |F̆|, |F̃ − F̆| above |F̃|, |F̂|, |F̃ − F̂|, all in the same grey levels."""
    network = example(config)
    plain = network.kronecker_fisher()
    damped = plain.damped(network.gamma)
    reference = damped.dense()
    pairs = [
        Pair("F̆", r"\breve{F}", damped.block_diagonal()),
        Pair("F̂", r"\hat{F}", damped.block_tridiagonal()),
    ]
    numbers = numbers_of("F̃", reference, pairs)
    try:
        without = [
            Pair("F̆ without damping", "", plain.block_diagonal()),
            Pair("F̂ without damping", "", plain.block_tridiagonal()),
        ]
    except NotPositiveDefiniteError:  # fewer cases than weights into a unit
        without = []
    numbers += numbers_of("F̃", plain.dense(), without)
    title = "Figure 5: the Kronecker-factored Fisher and its two approximations, all damped by γ"
    figure = draw(title, network.setting, r"\tilde{F}", reference, pairs, white_level(reference))
    paths = write(figure, numbers, "figure_5", config.output)
    show(f"{title}\n{network.setting}", numbers, paths)
    return paths
