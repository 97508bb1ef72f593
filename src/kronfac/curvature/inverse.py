"""From moments to something that multiplies a vector: strategy → prepared → damped.

    strategy.prepare(curvature).damped(gamma).mv(gradient)

`prepare` does what every candidate γ shares, `damped` the rest. A vector in parameter space is a tuple with
one matrix V (rows, columns) per unit; of a gradient, V may be given as an outer product.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from kronfac.curvature.block import InverseCost, Moments, Operator, Part
from kronfac.curvature.moments import Curvature
from kronfac.curvature.taps import Taps
from kronfac.curvature.tikhonov import FactoredTikhonov
from kronfac.errors import StateError
from kronfac.linalg import Failure, KroneckerProduct, OuterProduct
from kronfac.storage import Layout, Storable, tensors_in

Vectors = Sequence[Tensor | OuterProduct]


class ChainOperator(Storable, ABC):
    """The inverse of several neighbouring units together."""

    @property
    @abstractmethod
    def length(self) -> int:
        """The number of units."""

    @abstractmethod
    def of_unit(self, number: int) -> Operator:
        """An inverse of one of them by itself, for when the others have a new one and it has not."""

    @abstractmethod
    def mv_chain(self, vectors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The product with the vectors of these units: new tensors."""


@dataclass(frozen=True)
class Failed(Storable):
    """Stands for the inverse of a unit that has none."""

    message: str


Piece = Operator | ChainOperator | Failed


@dataclass(frozen=True)
class DampedInverse(Storable):
    """An approximate Fisher inverse, damped: symmetric, positive definite and ready to multiply."""

    pieces: tuple[Piece, ...]
    """One per unit, or one for several neighbouring units, in the order of the units."""

    def check(self, *units: Layout) -> None:
        """Raise a StateError if it can't be the inverse of these units' curvature."""
        lengths = [length_of(piece) for piece in self.pieces]
        if sum(lengths) != len(units):
            raise StateError(
                f"The state's inverse must be that of {len(units)} units; got {sum(lengths)}. Load it "
                "into the model that it was saved with."
            )
        start = 0
        for piece, length in zip(self.pieces, lengths, strict=True):
            assert isinstance(piece, Storable)
            piece.check(*units[start : start + length])
            start += length

    def mv(self, vectors: Vectors) -> tuple[Tensor, ...]:
        """The product with a vector in parameter space: new tensors, which the caller may overwrite."""
        units = sum(map(length_of, self.pieces))
        if len(vectors) != units:
            raise ValueError(f"This inverse is of {units} units; got {len(vectors)} matrices.")
        products: list[Tensor] = []
        for piece in self.pieces:
            products += _multiply(piece, vectors[len(products) : len(products) + length_of(piece)])
        return tuple(products)

    def mended(self, pieces: Mapping[int, Piece]) -> "DampedInverse":
        """The same with other pieces in the place of those that have failed, by the number of the unit."""
        found, number = list(self.pieces), 0
        for i, piece in enumerate(self.pieces):
            if isinstance(piece, Failed):
                found[i] = pieces.get(number, piece)
            number += length_of(piece)
        return replace(self, pieces=tuple(found))

    @property
    def failures(self) -> list[tuple[int, str]]:
        """The numbers of the units that have no inverse, and why."""
        number, found = 0, []
        for piece in self.pieces:
            if isinstance(piece, Failed):
                found.append((number, piece.message))
            number += length_of(piece)
        return found

    def completed_by(self, old: "DampedInverse | None") -> "DampedInverse | None":
        """The same with the old inverse of every unit that has no new one; None if that has none either."""
        if not self.failures:
            return self
        if old is None:
            return None
        pieces, number = list(self.pieces), 0
        for i, piece in enumerate(self.pieces):
            if isinstance(piece, Failed):
                pieces[i] = old.of_unit(number)
            number += length_of(piece)
        return (
            None
            if any(isinstance(p, Failed) for p in pieces)
            else replace(self, pieces=tuple(pieces))
        )

    def of_unit(self, number: int) -> Operator | Failed:
        """The inverse of one unit by itself; of one in a chain, what it is without its neighbours."""
        for piece in self.pieces:
            if number < length_of(piece):
                if isinstance(piece, ChainOperator):
                    return piece.of_unit(number)
                return piece
            number -= length_of(piece)
        raise IndexError("This inverse is of fewer units.")


def length_of(piece: Piece) -> int:
    """The number of units that a piece is of."""
    return piece.length if isinstance(piece, ChainOperator) else 1


def usable(piece: Piece) -> bool:
    """Whether all numbers of an inverse are finite."""
    if isinstance(piece, Failed):
        return False
    finite = [t.isfinite().all() for t in tensors_in(piece)]
    return not finite or bool(torch.stack(finite).all())


def without_unusable(pieces: Sequence[Piece]) -> list[Piece]:
    """The pieces with `Failed` for units whose operator is unusable; a chain is divided at all of its."""
    found: list[Piece] = []
    for piece in pieces:
        if isinstance(piece, Failed) or usable(piece):
            found.append(piece)
        else:
            found += [Failed("its inverse is not finite")] * length_of(piece)
    return found


def _multiply(piece: Piece, vectors: Vectors) -> Sequence[Tensor]:
    """The products with the vectors of a piece's units."""
    assert not isinstance(piece, Failed)
    if isinstance(piece, KroneckerProduct):  # which alone has a use for the factors
        return [piece.mv(vectors[0])]
    dense = [V.to_dense() if isinstance(V, OuterProduct) else V for V in vectors]
    return piece.mv_chain(dense) if isinstance(piece, ChainOperator) else [piece.mv(dense[0])]


class PreparedInverse(Protocol):
    """What is shared by all γ at one refresh."""

    def damped(self, gamma: float) -> DampedInverse:
        """The inverse with damping strength γ [MG15 §6.6]."""
        ...


class InverseUpdate(Protocol):
    """An inverse that takes in the statistics of one step without a refresh."""

    def add(self, taps: Sequence[Taps], weight: float) -> None:
        """Add what one backward pass shows of all units; `weight` is what squares of gradients count."""
        ...

    def parts(self) -> list[Part]:
        """What was added so far, to be summed over ranks; then it counts as added."""
        ...

    def value(self) -> DampedInverse:
        """The inverse with everything that was added."""
        ...


class ApproximateInverse(ABC):
    """How the Fisher is approximated and inverted; immutable, holds settings only."""

    couples: ClassVar[bool] = False
    """Whether neighbours in a chain are inverted together, which needs their links."""

    def wants_factors(
        self, shapes: Sequence[tuple[int, int]], examples: int, weight_decay: float
    ) -> bool:
        """Whether it has a use for the gradient as outer products, for units of these shapes."""
        return False

    @property
    def for_trials(self) -> "ApproximateInverse":
        """An inverse much like this one, for trial steps, if this one is expensive."""
        return self

    def of_units(self, numbers: Sequence[int]) -> "ApproximateInverse":
        """The same for some of the units."""
        return self

    def between_refreshes(self, inverse: DampedInverse, decay: float) -> InverseUpdate | None:
        """How the inverse in use follows a step's statistics, with ε = `decay`; None if it does not."""
        return None

    def cost(self, moments: Moments) -> InverseCost:
        """What the inverse of one unit by itself takes."""
        return moments.inverse_cost(getattr(self, "tikhonov", FactoredTikhonov()))

    def cost_between(self, this: tuple[int, int], following: tuple[int, int]) -> InverseCost:
        """What it takes besides for a unit and the next one in a chain, of these shapes."""
        return InverseCost(0, 0.0, 0.0)

    @abstractmethod
    def prepare(self, curvature: Curvature) -> PreparedInverse:
        """What every γ shares."""


def failed(failure: Failure | str) -> Failed:
    """The place of an inverse that could not be computed."""
    return Failed(str(failure))
