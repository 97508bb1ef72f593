"""Blocks without a usable inverse, each by itself: more damping, its last inverse, the plain gradient.

float64 and jitter have been tried before (`linalg/spd.py`). An inverse is usable if all of its numbers are
finite: a decomposition may fail without a word.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

import torch

from kronfac.curvature import ApproximateInverse, Curvature, DampedInverse
from kronfac.curvature.diagonal import DiagonalOperator
from kronfac.curvature.inverse import Piece, usable, without_unusable
from kronfac.errors import NonFiniteError, NotPositiveDefiniteError
from kronfac.model import Matrices, Unit
from kronfac.report import Event, EventKind

MORE_DAMPING = (10.0, 100.0)
"""Factors of γ that are tried, one after the other, for a block that has no inverse."""


def repair(
    damped: DampedInverse,
    strategy: ApproximateInverse,
    curvature: Curvature,
    gamma: float,
    old: DampedInverse | None,
    units: Sequence[Unit],
    gradient: Matrices,
) -> tuple[DampedInverse, list[Event]]:
    """The inverse with something usable in the place of every block that is not; and what that is."""
    pieces = without_unusable(damped.pieces)
    if any(a is not b for a, b in zip(pieces, damped.pieces, strict=False)):
        damped = replace(damped, pieces=tuple(pieces))
    if not damped.failures:
        return damped, []
    events: dict[EventKind, list[str]] = {}
    mended: dict[int, Piece] = {}
    for n, message in damped.failures:
        named = f"{units[n].name!r} ({message})"
        piece = _more_damped(strategy, curvature, gamma, n)
        kind = EventKind.BLOCK_DAMPED
        if piece is None:
            piece, kind = None if old is None else old.of_unit(n), EventKind.BLOCK_FAILED
        if piece is None or not usable(piece):
            piece, kind = plain(curvature, gamma, n, gradient), EventKind.BLOCK_PLAIN
        mended[n] = piece
        events.setdefault(kind, []).append(named)
    said = {
        EventKind.BLOCK_DAMPED: "more damping is used for",
        EventKind.BLOCK_FAILED: "the last good inverse is kept of",
        EventKind.BLOCK_PLAIN: "the plain gradient is used for",
    }
    return damped.repaired(mended), [
        Event(kind, f"γ = {gamma:.4g}: {said[kind]} {', '.join(names)}.")
        for kind, names in events.items()
    ]


def plain_inverse(curvature: Curvature, gamma: float, gradient: Matrices) -> DampedInverse:
    """The plain gradient for all blocks, if there is no memory for any inverse."""
    numbers = range(len(curvature.blocks))
    return DampedInverse(tuple(plain(curvature, gamma, n, gradient) for n in numbers))


def plain(curvature: Curvature, gamma: float, n: int, gradient: Matrices) -> DiagonalOperator:
    """I / (tr F / dim F + γ²): the gradient of one unit, as long as its mean curvature makes it."""
    block = curvature.blocks[n]
    mean = float(block.trace()) / block.size
    curved = (mean if 0 < mean < math.inf else 0.0) + gamma**2
    scale = 1 / curved if curved > 1 / torch.finfo(gradient[n].dtype).max else 1.0
    return DiagonalOperator(torch.full_like(gradient[n], scale))


def _more_damped(
    strategy: ApproximateInverse, curvature: Curvature, gamma: float, n: int
) -> Piece | None:
    alone = Curvature((curvature.blocks[n],), (), curvature.examples)
    for factor in MORE_DAMPING:
        try:
            (piece,) = strategy.prepare(alone).damped(factor * gamma).pieces
        except (NonFiniteError, NotPositiveDefiniteError):
            continue
        if usable(piece):
            return piece
    return None
