"""EKFAC: the eigenbasis of A ⊗ G with re-estimated eigenvalues (George et al. 2018).

The eigenbasis E = E_A ⊗ E_G is kept from one refresh to the next. In that basis the diagonal of a unit's
Fisher block F is estimated,

    S = Σ_examples weight · (E_Gᵀ (Σ_places g āᵀ) E_A)²,   (rows, columns), squared element by element,

in every step with statistics, and used in the direction of that same step:

    V ↦ E_G [(E_Gᵀ V E_A) ⊘ (S + D)] E_Aᵀ.

Among the matrices that E diagonalises, E diag(S) Eᵀ is the closest to F in the Frobenius norm. A ⊗ G is one
of them, so it is never closer.

**Damping.** D is what the damping adds to the eigenvalues of A ⊗ G: γ² in the exact form, and

    (s_G + γ/π)(s_A + πγ)ᵀ − s_G s_Aᵀ = πγ s_G 1ᵀ + γ/π 1 s_Aᵀ + γ²

in the factored form [MG15 §6.3]. Its terms with s_G and s_A also damp directions with one large and one
small eigenvalue, on which γ² alone has little effect.

**A new basis** starts with the eigenvalues of A ⊗ G, S₀ = s_G s_Aᵀ, which count as much as the statistics
of one step: after n steps S is the mean of S₀ and n estimates. Later S is a moving average with the same
decay ε as the other statistics:

    S ← ε′ S + (1 − ε′) · new,   ε′ = min(1 − 1/(n + 2), ε).

S₀ gets no more weight because it has the error of the factorisation, which does not decrease with more
examples. An estimate from m examples has a relative error of about √(8/m), 0.18 for m = 250 (the product of
two independent Gaussians has a kurtosis of 9). Nor is the old S rotated into the new basis, as P_G S P_Aᵀ
with P = (E_newᵀ E_old)². That mixes eigenvalues of different orders of magnitude: a rotation by 0.1 adds
a hundredth of the largest eigenvalue to the smallest.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from kronfac.curvature.block import InverseCost, Moments, Product
from kronfac.curvature.block_diagonal import PreparedBlocks, cost_in_eigenbasis
from kronfac.curvature.inverse import (
    ApproximateInverse,
    Curvature,
    DampedInverse,
    InverseUpdate,
    Piece,
)
from kronfac.curvature.taps import AnyTap, SummedGradient, Tap, Taps, gradients_of_examples
from kronfac.curvature.tikhonov import FactoredTikhonov, Tikhonov
from kronfac.linalg import InverseInEigenbasis, rotate


@dataclass(frozen=True)
class EigenvalueCorrectedInverse(ApproximateInverse):
    """The Fisher as if units were independent, each block diagonal in the eigenbasis of its A ⊗ G.

    A refresh makes new bases; the diagonal is estimated in every step. Units without a Kronecker block have
    their own inverses.

    Args:
        tikhonov: how the damping enters.
    """

    tikhonov: Tikhonov = field(default_factory=FactoredTikhonov)

    def prepare(self, curvature: Curvature) -> PreparedBlocks:
        return PreparedBlocks(curvature.blocks, self.tikhonov, in_eigenbases=True)

    def cost(self, moments: Moments) -> InverseCost:
        return cost_in_eigenbasis(moments)

    def between_refreshes(self, inverse: DampedInverse, decay: float) -> "EigenvalueUpdate":
        return EigenvalueUpdate(inverse, decay)


class EigenvalueUpdate(InverseUpdate):
    """An inverse whose S takes in the statistics of one step; the old one is only read."""

    def __init__(self, inverse: DampedInverse, decay: float) -> None:
        self._inverse = inverse
        self._averages = [
            Product(piece.S, min(1 - 1 / (piece.observed + 2), decay))
            if isinstance(piece, InverseInEigenbasis)
            else None
            for piece in inverse.pieces
        ]
        self.products = [average for average in self._averages if average is not None]

    def add(self, taps: Sequence[Taps], weight: float) -> None:
        for piece, average, unit in zip(self._inverse.pieces, self._averages, taps, strict=True):
            # Without uses there are no gradients of examples; the next refresh will use another block.
            if average is not None and not isinstance(unit, SummedGradient) and len(unit):
                assert isinstance(piece, InverseInEigenbasis)
                _add_squares(average, piece, unit, weight)

    def value(self) -> DampedInverse:
        pairs = zip(self._inverse.pieces, self._averages, strict=True)
        return replace(self._inverse, pieces=tuple(_updated(*pair) for pair in pairs))


def _add_squares(
    average: Product, basis: InverseInEigenbasis, taps: Sequence[AnyTap], weight: float
) -> None:
    """Add weight · Σ_examples (E_Gᵀ (Σ_places g āᵀ) E_A)²."""
    only = taps[0] if len(taps) == 1 else None
    if isinstance(only, Tap) and isinstance(only.inputs, Tensor) and only.grads.shape[1] == 1:
        # The square of an outer product is the outer product of the squares: one product for all examples.
        a, g = only.inputs.squeeze(1), only.grads.squeeze(1)
        columns, rows = (g, a) if only.transposed else (a, g)
        columns, rows = rotate(columns, basis.E_A), rotate(rows, basis.E_G)
        average.add(rows.square(), columns.square(), weight)
        return
    for V in gradients_of_examples(taps):
        rotated = rotate(rotate(V, basis.E_A).mT, basis.E_G).mT
        average.add_sum(rotated.square().sum(dim=0), weight)


def _updated(piece: Piece, average: Product | None) -> Piece:
    """The operator with the new S; the old one if nothing was added."""
    if average is None or average.empty:
        return piece
    assert isinstance(piece, InverseInEigenbasis)
    new = average.value()
    # A square may overflow, or be 0 · ∞, although A and G are finite; then the last value stays.
    S = torch.where(new.isfinite(), new, piece.S)
    return replace(piece, S=S, observed=piece.observed + 1)
