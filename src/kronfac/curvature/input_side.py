"""The input side alone: A ⊗ I, from what a unit was multiplied with, without a backward pass.

    V ↦ V (A + γ² I)⁻¹,   A = E[ā āᵀ],

for a unit with one Kronecker product, and V ↦ V for any other (Benzing 2022 derives it as gradient descent
on the outputs of neurons). A use of Vᵀ has its inputs on the side of the rows: V ↦ (A + γ² I)⁻¹ V.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kronfac.curvature.block import Block, Moments, Part, vectors_counted
from kronfac.curvature.fisher import Fisher, Outputs, Vector
from kronfac.curvature.kronecker import (
    KroneckerBlock,
    Product,
    direct_or_transposed,
)
from kronfac.curvature.taps import Taps
from kronfac.curvature.tikhonov import Tikhonov
from kronfac.linalg import shifted_inverse
from kronfac.linalg.kronecker import kron, multiply_left, multiply_right
from kronfac.storage import Shapes, Storable


@dataclass(frozen=True, kw_only=True)
class NoTargets(Fisher):
    """No vectors at all: inputs are seen in the forward pass, and there is no backward pass."""

    def vectors(self, outputs: Sequence[Outputs]) -> Iterator[list[Vector]]:
        yield [None] * len(outputs)


def _shapes(name: str, transposed: bool, rows: int, columns: int) -> Shapes:
    size = rows if transposed else columns
    return {name: [(size, size), (size,)]}


def _dense(M: Tensor | None, transposed: bool, rows: int, columns: int) -> Tensor:
    if M is None:
        return torch.eye(rows * columns)
    M = torch.diag(M) if M.dim() == 1 else M
    identity = torch.eye(columns if transposed else rows, dtype=M.dtype, device=M.device)
    return kron(identity, M) if transposed else kron(M, identity)


@dataclass(frozen=True)
class InputOperator(Storable):
    """V ↦ V M, or M V if it is Vᵀ that was multiplied; V itself without M."""

    M: Tensor | None  # (A + γ²I)⁻¹, or its diagonal
    rows: int
    columns: int
    transposed: bool = False

    def shapes(self, rows: int, columns: int) -> Shapes:
        """A square matrix, or its diagonal."""
        return _shapes("M", self.transposed, rows, columns)

    def mv(self, V: Tensor) -> Tensor:
        """The product."""
        if self.M is None:
            return V.clone()
        return multiply_left(self.M, V) if self.transposed else multiply_right(V, self.M)

    def to_dense(self) -> Tensor:
        """The matrix, for vec(V), which stacks columns."""
        return _dense(self.M, self.transposed, self.rows, self.columns)


@dataclass(frozen=True)
class InputMoments(Moments):
    """A; None for a unit that is left as it is."""

    A: Tensor | None  # E[ā āᵀ], (columns, columns), or its diagonal; by rows if transposed
    rows: int
    columns: int
    transposed: bool = False

    def shapes(self, rows: int, columns: int) -> Shapes:
        """A square matrix, or its diagonal."""
        return _shapes("A", self.transposed, rows, columns)

    def damped(self, gamma: float, tikhonov: Tikhonov) -> InputOperator:
        """(A + γ²I)⁻¹ ⊗ I: with I on the other side there is one way to damp."""
        M = None
        if self.A is not None:
            M = shifted_inverse(self.A, self.A.new_tensor(gamma**2), "A")
        return InputOperator(M, self.rows, self.columns, self.transposed)

    def trace(self) -> Tensor:
        """tr(A) times the size of the other side."""
        if self.A is None:
            return torch.tensor(float(self.size), dtype=torch.float64)
        diagonal = self.A if self.A.dim() == 1 else self.A.diagonal()
        return diagonal.sum(dtype=torch.float64) * (self.size / len(self.A))

    def dense(self) -> Tensor:
        """A ⊗ I, or I ⊗ A if it is Vᵀ that was multiplied."""
        return _dense(self.A, self.transposed, self.rows, self.columns)

    @property
    def size(self) -> int:
        """The number of parameters."""
        return self.rows * self.columns


@dataclass(frozen=True)
class InputBlock(Block):
    """A ⊗ I in the place of another block.

    Args:
        rows: of the unit.
        columns: of the unit.
        block: the Kronecker block whose A it is; None for a unit that is left as it is.
    """

    moments: ClassVar[type[Moments]] = InputMoments
    rows: int
    columns: int
    block: KroneckerBlock | None = None

    def observe(self, taps: Taps, share: float, weight: float) -> InputMoments:
        """The moments of one forward pass."""
        average = InputAverage(self, None, 0.0)
        average.add(taps, True, share, weight)
        return average.value()

    def average(self, old: Moments | None, decay: float) -> "InputAverage":
        """The moving average that begins with `old`."""
        assert old is None or isinstance(old, InputMoments)
        return InputAverage(self, old, decay)


class InputAverage:
    """ε · old + (1 − ε) · (mean of ā āᵀ over the vectors of all passes)."""

    def __init__(self, block: InputBlock, old: InputMoments | None, decay: float) -> None:
        self._block, self._old, self._decay = block, old, decay
        self._transposed = False if old is None else old.transposed
        self._product: Product | None = None
        self._each: float | None = None
        self._counted = 0.0

    def add(self, taps: Taps, first: bool, share: float, weight: float) -> None:
        """Add what one pass shows."""
        kronecker = self._block.block
        uses = [] if kronecker is None or not first else direct_or_transposed(taps)
        if kronecker is None or not uses:
            return
        a, _ = kronecker.rows(uses)
        count = sum(map(len, a))
        if not count:
            return
        if self._product is None:
            self._product = self._begin(kronecker, uses[0].transposed)
        # Every vector counts the same, however many places the examples of a pass have.
        self._each = share / count if self._each is None else self._each
        self._counted += self._each * count
        for x in a:
            self._product.add(x, x, self._each)

    def _begin(self, kronecker: KroneckerBlock, transposed: bool) -> Product:
        old = self._old
        # A unit that no example had used yet did not show on which side its inputs are.
        A = old.A if old is not None and old.transposed == transposed else None
        self._transposed = transposed
        diagonal = kronecker.diagonal_grads if transposed else kronecker.diagonal_inputs
        return Product(A, self._decay, diagonal)

    def value(self) -> InputMoments:
        """The average with everything that was added."""
        A = None if self._old is None else self._old.A
        if self._block.block is None:
            A = None
        elif self._product is not None:
            A = self._product.value(self._counted)
        return InputMoments(A, self._block.rows, self._block.columns, self._transposed)

    def count_by_vector(self) -> None:
        """Let every vector ā count 1."""
        if self._each:
            assert self._product is not None
            self._product.sum.div_(self._each)
            self._counted, self._each = vectors_counted(self._counted, self._each), 1.0

    def parts(self) -> list[Part]:
        """The sum, unless the unit is left as it is."""
        return [] if self._product is None else [(self._product.sum, True)]

    def counts(self) -> list[float]:
        """The number of vectors, by the direction in which the unit is used."""
        count = vectors_counted(self._counted, self._each)
        return [0.0, count] if self._transposed else [count, 0.0]

    def recount(self, counts: Sequence[float]) -> None:
        """Take over the numbers on all ranks, and the direction if this one has not used the unit."""
        direct, transposed = counts
        self._counted = max(counts)
        kronecker = self._block.block
        if (transposed > direct) != self._transposed and kronecker is not None:
            assert self._product is not None
            old, self._product = self._product, self._begin(kronecker, transposed > direct)
            size = self._block.rows if self._transposed else self._block.columns
            shape = (size,) if self._product.diagonal else (size, size)
            self._product.begin(old.sum.new_zeros(shape))
