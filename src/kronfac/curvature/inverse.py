"""All units together: their curvature, and its approximate inverse [MG15 §4]: strategy → prepared → damped.

    strategy.prepare(curvature).damped(gamma).mv(gradient)

`prepare` computes what all candidates for γ share, `damped` the rest. A vector in parameter space is a
tuple with one matrix V (rows, columns) per unit. A gradient's V may also be an `OuterProduct`.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from kronfac.curvature.block import InverseCost, Moments, Operator, Summands
from kronfac.curvature.taps import Taps
from kronfac.errors import StateError
from kronfac.linalg import KroneckerProduct, OuterProduct
from kronfac.storage import Layout, Storable, check_shapes, tensors_in

Vectors = Sequence[Tensor | OuterProduct]


@dataclass(frozen=True)
class Link(Storable):
    """Second moments between a unit and the next one in a chain [MG15 §4.3]."""

    A_next: Tensor  # E[ā ā'ᵀ] (columns, columns')
    G_next: Tensor  # E[g g'ᵀ] (rows, rows')

    def check(self, *units: Layout) -> None:
        """Raise a StateError if it can't be between these two units."""
        this, other = units
        between = {"A_next": (this.columns, other.columns), "G_next": (this.rows, other.rows)}
        check_shapes(self, between, this)


@dataclass(frozen=True)
class Curvature(Storable):
    """Moving averages of the statistics of all units; immutable."""

    blocks: tuple[Moments, ...]
    links: tuple[Link | None, ...] = ()
    """Between each unit and the next; None if they are not neighbours in a chain. Empty without chains."""
    examples: float = math.inf
    """How many examples of equal weight would give as accurate an estimate."""

    def check(self, *units: Layout) -> None:
        """Raise a StateError if it can't be the curvature of these units."""
        if len(self.blocks) != len(units) or len(self.links) not in (0, len(units) - 1):
            raise StateError(
                f"The state's curvature must have a block for each of {len(units)} units, and links "
                f"between all of them or none; got {len(self.blocks)} blocks and {len(self.links)} "
                "links. Load it into the model that it was saved with."
            )
        for block, unit in zip(self.blocks, units, strict=True):
            block.check(unit)
        for link, *pair in zip(self.links, units, units[1:], strict=False):
            if link is not None:
                link.check(*pair)

    def of_units(self, numbers: Sequence[int]) -> "Curvature":
        """The curvature of some of the units, with the links between those that are neighbours."""
        links: tuple[Link | None, ...] = ()
        if self.links:
            links = tuple(
                self.links[n] if n + 1 == following else None for n, following in pairwise(numbers)
            )
        return replace(self, blocks=tuple(self.blocks[n] for n in numbers), links=links)

    def mean(self) -> float:
        """tr F̆ / dim F̆, of the size of a typical eigenvalue; 1 if that is 0 or not finite."""
        # One synchronisation for all units.
        trace = float(torch.stack([block.trace() for block in self.blocks]).sum())
        mean = trace / sum(block.size for block in self.blocks)
        return mean if 0 < mean < math.inf else 1.0

    def sampling_error(self) -> float:
        """The damping γ² that compensates for estimating A and G from only n examples.

        The inverse of an estimated second moment of d features is too large on average, by a factor of
        about 1 + d/n. Adding tr(A)/n to the eigenvalues of A, whose mean is tr(A)/d, compensates for that.
        The product of what is added to A and to G is

            tr(A) tr(G) / n²,

        averaged over all parameters whose block has such factors (`Moments.factor_traces`).
        """
        pairs = [(block.factor_traces(), block.size) for block in self.blocks]
        factored = [(traces * size, size) for traces, size in pairs if traces is not None]
        if not factored:
            return 0.0
        products, sizes = zip(*factored, strict=True)
        return float(torch.stack(products).sum()) / float(sum(sizes)) / self.examples**2


class ChainOperator(Storable, ABC):
    """The inverse of several neighbouring units together."""

    @property
    @abstractmethod
    def length(self) -> int:
        """The number of units."""

    @abstractmethod
    def of_unit(self, number: int) -> Operator:
        """An inverse of one unit by itself, to keep when only the others get a new inverse."""

    @abstractmethod
    def mv_chain(self, vectors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The product with the vectors of these units: new tensors."""


@dataclass(frozen=True)
class Failed(Storable):
    """Stands for an inverse that could not be computed."""

    message: str


Piece = Operator | ChainOperator | Failed


@dataclass(frozen=True)
class DampedInverse(Storable):
    """An approximate Fisher inverse, damped: symmetric, positive definite and ready to multiply."""

    pieces: tuple[Piece, ...]
    """One per unit, or one for several neighbouring units, in the order of the units."""

    def check(self, *units: Layout) -> None:
        """Raise a StateError if it can't be the inverse of these units' curvature."""
        for n, piece in enumerate(self.pieces):
            storable = isinstance(piece, Piece) and isinstance(piece, Storable)
            if isinstance(piece, Moments) or not storable:  # moments have a product too
                raise StateError(
                    f"The state's pieces[{n}] must be of type Operator or ChainOperator or Failed; got "
                    f"{type(piece).__name__}. Load an earlier state."
                )
        total = sum(map(length_of, self.pieces))
        if total != len(units):
            raise StateError(
                f"The state's inverse must be that of {len(units)} units; got {total}. Load it "
                "into the model that it was saved with."
            )
        for start, piece in self._numbered():
            assert isinstance(piece, Storable)
            piece.check(*units[start : start + length_of(piece)])

    def mv(self, vectors: Vectors) -> tuple[Tensor, ...]:
        """The product with a vector in parameter space: new tensors, which the caller may overwrite."""
        units = sum(map(length_of, self.pieces))
        if len(vectors) != units:
            raise ValueError(f"This inverse is of {units} units; got {len(vectors)} matrices.")
        products: list[Tensor] = []
        for piece in self.pieces:
            products += _multiply(piece, vectors[len(products) : len(products) + length_of(piece)])
        return tuple(products)

    @property
    def failures(self) -> list[tuple[int, str]]:
        """The number of every unit without an inverse, and the reason."""
        return [(n, piece.message) for n, piece in self._numbered() if isinstance(piece, Failed)]

    def repaired(self, pieces: Mapping[int, Piece]) -> "DampedInverse":
        """The inverse with pieces, by the unit's number, in place of those that failed."""
        found = [
            pieces.get(n, piece) if isinstance(piece, Failed) else piece
            for n, piece in self._numbered()
        ]
        return replace(self, pieces=tuple(found))

    def completed_by(self, old: "DampedInverse | None") -> "DampedInverse | None":
        """Replace failed pieces by those of an old inverse; None if an old piece failed too."""
        if not self.failures:
            return self
        if old is None:
            return None
        found = self.repaired({n: old.of_unit(n) for n, _ in self.failures})
        return None if found.failures else found

    def of_unit(self, number: int) -> Operator | Failed:
        """The inverse of one unit by itself; for a unit in a chain, see `ChainOperator.of_unit`."""
        for start, piece in self._numbered():
            if start <= number < start + length_of(piece):
                if isinstance(piece, ChainOperator):
                    return piece.of_unit(number - start)
                return piece
        raise IndexError("This inverse is of fewer units.")

    def _numbered(self) -> Iterator[tuple[int, Piece]]:
        """Each piece with the number of its first unit."""
        number = 0
        for piece in self.pieces:
            yield number, piece
            number += length_of(piece)


def length_of(piece: Piece) -> int:
    """The number of units in a piece."""
    return piece.length if isinstance(piece, ChainOperator) else 1


def usable(piece: Piece) -> bool:
    """Whether all numbers of an inverse are finite."""
    if isinstance(piece, Failed):
        return False
    finite = [t.isfinite().all() for t in tensors_in(piece)]
    return not finite or bool(torch.stack(finite).all())


def without_unusable(pieces: Sequence[Piece]) -> list[Piece]:
    """The pieces with `Failed` in place of unusable ones; a chain is replaced in all of its units."""
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
    if isinstance(piece, KroneckerProduct):  # the only operator that takes an outer product
        return [piece.mv(vectors[0])]
    dense = [V.to_dense() if isinstance(V, OuterProduct) else V for V in vectors]
    return piece.mv_chain(dense) if isinstance(piece, ChainOperator) else [piece.mv(dense[0])]


class PreparedInverse(Protocol):
    """What all candidates for γ share in one refresh."""

    def damped(self, gamma: float) -> DampedInverse:
        """The inverse with damping strength γ [MG15 §6.6]."""


class InverseUpdate(Summands, ABC):
    """An inverse that follows the statistics of one step, without a refresh."""

    @abstractmethod
    def add(self, taps: Sequence[Taps], weight: float) -> None:
        """Add the taps of all units in one backward pass; `weight` is the factor of squared gradients."""

    @abstractmethod
    def value(self) -> DampedInverse:
        """The inverse with everything that was added."""


class ApproximateInverse(ABC):
    """How the Fisher is approximated and inverted; immutable, holds settings only."""

    couples: ClassVar[bool] = False
    """Whether neighbours in a chain are inverted together, which needs their links."""

    def wants_factors(
        self, shapes: Sequence[tuple[int, int]], examples: int, weight_decay: float
    ) -> bool:
        """Whether it multiplies the gradient as outer products, for units of these shapes."""
        return False

    @property
    def for_trials(self) -> "ApproximateInverse":
        """A cheaper inverse for trial steps, if this one is expensive."""
        return self

    def between_refreshes(self, inverse: DampedInverse, decay: float) -> InverseUpdate | None:
        """How the inverse in use follows a step's statistics, with ε = `decay`; None if it does not."""
        return None

    def cost(self, moments: Moments) -> InverseCost:
        """The cost of the inverse of one unit by itself."""
        return moments.inverse_cost()

    def cost_between(self, this: tuple[int, int], following: tuple[int, int]) -> InverseCost:
        """The additional cost of a unit and the next one in a chain, of these shapes."""
        return InverseCost(0, 0.0, 0.0)

    @abstractmethod
    def prepare(self, curvature: Curvature) -> PreparedInverse:
        """Compute what all candidates for γ share."""
