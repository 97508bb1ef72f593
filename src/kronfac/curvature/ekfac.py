"""EKFAC: the eigenbasis of A ⊗ G, with eigenvalues of its own (George et al. 2018).

The eigenbasis E = E_A ⊗ E_G is kept from one refresh to the next. In it, the diagonal of a unit's Fisher
block F is estimated,

    S = Σ_examples weight · (E_Gᵀ (Σ_places g āᵀ) E_A)²,   (rows, columns), squared element by element,

in every step that takes statistics, and the direction of that step uses it already:

    V ↦ E_G [(E_Gᵀ V E_A) ⊘ (S + D)] E_Aᵀ.

Among the matrices that E diagonalises, E diag(S) Eᵀ is the nearest to F in the Frobenius norm. A ⊗ G is one
of them, so that it is never nearer.

**Damping.** D is what the damping adds to the eigenvalues of A ⊗ G: γ² in the exact form, and

    (s_G + γ/π)(s_A + πγ)ᵀ − s_G s_Aᵀ = πγ s_G 1ᵀ + γ/π 1 s_Aᵀ + γ²

in the factored form [MG15 §6.3]. Its terms with s_G and s_A damp directions that are large on one side and
small on the other, which γ² alone leaves as they are.

**A new basis** knows nothing of S yet. It starts with the eigenvalues of A ⊗ G, S₀ = s_G s_Aᵀ, which count
as much as the statistics of one step: after n steps S is the mean of S₀ and n estimates. Once that would
remember more than the other statistics do, with their decay ε, S is a moving average as they are:

    S ← ε′ S + (1 − ε′) · new,   ε′ = min(1 − 1/(n + 2), ε).

Why no more weight on S₀: from m examples S has a relative error of about √(8/m), 0.18 for 250 of them (the
product of two independent Gaussians has a kurtosis of 9). S₀ has the error of the factorisation, which no
number of examples makes smaller. Why not S of the old basis, as P_G S P_Aᵀ with P = (E_newᵀ E_old)²: it
mixes eigenvalues that are decades apart. A rotation by 0.1 puts a hundredth of the largest in the place of
the smallest.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from kronfac.curvature.block import InverseCost, Moments, Part
from kronfac.curvature.block_diagonal import PreparedBlocks, cost_in_eigenbasis
from kronfac.curvature.inverse import ApproximateInverse, Curvature, DampedInverse
from kronfac.curvature.taps import AnyTap, SummedGradient, Tap, Taps, gradients_of_examples
from kronfac.curvature.tikhonov import FactoredTikhonov, Tikhonov
from kronfac.linalg import InverseInEigenbasis, rotate


@dataclass(frozen=True)
class EigenvalueCorrectedInverse(ApproximateInverse):
    """The Fisher as if units were independent, each block diagonal in the eigenbasis of its A ⊗ G.

    A refresh makes new bases; the diagonal is estimated in every step. Units whose block is not
    Kronecker-factored have their own inverses.

    Args:
        tikhonov: how the damping enters, see above.
    """

    tikhonov: Tikhonov = field(default_factory=FactoredTikhonov)

    def prepare(self, curvature: Curvature) -> PreparedBlocks:
        return PreparedBlocks(curvature.blocks, self.tikhonov, in_eigenbases=True)

    def cost(self, moments: Moments) -> InverseCost:
        return cost_in_eigenbasis(moments)

    def between_refreshes(self, inverse: DampedInverse, decay: float) -> "EigenvalueUpdate":
        return EigenvalueUpdate(inverse, decay)


class EigenvalueUpdate:
    """An inverse whose S takes in the statistics of one step; the old one is only read."""

    def __init__(self, inverse: DampedInverse, decay: float) -> None:
        self._inverse = inverse
        self._averages = [
            _Average(piece, decay) if isinstance(piece, InverseInEigenbasis) else None
            for piece in inverse.pieces
        ]

    def add(self, taps: Sequence[Taps], weight: float) -> None:
        """Add the taps of all units in one backward pass; `weight` is the factor of squared gradients."""
        for average, unit in zip(self._averages, taps, strict=True):
            # Without uses there are no gradients of examples; the next refresh has another block.
            if average is not None and not isinstance(unit, SummedGradient) and len(unit):
                average.add(unit, weight)

    def parts(self) -> list[Part]:
        """The new sums of all units, zeros for one that was not used here."""
        return [(average.new(), False) for average in self._averages if average is not None]

    def value(self) -> DampedInverse:
        """The inverse with everything that was added."""
        pairs = zip(self._inverse.pieces, self._averages, strict=True)
        pieces = [piece if average is None else average.value() for piece, average in pairs]
        return replace(self._inverse, pieces=tuple(pieces))


class _Average:
    """S of one unit with the statistics of one step in it."""

    def __init__(self, old: InverseInEigenbasis, decay: float) -> None:
        self._old = old
        self._decay = min(1 - 1 / (old.observed + 2), decay)
        self._sum: Tensor | None = None
        self._apart = False

    def add(self, taps: Sequence[AnyTap], weight: float) -> None:
        """Add weight · Σ_examples (E_Gᵀ (Σ_places g āᵀ) E_A)²."""
        if self._sum is None:
            self._sum = self._old.S * self._decay
        weight *= 1 - self._decay
        only = taps[0] if len(taps) == 1 else None
        if isinstance(only, Tap) and isinstance(only.inputs, Tensor) and only.grads.shape[1] == 1:
            # The square of one outer product is the outer product of the squares: one product for all.
            a, g = only.inputs.squeeze(1), only.grads.squeeze(1)
            columns, rows = (g, a) if only.transposed else (a, g)
            columns, rows = rotate(columns, self._old.E_A), rotate(rows, self._old.E_G)
            self._sum.addmm_(rows.square().mT, columns.square(), alpha=weight)
            return
        for V in gradients_of_examples(taps):
            rotated = rotate(rotate(V, self._old.E_A).mT, self._old.E_G).mT
            self._sum.add_(rotated.square().sum(dim=0), alpha=weight)

    def new(self) -> Tensor:
        """The sum that was added, without the old S, which `value` adds again."""
        if self._sum is None:
            self._sum = torch.zeros_like(self._old.S)
        else:
            self._sum.sub_(self._old.S, alpha=self._decay)
        self._apart = True
        return self._sum

    def value(self) -> InverseInEigenbasis:
        """The operator with the new S; the old one if nothing was added."""
        if self._sum is None:
            return self._old
        if self._apart:
            self._sum.add_(self._old.S, alpha=self._decay)
        # A square may be infinite, or 0 · ∞, where A and G are finite; then the last value stays.
        S = torch.where(self._sum.isfinite(), self._sum, self._old.S)
        return replace(self._old, S=S, observed=self._old.observed + 1)
