"""Pictures of block matrices: absolute values in grey, dashed lines between layers [MG15 figure 2].

They draw into axes that they are given; matplotlib is imported by whoever made those.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

from torch import Tensor
from torch.nn.functional import adaptive_avg_pool2d

from kronfac_experiments.diagnostics.block_matrix import BlockMatrix

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.image import AxesImage

DASHES = "#56B4E9"
"""Okabe and Ito's sky blue, which shows on black and on white and is no grey."""


MAX_PIXELS = 1000
"""Longest side of a picture; larger matrices are averaged down, as the eye would do."""


def white_level(matrix: BlockMatrix, quantile: float = 0.97) -> float:
    """The absolute value that this share of the entries stays below: a maximum for `draw_absolute`.

    A few entries are much larger than all others; a scale up to the largest shows nothing but them.
    """
    if not 0 < quantile <= 1:
        raise ValueError(f"quantile lies in (0, 1]; got {quantile}.")
    values = matrix.dense.abs().flatten()
    return float(values.kthvalue(max(1, round(quantile * len(values)))).values)


def draw_absolute(
    axes: "Axes",
    matrix: BlockMatrix,
    maximum: float | None = None,
    labels: Sequence[str] | None = None,
) -> "AxesImage":
    """|entries| from black for 0 to white for `maximum` and above, dashed lines between layers.

    Args:
        axes: of matplotlib.
        matrix: what to draw.
        maximum: the value that is white; None for `white_level(matrix)`.
        labels: of the layers; None for their names.

    Returns:
        The image, for a colour bar.
    """
    edges = matrix.edges
    image = axes.imshow(
        _pixels(matrix.dense.abs()).cpu().numpy(),
        cmap="gray",
        vmin=0.0,
        vmax=white_level(matrix) if maximum is None else maximum,
        extent=(-0.5, edges[-1] - 0.5, edges[-1] - 0.5, -0.5),
    )
    for edge in edges[1:-1]:
        axes.axhline(edge - 0.5, color=DASHES, linestyle="--", linewidth=0.8)
        axes.axvline(edge - 0.5, color=DASHES, linestyle="--", linewidth=0.8)
    centres = [(start + end - 1) / 2 for start, end in pairwise(edges)]
    axes.set_xticks(centres, labels or matrix.names)
    axes.set_yticks(centres, labels or matrix.names)
    axes.tick_params(length=0)
    return image


def _pixels(values: Tensor) -> Tensor:
    """The matrix, or averages over squares of k × k entries if it has too many for a picture."""
    k = -(-len(values) // MAX_PIXELS)
    if k == 1:
        return values
    return adaptive_avg_pool2d(values[None, None], -(-len(values) // k))[0, 0]
