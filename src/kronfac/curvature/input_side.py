"""The input side alone: A ⊗ I, from what a unit was multiplied with, without a backward pass.

    V ↦ V (A + γ² I)⁻¹,   A = E[ā āᵀ],

for a unit with one Kronecker product, and V ↦ V for any other (Benzing 2022 derives it as gradient descent
on the outputs of neurons). A use of Vᵀ has its inputs on the side of the rows: V ↦ (G + γ² I)⁻¹ V.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from kronfac.curvature.block import Moments, Part, traces
from kronfac.curvature.fisher import Fisher, Outputs, Vector
from kronfac.curvature.kronecker import (
    FactorAverage,
    FactoredBlock,
    KroneckerBlock,
    KroneckerMoments,
)
from kronfac.curvature.taps import Rows, Taps
from kronfac.curvature.tikhonov import Tikhonov
from kronfac.linalg import KroneckerProduct, shifted_inverse
from kronfac.storage import Shapes


@dataclass(frozen=True, kw_only=True)
class NoTargets(Fisher):
    """No vectors at all: inputs are seen in the forward pass, and there is no backward pass."""

    def vectors(self, outputs: Sequence[Outputs]) -> Iterator[list[Vector]]:
        yield [None] * len(outputs)


@dataclass(frozen=True)
class InputMoments(Moments):
    """The second moments of ā, on the side where the inputs are; none for a unit that stays as it is."""

    symmetric: ClassVar[tuple[str, ...]] = ("A", "G")
    A: Tensor | None  # E[ā āᵀ], (columns, columns), or its diagonal
    G: Tensor | None  # the same of a use of Vᵀ, (rows, rows)
    rows: int
    columns: int

    def shapes(self, rows: int, columns: int) -> Shapes:
        """Square matrices, or their diagonals."""
        return {"A": [(columns, columns), (columns,)], "G": [(rows, rows), (rows,)]}

    def damped(self, gamma: float, tikhonov: Tikhonov) -> KroneckerProduct:
        """(A + γ²I)⁻¹ ⊗ I: with I on the other side there is one way to damp."""
        A, G = (
            None if M is None else shifted_inverse(M, M.new_tensor(gamma**2), name)
            for M, name in ((self.A, "A"), (self.G, "G"))
        )
        return KroneckerProduct(*self._sides(A, G))

    def _sides(self, A: Tensor | None, G: Tensor | None) -> tuple[Tensor, Tensor]:
        """Both sides, with the diagonal of I for one that is None."""
        like = next((M for M in (A, G) if M is not None), torch.ones(()))
        return (
            like.new_ones(self.columns) if A is None else A,
            like.new_ones(self.rows) if G is None else G,
        )

    def trace(self) -> Tensor:
        """tr(A) times the size of the other side."""
        A, G = map(traces, self._sides(self.A, self.G))
        return A * G

    def dense(self) -> Tensor:
        """A ⊗ I, or I ⊗ G."""
        return KroneckerMoments(*self._sides(self.A, self.G)).dense()

    @property
    def size(self) -> int:
        """The number of parameters."""
        return self.rows * self.columns


@dataclass(frozen=True)
class InputBlock(FactoredBlock):
    """A ⊗ I in the place of another block.

    Args:
        rows: of the unit.
        columns: of the unit.
        block: the Kronecker block whose A it is; None for a unit that stays as it is.
    """

    moments: ClassVar[type[Moments]] = InputMoments
    rows: int
    columns: int
    block: KroneckerBlock | None = None

    @property
    def diagonal_inputs(self) -> bool:
        """Whether A is kept as its diagonal."""
        return self.block is not None and self.block.diagonal_inputs

    @property
    def diagonal_grads(self) -> bool:
        """Whether G is."""
        return self.block is not None and self.block.diagonal_grads

    def vectors(self, taps: Taps) -> tuple[Sequence[Rows], Sequence[Tensor]]:
        """ā of all places, and no g."""
        assert self.block is not None
        return self.block.vectors(taps)[0], ()

    def average(self, old: Moments | None, decay: float) -> "InputAverage":
        """The moving average that begins with `old`."""
        return InputAverage(self, old, decay)


class InputAverage(FactorAverage):
    """ε · old + (1 − ε) · (mean of ā āᵀ), on the side where the inputs are.

    A unit that no example has used does not show which side that is.
    """

    def __init__(self, block: InputBlock, old: Any, decay: float) -> None:
        super().__init__(block, old, decay)
        self._shape, self._fixed = (block.rows, block.columns), block.block is None
        self._transposed = old is not None and old.G is not None

    def add(self, taps: Taps, each: float, weight: float) -> None:
        """Add the inputs of one pass."""
        if not self._fixed:
            super().add(taps, each, weight)
            self._find_side(self.counts())

    def value(self) -> InputMoments:
        """The average with everything that was added."""
        A, G = (
            side.value() if used and not self._fixed else None
            for side, used in zip(self.sides, (not self._transposed, self._transposed), strict=True)
        )
        return InputMoments(A, G, *self._shape)

    def weigh(self, totals: Sequence[float]) -> None:
        """Multiply the mean by its share; if this rank has not used the unit, its part is 0."""
        self._find_side(totals)
        if self._transposed and any(totals) and not self.sides[1].count:
            zeros = self.sides[0].sum.new_zeros(1, self._shape[0])
            self.sides[1].add(zeros, zeros, 0.0)
        super().weigh(totals)

    def parts(self) -> list[Part]:
        """The mean, unless the unit stays as it is."""
        return [] if self._fixed else [(self.sides[self._transposed].sum, True)]

    def _find_side(self, counts: Sequence[float]) -> None:
        if any(counts):
            self._transposed = counts[1] > counts[0]
