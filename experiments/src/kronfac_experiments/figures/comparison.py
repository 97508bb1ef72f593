"""A matrix above and beside two approximations of it: what figures 5 and 6 have in common."""

from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.figure import Figure

from kronfac_experiments.diagnostics import BlockMatrix, compare
from kronfac_experiments.figures.files import Number
from kronfac_experiments.figures.panels import draw_row, new_figure


@dataclass(frozen=True)
class Pair:
    """An approximation."""

    name: str
    symbol: str
    """In TeX."""
    matrix: BlockMatrix


def numbers_of(name: str, reference: BlockMatrix, pairs: Sequence[Pair]) -> list[Number]:
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


def draw(
    title: str,
    setting: str,
    symbol: str,
    reference: BlockMatrix,
    pairs: Sequence[Pair],
    maximum: float,
) -> Figure:
    """A row for each approximation: the matrix, the approximation, the absolute difference.

    `maximum` is white in all of them.
    """
    figure, axes = new_figure(title, setting, rows=len(pairs))
    for row, pair in zip(axes, pairs, strict=True):
        draw_row(
            row,
            [reference, pair.matrix, reference - pair.matrix],
            [f"$|{symbol}|$", f"$|{pair.symbol}|$", f"$|{symbol}-{pair.symbol}|$"],
            maximum,
            "absolute value",
        )
        comparison = compare(reference, pair.matrix)
        row[2].set_xlabel(
            f"{100 * comparison.relative_absolute:.1f} % of the absolute values, "
            f"{100 * comparison.relative_frobenius:.1f} % of the Frobenius norm",
            fontsize=9,
        )
    return figure
