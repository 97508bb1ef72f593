"""A Kronecker product per group of rows, for grouped convolutions: diag(A₁ ⊗ G₁, A₂ ⊗ G₂, …).

The rows of V (rows, columns) form groups of r = rows / groups, each with its own inputs. The curvature
between groups is left out. Every group is factorised as in `KroneckerBlock` with "expand": A_g is the mean
of ā āᵀ over all places of all examples, G_g the sum of g gᵀ over them.

Layouts: A (groups, columns, columns), G (groups, r, r).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kronfac.curvature.block import FactoredMoments, Moments, traces
from kronfac.curvature.kronecker import FactoredBlock, uses_of
from kronfac.curvature.taps import GroupedTap, Rows, Taps
from kronfac.curvature.tikhonov import FactoredTikhonov, Tikhonov
from kronfac.linalg import kron
from kronfac.storage import Shapes, Storable


@dataclass(frozen=True)
class GroupedKroneckerProduct(Storable):
    """V_g ↦ G_g V_g A_g for every group, for symmetric factors."""

    A: Tensor  # (groups, columns, columns)
    G: Tensor  # (groups, r, r)

    def shapes(self, rows: int, columns: int) -> Shapes:
        return {"A": ("groups", columns, columns), "G": ("groups", "r", "r")}

    def mv(self, V: Tensor) -> Tensor:
        grouped = V.reshape(len(self.G), -1, V.shape[1])
        return (self.G @ grouped @ self.A).reshape(V.shape)

    def to_dense(self) -> Tensor:
        """The products on the diagonal, over vec(V), which stacks columns."""
        groups, r, columns = len(self.G), self.G.shape[-1], self.A.shape[-1]
        rows = groups * r
        index = torch.arange(rows * columns, device=self.A.device).view(columns, groups, r)
        dense = self.A.new_zeros(rows * columns, rows * columns)
        for g in range(groups):
            at = index[:, g].reshape(-1)
            dense[at[:, None], at] = kron(self.A[g], self.G[g])
        return dense


@dataclass(frozen=True)
class GroupedKroneckerMoments(GroupedKroneckerProduct, FactoredMoments):
    """The factors of all groups."""

    symmetric: ClassVar[tuple[str, ...]] = ("A", "G")

    def shifted(self, gamma: float, tikhonov: Tikhonov) -> list[tuple[Tensor, Tensor, str]]:
        """(A_g + π_g γI) and (G_g + γ/π_g I), each group with a π of its own.

        The factored form also replaces the exact one, which would need the eigenvectors of every group.
        """
        rule = tikhonov if isinstance(tikhonov, FactoredTikhonov) else FactoredTikhonov()
        shifts = [rule.shifts(A, G, gamma) for A, G in zip(self.A, self.G, strict=True)]
        sides = zip("AG", (self.A, self.G), zip(*shifts, strict=True), strict=True)
        return [
            (M, shift, f"{side}[{g}]")
            for side, matrices, own in sides
            for g, (M, shift) in enumerate(zip(matrices, own, strict=True))
        ]

    def assembled(self, inverses: Sequence[Tensor]) -> GroupedKroneckerProduct:
        groups = len(self.G)
        return GroupedKroneckerProduct(
            torch.stack([*inverses[:groups]]), torch.stack([*inverses[groups:]])
        )

    def trace(self) -> Tensor:
        """Σ_g tr(A_g) tr(G_g)."""
        return (traces(self.A) * traces(self.G)).sum()

    def factor_traces(self) -> Tensor:
        """The mean of tr(A_g) tr(G_g) over the groups."""
        return (traces(self.A) * traces(self.G)).mean()

    dense = GroupedKroneckerProduct.to_dense

    @property
    def size(self) -> int:
        return len(self.G) * self.G.shape[-1] * self.A.shape[-1]


@dataclass(frozen=True)
class GroupedKroneckerBlock(FactoredBlock):
    """A_g ⊗ G_g for every group of rows."""

    moments: ClassVar[type[Moments]] = GroupedKroneckerMoments

    def vectors(self, taps: Taps) -> tuple[list[Rows], list[Tensor]]:
        """ā and g of all places of all examples, (groups, vectors, features), by use."""
        every = uses_of(taps)
        uses = [tap for tap in every if isinstance(tap, GroupedTap)]
        assert len(uses) == len(every), "a grouped Kronecker block needs uses in groups"
        return [tap.inputs.flatten(1, 2) for tap in uses], [tap.grads.flatten(1, 2) for tap in uses]
