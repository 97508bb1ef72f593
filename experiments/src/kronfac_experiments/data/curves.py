"""CURVES: images of parabolas, the synthetic data set of an autoencoder problem of [MG15 §13].

The original file is not to be had, so the set is generated; what is known of the original comes
out close. Original and generated (30,000 cases, seed 0): total pixel variance 16.89 and 16.74,
cross-entropy of the mean image 124.5 and 126.1, pixel-entropy floor 53.5 and 53.1, squared error
of 18 principal components 5.90 and 5.87.

Images are (cases, 784), float32 in [0, 1], 28 rows of 28 pixels.
"""

import torch
from torch import Tensor

SIDE = 28
LOWEST, HIGHEST = 4.0, 24.0  # the box of the three points that define a curve, in pixels
GAP = 1.67  # between the x of neighbouring points
DOTS = 60
PIECES = 256  # of the polygon that measures a curve's length
SIDE_WEIGHT = 0.262  # of the blur, relative to its centre
INK = 0.654
CHUNK = 2000  # cases at a time: about 50 MB of work space


def curves(cases: int = 30_000, seed: int = 0) -> Tensor:
    """Images of `cases` random curves y(x), parabolas through three random points.

    A curve is `DOTS` dots of ink at equal distances along it, blurred twice. Where a parabola
    swings out of the image its ink is lost. The first n images of a seed do not depend on
    `cases` as long as both are multiples of `CHUNK`.
    """
    generator = torch.Generator().manual_seed(seed)
    chunks = torch.arange(cases).split(CHUNK)
    return torch.cat([_draw(*_points(len(chunk), generator)) for chunk in chunks])


def _points(cases: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """x and y of the three points, (cases, 3) each: uniform in the box, given the gaps in x."""
    # Sorted uniform numbers plus fixed gaps are uniform over all triples with such gaps.
    free = HIGHEST - LOWEST - 2 * GAP
    x = torch.rand(cases, 3, generator=generator).sort(dim=1).values * free
    x = LOWEST + x + GAP * torch.arange(3)
    y = LOWEST + (HIGHEST - LOWEST) * torch.rand(cases, 3, generator=generator)
    return x, y


def _parabola(x: Tensor, y: Tensor, at: Tensor) -> Tensor:
    """The parabola through the three points, in Lagrange's form, `at` x: (cases, n)."""
    x0, x1, x2 = x.split(1, dim=1)
    y0, y1, y2 = y.split(1, dim=1)
    values: Tensor = (
        y0 * (at - x1) * (at - x2) / ((x0 - x1) * (x0 - x2))
        + y1 * (at - x0) * (at - x2) / ((x1 - x0) * (x1 - x2))
        + y2 * (at - x0) * (at - x1) / ((x2 - x0) * (x2 - x1))
    )
    return values


def _dots(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Points at equal distances along each curve, ends included: x and y, (cases, DOTS) each."""
    xs = x[:, :1] + (x[:, 2:] - x[:, :1]) * torch.linspace(0, 1, PIECES + 1)
    pieces = torch.hypot(xs.diff(dim=1), _parabola(x, y, xs).diff(dim=1))  # (cases, PIECES)
    length = torch.cat([torch.zeros(len(x), 1), pieces.cumsum(dim=1)], dim=1)
    wanted = length[:, -1:] * torch.linspace(0, 1, DOTS)  # (cases, DOTS)
    piece = (torch.searchsorted(length, wanted) - 1).clamp(0, PIECES - 1)
    part = (wanted - length.gather(1, piece)) / pieces.gather(1, piece)
    dot_x = torch.lerp(xs.gather(1, piece), xs.gather(1, piece + 1), part)
    return dot_x, _parabola(x, y, dot_x)


def _draw(x: Tensor, y: Tensor) -> Tensor:
    """The images of the curves through the points, (cases, 784)."""
    dot_x, dot_y = _dots(x, y)
    ink = torch.zeros(len(x), SIDE * SIDE)
    for column in (dot_x.floor(), dot_x.floor() + 1):
        for row in (dot_y.floor(), dot_y.floor() + 1):
            weight = (1 - (dot_x - column).abs()) * (1 - (dot_y - row).abs())
            inside = (row >= 0) & (row < SIDE)  # x never leaves the box
            pixel = row.clamp(0, SIDE - 1) * SIDE + column
            ink.scatter_add_(1, pixel.long(), weight * inside)
    blur = _blur()
    return (INK * (blur @ ink.view(-1, SIDE, SIDE) @ blur)).clamp(max=1.0).flatten(1)


def _blur() -> Tensor:
    """Two blurs by (side, 1, side) / (1 + 2 side) along an axis, as a symmetric (28, 28) matrix."""
    neighbours = torch.ones(SIDE - 1)
    once = torch.eye(SIDE) + SIDE_WEIGHT * (neighbours.diag(1) + neighbours.diag(-1))
    once = once / (1 + 2 * SIDE_WEIGHT)
    return once @ once
