"""Figures 5 and 6: F̃ beside its approximations F̆ and F̂, and their inverses [MG15 §4.4].

F̆ is block-diagonal, F̂ has a block-tridiagonal inverse. The caption of figure 5 does not say whether the
matrices are damped; F̂ is not defined unless the factors are invertible, and figure 6 is damped. So these
are damped, too: the matrices that figure 6 inverts. The table has the distances without damping as well.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.figure import Figure

from kronfac.errors import NotPositiveDefiniteError
from kronfac_experiments.diagnostics import BlockMatrix, compare, kronecker_fisher
from kronfac_experiments.figures.config import FigureConfig
from kronfac_experiments.figures.files import Number, publish
from kronfac_experiments.figures.network import example
from kronfac_experiments.figures.panels import INVERSE_QUANTILE, draw_row, new_figure, white_level


def figure_5(config: FigureConfig) -> list[Path]:
    """|F̃|, |F̆|, |F̃ − F̆| above |F̃|, |F̂|, |F̃ − F̂|, all in the same grey levels."""
    network = example(config)
    plain = kronecker_fisher(network.examples)
    damped = plain.damped(network.gamma)
    pairs = [
        _Named("F̆", r"\breve{F}", damped.block_diagonal()),
        _Named("F̂", r"\hat{F}", damped.block_tridiagonal()),
    ]
    try:
        without = [
            _Named("F̆ without damping", "", plain.block_diagonal()),
            _Named("F̂ without damping", "", plain.block_tridiagonal()),
        ]
    except NotPositiveDefiniteError:  # fewer cases than weights into a unit
        without = []
    title = "Figure 5: the Kronecker-factored Fisher and its two approximations, all damped by γ"
    reference = _Named("F̃", r"\tilde{F}", damped.dense())
    figure = _draw(title, network.setting, reference, pairs, white_level(reference.matrix))
    numbers = _numbers_of("F̃", reference.matrix, pairs) + _numbers_of("F̃", plain.dense(), without)
    return publish(config, figure, f"{title}\n{network.setting}", numbers, numbers)


def figure_6(config: FigureConfig) -> list[Path]:
    """|F̃⁻¹|, |F̆⁻¹|, |F̃⁻¹ − F̆⁻¹| above |F̃⁻¹|, |F̂⁻¹|, |F̃⁻¹ − F̂⁻¹|, all in the same grey levels."""
    network = example(config)
    damped = kronecker_fisher(network.examples).damped(network.gamma)
    inverse = damped.inverse()
    pairs = [
        _Named("F̆⁻¹", r"\breve{F}^{-1}", damped.block_diagonal_inverse()),
        _Named("F̂⁻¹", r"\hat{F}^{-1}", damped.block_tridiagonal_inverse()),
    ]
    numbers = [
        *_numbers_of("F̃⁻¹", inverse, pairs),
        Number("share of Σ |F̃⁻¹| off the block diagonal", inverse.mass_beyond(0)),
        Number("share of Σ |F̃⁻¹| off the block tridiagonal", inverse.mass_beyond(1)),
        Number("γ", network.gamma),
    ]
    title = "Figure 6: the inverse of F̃ and its two approximations, all damped by γ"
    reference = _Named("F̃⁻¹", r"\tilde{F}^{-1}", inverse)
    figure = _draw(title, network.setting, reference, pairs, white_level(inverse, INVERSE_QUANTILE))
    return publish(config, figure, f"{title}\n{network.setting}", numbers, numbers)


@dataclass(frozen=True)
class _Named:
    """A matrix by its name."""

    name: str
    symbol: str
    """In TeX."""
    matrix: BlockMatrix


def _numbers_of(name: str, reference: BlockMatrix, pairs: Sequence[_Named]) -> list[Number]:
    """The distances of the approximations from the reference, over everything and on the diagonal."""
    numbers = []
    for pair in pairs:
        comparison = compare(reference, pair.matrix)
        difference, sums = (reference - pair.matrix).block_sums(), reference.block_sums()
        diagonal = float(difference.diagonal().sum() / sums.diagonal().sum())
        between = f"{name} − {pair.name}"
        numbers += [
            Number(f"Σ |{between}|", comparison.absolute),
            Number(f"Σ |{between}| / Σ |{name}|", comparison.relative_absolute),
            Number(f"‖{between}‖ / ‖{name}‖, Frobenius", comparison.relative_frobenius),
            Number(f"Σ |{between}| / Σ |{name}|, diagonal blocks", diagonal),
        ]
    return numbers


def _draw(
    title: str, setting: str, reference: _Named, pairs: Sequence[_Named], maximum: float
) -> Figure:
    """A row for each approximation: the matrix, the approximation, the absolute difference.

    `maximum` is white in all of them.
    """
    figure, axes = new_figure(title, setting, rows=len(pairs))
    for row, pair in zip(axes, pairs, strict=True):
        symbols = reference.symbol, pair.symbol, f"{reference.symbol}-{pair.symbol}"
        matrices = [reference.matrix, pair.matrix, reference.matrix - pair.matrix]
        draw_row(row, matrices, [f"$|{symbol}|$" for symbol in symbols], maximum, "absolute value")
        comparison = compare(reference.matrix, pair.matrix)
        row[2].set_xlabel(
            f"{100 * comparison.relative_absolute:.1f} % of the absolute values, "
            f"{100 * comparison.relative_frobenius:.1f} % of the Frobenius norm",
            fontsize=9,
        )
    return figure
