"""Fewer points for a curve that looks the same."""

from itertools import pairwise

import numpy as np
from numpy.typing import NDArray


def thin(values: NDArray[np.float64], points: int) -> NDArray[np.intp]:
    """Indices, increasing, of at most `points` of the values, whose curve keeps the shape.

    The rows are cut into intervals and the lowest and the highest of each stay, so that no spike is
    lost; so do the first and the last. Half of the intervals are of equal length and half of equal
    ratio: the curve stays good with a linear and with a logarithmic axis below it.

    Args:
        values: (rows,), finite.
        points: At least 4.
    """
    rows = len(values)
    if rows <= points:
        return np.arange(rows)
    # Of each kind; every interval gives two, but the first, which is row 0 alone.
    cuts = max(1, (points - 2) // 4)
    edges = np.unique(
        np.concatenate(
            [
                np.linspace(0, rows, cuts + 1).astype(np.intp),
                np.rint(np.geomspace(1, rows, cuts + 1)).astype(np.intp),
            ]
        )
    )
    kept = {0, rows - 1}
    for start, end in pairwise(edges):
        kept |= {start + int(values[start:end].argmin()), start + int(values[start:end].argmax())}
    return np.array(sorted(kept), dtype=np.intp)
