"""Blocks without a usable inverse, each by itself: more damping, its last inverse, the plain gradient.

float64 and jitter have been tried before (`linalg/spd.py`). An inverse is usable if all of its numbers are
finite: a decomposition may fail without a word.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

import torch

from kronfac.curvature import ApproximateInverse, Curvature, DampedInverse
from kronfac.curvature.damping_by_unit import DampedByUnit
from kronfac.curvature.diagonal import DiagonalOperator
from kronfac.curvature.inverse import ChainOperator, Failed, Piece
from kronfac.errors import NonFiniteError, NotPositiveDefiniteError
from kronfac.network import Matrices, Unit
from kronfac.report import Event, EventKind
from kronfac.storage import tensors_in

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
    damped = _without_unusable(damped)
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
    return _with_pieces(damped, mended), [
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


def usable(piece: Piece) -> bool:
    """Whether all numbers of an inverse are finite."""
    if isinstance(piece, Failed):
        return False
    finite = [t.isfinite().all() for t in tensors_in(piece)]
    return not finite or bool(torch.stack(finite).all())


def _without_unusable(damped: DampedInverse) -> DampedInverse:
    """The inverse with `Failed` for units whose operator is unusable; a chain is divided at all of its."""
    pieces: list[Piece] = []
    for piece in damped.pieces:
        if isinstance(piece, Failed) or usable(piece):
            pieces.append(piece)
        else:
            length = piece.length if isinstance(piece, ChainOperator) else 1
            pieces += [Failed("its inverse is not finite")] * length
    unchanged = all(a is b for a, b in zip(pieces, damped.pieces, strict=False))
    return damped if unchanged else replace(damped, pieces=tuple(pieces))


def _more_damped(
    strategy: ApproximateInverse, curvature: Curvature, gamma: float, n: int
) -> Piece | None:
    if isinstance(strategy, DampedByUnit):
        strategy = replace(strategy, extra=(strategy.extra[n],))
    alone = Curvature((curvature.blocks[n],), (), curvature.examples)
    for factor in MORE_DAMPING:
        try:
            (piece,) = strategy.prepare(alone).damped(factor * gamma).pieces
        except (NonFiniteError, NotPositiveDefiniteError):
            continue
        if usable(piece):
            return piece
    return None


def _with_pieces(damped: DampedInverse, mended: dict[int, Piece]) -> DampedInverse:
    pieces, number = list(damped.pieces), 0
    for i, piece in enumerate(damped.pieces):
        pieces[i] = mended.get(number, piece) if isinstance(piece, Failed) else piece
        number += piece.length if isinstance(piece, ChainOperator) else 1
    return replace(damped, pieces=tuple(pieces))
