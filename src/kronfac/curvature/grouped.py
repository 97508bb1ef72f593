"""A Kronecker product per group of rows, for grouped convolutions: diag(A₁ ⊗ G₁, A₂ ⊗ G₂, …).

The rows of V (rows, columns) come in groups of r = rows / groups, each with inputs of its own; what couples
different groups is left out. Every group is factorised as `KroneckerBlock` does it with "expand": A_g is
the mean of ā āᵀ over all places of all examples, G_g the sum of g gᵀ over them.

Layouts: A (groups, columns, columns), G (groups, r, r).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kronfac.curvature.block import Block, Moments, Part, vectors_counted
from kronfac.curvature.taps import GroupedTap, SummedGradient, Taps
from kronfac.curvature.tikhonov import FactoredTikhonov, Tikhonov
from kronfac.errors import UnsupportedModelError
from kronfac.linalg import batched_inverse, kron
from kronfac.storage import Shapes, Storable


def _shapes(rows: int, columns: int) -> Shapes:
    return {"A": ("groups", columns, columns), "G": ("groups", "r", "r")}


def _to_dense(A: Tensor, G: Tensor) -> Tensor:
    """The matrix over vec(V), which stacks columns, of all groups."""
    groups, r, columns = len(G), G.shape[-1], A.shape[-1]
    rows = groups * r
    index = torch.arange(rows * columns, device=A.device).view(columns, groups, r)
    dense = A.new_zeros(rows * columns, rows * columns)
    for g in range(groups):
        at = index[:, g].reshape(-1)
        dense[at[:, None], at] = kron(A[g], G[g])
    return dense


@dataclass(frozen=True)
class GroupedKroneckerProduct(Storable):
    """V_g ↦ G_g V_g A_g for every group, for symmetric factors."""

    A: Tensor  # (groups, columns, columns)
    G: Tensor  # (groups, r, r)

    def shapes(self, rows: int, columns: int) -> Shapes:
        """Square matrices for every group."""
        return _shapes(rows, columns)

    def mv(self, V: Tensor) -> Tensor:
        """The product with V (rows, columns)."""
        grouped = V.reshape(len(self.G), -1, V.shape[1])
        return (self.G @ grouped @ self.A).reshape(V.shape)

    def to_dense(self) -> Tensor:
        """The matrix."""
        return _to_dense(self.A, self.G)


@dataclass(frozen=True)
class GroupedKroneckerMoments(Moments):
    """The factors of all groups."""

    symmetric: ClassVar[tuple[str, ...]] = ("A", "G")
    A: Tensor  # (groups, columns, columns)
    G: Tensor  # (groups, r, r)

    def shapes(self, rows: int, columns: int) -> Shapes:
        """Square matrices for every group."""
        return _shapes(rows, columns)

    def damped(self, gamma: float, tikhonov: Tikhonov) -> GroupedKroneckerProduct:
        """(A_g + π_g γI)⁻¹ ⊗ (G_g + γ/π_g I)⁻¹, each group with a π of its own.

        The factored form also stands for the exact one, which would need the eigenvectors of every group.
        """
        rule = tikhonov if isinstance(tikhonov, FactoredTikhonov) else FactoredTikhonov()
        shifts = [rule.shifts(A, G, gamma) for A, G in zip(self.A, self.G, strict=True)]
        A, G = (
            batched_inverse(M, torch.stack(each), name)
            for M, each, name in zip(
                (self.A, self.G), zip(*shifts, strict=True), ("A", "G"), strict=True
            )
        )
        return GroupedKroneckerProduct(A, G)

    def trace(self) -> Tensor:
        """Σ_g tr(A_g) tr(G_g)."""
        return self._traces().sum()

    def factor_traces(self) -> Tensor:
        """The mean of tr(A_g) tr(G_g) over the groups."""
        return self._traces().mean()

    def _traces(self) -> Tensor:
        A, G = (
            M.diagonal(dim1=-2, dim2=-1).sum(dim=-1, dtype=torch.float64) for M in (self.A, self.G)
        )
        return A * G

    def dense(self) -> Tensor:
        """The products on the diagonal."""
        return _to_dense(self.A, self.G)

    def probe(self) -> list[Tensor]:
        """The traces: if they are finite, so are the diagonals, which bound the rest."""
        return [M.diagonal(dim1=-2, dim2=-1).sum() for M in (self.A, self.G)]

    @property
    def size(self) -> int:
        """The number of parameters."""
        return len(self.G) * self.G.shape[-1] * self.A.shape[-1]


@dataclass(frozen=True)
class GroupedKroneckerBlock(Block):
    """A_g ⊗ G_g for every group of rows."""

    moments: ClassVar[type[Moments]] = GroupedKroneckerMoments

    def observe(self, taps: Taps, share: float, weight: float) -> GroupedKroneckerMoments:
        """The moments of one backward pass."""
        average = GroupedKroneckerAverage(None, 0.0)
        average.add(taps, True, share, weight)
        return average.value()

    def average(self, old: Moments | None, decay: float) -> "GroupedKroneckerAverage":
        """The moving average, in which inputs count once and gradients in every backward pass."""
        assert old is None or isinstance(old, GroupedKroneckerMoments)
        return GroupedKroneckerAverage(old, decay)


class GroupedKroneckerAverage:
    """ε · old + (1 − ε) · (mean over the inputs, weighted sum over the gradients)."""

    def __init__(self, old: GroupedKroneckerMoments | None, decay: float) -> None:
        self._old, self._decay = old, 0.0 if old is None else decay
        self._counted = 0.0
        self._each: float | None = None
        self._A: Tensor | None = None
        self._G: Tensor | None = None

    def add(self, taps: Taps, first: bool, share: float, weight: float) -> None:
        """Add what one backward pass shows."""
        assert not isinstance(taps, SummedGradient), "a Kronecker block needs the uses of its unit"
        uses = [tap for tap in taps if isinstance(tap, GroupedTap)]
        assert len(uses) == len(taps), "a grouped Kronecker block needs uses in groups"
        count = sum(tap.inputs.shape[1] * tap.inputs.shape[2] for tap in uses)
        if first and count:
            self._each = share / count if self._each is None else self._each
            self._counted += self._each * count
        for tap in uses:
            if first and self._each is not None:
                self._A = _add(self._A, tap.inputs, self._each)
            self._G = _add(self._G, tap.grads, weight)

    def value(self) -> GroupedKroneckerMoments:
        """The average with everything that was added."""
        if self._A is None or self._G is None:
            if self._old is None:
                raise UnsupportedModelError(
                    "A unit was not used by any of the examples that the statistics are taken on. Choose "
                    "a larger statistics_fraction, or freeze what the loss does not depend on."
                )
            return self._old
        A, G = self._A / self._counted, self._G
        if self._old is None or self._decay == 0:
            return GroupedKroneckerMoments(A, G)
        new = 1 - self._decay
        return GroupedKroneckerMoments(
            A.mul_(new).add_(self._old.A, alpha=self._decay),
            (G * new).add_(self._old.G, alpha=self._decay),
        )

    def count_by_vector(self) -> None:
        """Let every vector ā count 1."""
        if self._each and self._A is not None:
            self._A.div_(self._each)
            self._counted, self._each = vectors_counted(self._counted, self._each), 1.0

    def parts(self) -> list[Part]:
        """Both sums."""
        assert self._A is not None
        assert self._G is not None
        return [(self._A, True), (self._G, True)]

    def counts(self) -> list[float]:
        """The number of vectors."""
        return [vectors_counted(self._counted, self._each)]

    def recount(self, counts: Sequence[float]) -> None:
        """Take over the number on all ranks: every vector counts the same, on whichever it is."""
        (self._counted,) = counts


def _add(total: Tensor | None, x: Tensor, weight: float) -> Tensor:
    """total + weight · Σ x xᵀ of every group, for x (groups, examples, places, features)."""
    vectors = x.flatten(1, 2)
    if total is None:
        return (vectors.mT @ vectors).mul_(weight)
    return total.baddbmm_(vectors.mT, vectors, alpha=weight)
