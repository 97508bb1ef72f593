"""Matrices in grey beside each other, for figures 2, 3, 5 and 6."""

from collections.abc import Sequence
from itertools import pairwise

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from torch import Tensor
from torch.nn.functional import adaptive_avg_pool2d

from kronfac_experiments.diagnostics import BlockMatrix
from kronfac_experiments.figures.network import LABELS

INVERSE_QUANTILE = 0.92
"""White level of inverses: most of their entries are off the diagonal blocks, and are to be seen."""

DASHES = "#56B4E9"
"""Okabe and Ito's sky blue, which shows on black and on white and is no grey."""
MAX_PIXELS = 1000
"""Longest side of a picture; larger matrices are averaged down, as the eye would do."""


def white_level(matrix: BlockMatrix, quantile: float = 0.97) -> float:
    """The absolute value that this share of the entries stays below.

    A few entries are much larger than all others; a scale up to the largest shows nothing but them.
    """
    values = matrix.dense.abs().flatten()
    return float(values.kthvalue(max(1, round(quantile * len(values)))).values)


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
    """|entries| from black for 0 to white for `maximum` and above, dashed lines between layers."""
    edges = matrix.edges
    image = axes.imshow(
        _pixels(matrix.dense.abs()).numpy(),
        cmap="gray",
        vmin=0.0,
        vmax=maximum,
        extent=(-0.5, edges[-1] - 0.5, edges[-1] - 0.5, -0.5),
    )
    for edge in edges[1:-1]:
        axes.axhline(edge - 0.5, color=DASHES, linestyle="--", linewidth=0.8)
        axes.axvline(edge - 0.5, color=DASHES, linestyle="--", linewidth=0.8)
    centres = [(start + end - 1) / 2 for start, end in pairwise(edges)]
    axes.set_xticks(centres, LABELS)
    axes.set_yticks(centres, LABELS, rotation=90, verticalalignment="center")
    axes.tick_params(length=0, labelsize=9)
    axes.set_title(title, fontsize=13)
    return image


def _pixels(values: Tensor) -> Tensor:
    """The matrix, or averages over squares of k × k entries if it has too many for a picture."""
    k = -(-len(values) // MAX_PIXELS)
    if k == 1:
        return values
    return adaptive_avg_pool2d(values[None, None], -(-len(values) // k))[0, 0]
