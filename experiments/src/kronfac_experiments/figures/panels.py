"""Matrices in grey beside each other, for figures 2, 3, 5 and 6."""

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.image import AxesImage

from kronfac_experiments.diagnostics import BlockMatrix, draw_absolute
from kronfac_experiments.figures.network import LABELS

INVERSE_QUANTILE = 0.92
"""White level of inverses: most of their entries are off the diagonal blocks, and are to be seen."""


def new_figure(title: str, setting: str, rows: int = 1) -> tuple[Figure, list[list[Axes]]]:
    """Three axes in a row, with a title and the setting below it."""
    figure = Figure(figsize=(13.0, 0.9 + 4.5 * rows), layout="constrained")
    figure.suptitle(f"{title}\n{setting}", fontsize=11)
    axes = figure.subplots(rows, 3, squeeze=False)
    return figure, [list(row) for row in axes]


def draw_row(
    axes: Sequence[Axes],
    matrices: Sequence[BlockMatrix],
    titles: Sequence[str],
    maximum: float,
    what: str,
) -> None:
    """Matrices side by side, black for 0 and white for `maximum` and above in each."""
    for ax, matrix, title in zip(axes, matrices, titles, strict=True):
        image = _draw(ax, matrix, title, maximum)
    figure = axes[0].get_figure()
    assert figure is not None
    bar = figure.colorbar(image, ax=list(axes), shrink=0.85, pad=0.01, aspect=25, extend="max")
    bar.set_label(what, fontsize=10)


def draw_one(axes: Axes, matrix: BlockMatrix, title: str, maximum: float, note: str) -> None:
    """A matrix with a scale of its own."""
    image = _draw(axes, matrix, title, maximum)
    axes.set_xlabel(note, fontsize=9)
    figure = axes.get_figure()
    assert figure is not None
    figure.colorbar(image, ax=axes, shrink=0.8, pad=0.02, extend="max")


def _draw(axes: Axes, matrix: BlockMatrix, title: str, maximum: float) -> AxesImage:
    image = draw_absolute(axes, matrix, maximum, LABELS)
    axes.set_title(title, fontsize=13)
    axes.tick_params(labelsize=9)
    for label in axes.get_yticklabels():
        label.set(rotation=90, verticalalignment="center")
    return image
