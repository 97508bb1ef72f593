"""Inverses whose damping differs from unit to unit: γᵢ² = γ² + eᵢ, where eᵢ is the unit's own part.

A unit whose weight decays by more than others has so much more curvature. Units with the same e are
prepared and damped together; a chain is divided between units whose e differs.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from kronfac.curvature.curvature import Curvature
from kronfac.curvature.inverse import (
    ApproximateInverse,
    DampedInverse,
    Piece,
    PreparedInverse,
    length_of,
)


@dataclass(frozen=True)
class DampedByUnit(ApproximateInverse):
    """Another inverse, with γᵢ² = γ² + eᵢ for each unit."""

    inverse: ApproximateInverse
    extra: tuple[float, ...]
    """eᵢ, not negative, in the order of the units."""

    @property
    def for_trials(self) -> ApproximateInverse:
        return replace(self, inverse=self.inverse.for_trials)

    def of_units(self, numbers: Sequence[int]) -> ApproximateInverse:
        return replace(self, extra=tuple(self.extra[n] for n in numbers))

    def prepare(self, curvature: Curvature) -> "_Prepared":
        parts = []
        for extra in sorted(set(self.extra)):
            numbers = [n for n, e in enumerate(self.extra) if e == extra]
            parts.append((extra, numbers, self.inverse.prepare(curvature.of_units(numbers))))
        return _Prepared(parts)


@dataclass(frozen=True)
class _Prepared:
    parts: Sequence[tuple[float, Sequence[int], PreparedInverse]]
    """e, the numbers of the units that have it, and what is prepared of them."""

    def damped(self, gamma: float) -> DampedInverse:
        pieces: dict[int, Piece] = {}
        for extra, numbers, prepared in self.parts:
            place = 0
            for piece in prepared.damped((gamma**2 + extra) ** 0.5).pieces:
                pieces[numbers[place]] = piece
                place += length_of(piece)
        return DampedInverse(tuple(pieces[n] for n in sorted(pieces)))
