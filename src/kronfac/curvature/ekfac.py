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

from kronfac.curvature.block import InverseCost, Moments, Part, eigh_cost
from kronfac.curvature.inverse import ApproximateInverse, DampedInverse, Piece, failed
from kronfac.curvature.kronecker import KroneckerMoments
from kronfac.curvature.moments import Curvature
from kronfac.curvature.taps import AnyTap, SummedGradient, Tap, Taps, gradients_of_examples
from kronfac.curvature.tikhonov import FactoredTikhonov, Tikhonov
from kronfac.errors import NonFiniteError, NotPositiveDefiniteError
from kronfac.linalg import Failure, each, eigh
from kronfac.linalg.kronecker import kron
from kronfac.storage import Shapes, Storable


@dataclass(frozen=True)
class EigenvalueCorrectedInverse(ApproximateInverse):
    """The Fisher as if units were independent, each block diagonal in the eigenbasis of its A ⊗ G.

    A refresh makes new bases; the diagonal is estimated in every step. Units whose block is not
    Kronecker-factored have their own inverses.

    Args:
        tikhonov: how the damping enters, see above.
    """

    tikhonov: Tikhonov = field(default_factory=FactoredTikhonov)

    def prepare(self, curvature: Curvature) -> "PreparedBases":
        return PreparedBases(curvature.blocks, self.tikhonov)

    def cost(self, moments: Moments) -> InverseCost:
        if not isinstance(moments, KroneckerMoments):
            return moments.inverse_cost(self.tikhonov)
        sides = [len(M) for M in (moments.A, moments.G)]
        full = [len(M) for M in (moments.A, moments.G) if M.dim() == 2]
        return InverseCost(
            sum(n * n for n in full) + moments.size + sum(sides),
            sum(map(eigh_cost, full)),
            moments.size * (2 * sum(full) + 1),
        )

    def between_refreshes(self, inverse: DampedInverse, decay: float) -> "EigenvalueUpdate":
        return EigenvalueUpdate(inverse, decay)


@dataclass(frozen=True)
class EigenvalueCorrected(Storable):
    """V ↦ E_G [(E_Gᵀ V E_A) ⊘ (S + D)] E_Aᵀ with D = d_G 1ᵀ + 1 d_Aᵀ.

    A basis that is None is that of the parameters themselves.
    """

    E_A: Tensor | None  # (columns, columns)
    E_G: Tensor | None  # (rows, rows)
    S: Tensor  # (rows, columns)
    d_A: Tensor  # (columns,)
    d_G: Tensor  # (rows,)
    observed: int = 0
    """Steps whose statistics S has, since the basis is in use."""

    def shapes(self, rows: int, columns: int) -> Shapes:
        """Square bases, S like V, and D by its sides."""
        bases: Shapes = {"E_A": (columns, columns), "E_G": (rows, rows)}
        return {**bases, "S": (rows, columns), "d_A": (columns,), "d_G": (rows,)}

    def mv(self, V: Tensor) -> Tensor:
        """The product."""
        U = _rotate(_rotate(V, self.E_A).mT, self.E_G).mT / self.eigenvalues()
        U = U if self.E_G is None else self.E_G @ U
        return U if self.E_A is None else U @ self.E_A.mT

    def to_dense(self) -> Tensor:
        """The matrix, for vec(V), which stacks columns."""
        bases = zip((self.E_A, self.E_G), reversed(self.S.shape), strict=True)
        E = kron(*(self.S.new_ones(n).diag() if E is None else E for E, n in bases))
        return (E / self.eigenvalues().mT.reshape(-1)) @ E.mT

    def eigenvalues(self) -> Tensor:
        """S + D (rows, columns), those of the matrix that this is the inverse of."""
        return (self.S + self.d_A).add_(self.d_G.unsqueeze(1))


def _rotate(x: Tensor, E: Tensor | None) -> Tensor:
    """Vectors (…, features) in the basis E, Eᵀx."""
    return x if E is None else x @ E


# -------------------------------------------------------------------------------------------- refresh

_Eigen = tuple[Tensor, Tensor | None]
"""Eigenvalues, and eigenvectors unless the matrix was diagonal already."""


class PreparedBases:
    """Eigenbases of all Kronecker blocks, which every γ shares; other blocks are inverted one by one."""

    def __init__(self, blocks: Sequence[Moments], tikhonov: Tikhonov) -> None:
        self._blocks, self._tikhonov = blocks, tikhonov
        factors = {i: b for i, b in enumerate(blocks) if isinstance(b, KroneckerMoments)}
        sides = [*(b.A for b in factors.values()), *(b.G for b in factors.values())]
        eigen = each(_eigen, sides, [f"{side}[{i}]" for side in "AG" for i in factors])
        pairs = zip(eigen[: len(factors)], eigen[len(factors) :], strict=True)
        self._bases = {i: _basis(*pair) for i, pair in zip(factors, pairs, strict=True)}

    def damped(self, gamma: float) -> DampedInverse:
        """All blocks, or in the place of one that has no inverse why it has none."""
        return DampedInverse(tuple(self._piece(i, gamma) for i in range(len(self._blocks))))

    def _piece(self, number: int, gamma: float) -> Piece:
        block, basis = self._blocks[number], self._bases.get(number)
        if isinstance(basis, Exception):
            return failed(basis)
        try:
            if basis is None:
                return block.damped(gamma, self._tikhonov)
            assert isinstance(block, KroneckerMoments)
            return basis.damped(block, gamma, self._tikhonov)
        except (NonFiniteError, NotPositiveDefiniteError) as failure:
            return failed(failure)


@dataclass(frozen=True)
class _Basis:
    """Eigenvalues and eigenvectors of both sides, and S₀."""

    s_A: Tensor
    s_G: Tensor
    E_A: Tensor | None
    E_G: Tensor | None
    S: Tensor

    def damped(
        self, block: KroneckerMoments, gamma: float, tikhonov: Tikhonov
    ) -> EigenvalueCorrected:
        """The operator with S₀.

        Raises:
            NotPositiveDefiniteError: γ is too small for the precision of a singular A ⊗ G.
        """
        if isinstance(tikhonov, FactoredTikhonov):
            shift_A, shift_G = tikhonov.shifts(block.A, block.G, gamma)
            d_A, d_G = (self.s_A + shift_A) * shift_G, self.s_G * shift_A
        else:
            d_A, d_G = torch.full_like(self.s_A, gamma**2), torch.zeros_like(self.s_G)
        operator = EigenvalueCorrected(self.E_A, self.E_G, self.S, d_A, d_G)
        if not bool((d_A.min() > 0) & d_A.isfinite().all() & d_G.isfinite().all()):
            raise NotPositiveDefiniteError(
                f"A ⊗ G ({self.S.numel()} parameters) has no damping at γ = {gamma:.3g}, in {d_A.dtype}."
            )
        return operator


def _eigen(M: Tensor, name: str) -> _Eigen | Failure:
    try:
        return (M.clamp(min=0), None) if M.dim() == 1 else eigh(M, name)
    except NonFiniteError as failure:
        return failure.with_traceback(None)  # which holds what it was computed from


def _basis(A: _Eigen | Failure, G: _Eigen | Failure) -> _Basis | Failure:
    if not isinstance(A, tuple):
        return A
    if not isinstance(G, tuple):
        return G
    (s_A, E_A), (s_G, E_G) = A, G
    # Factors of 1e20 each, which float32 holds, have a product that it does not.
    S = torch.outer(s_G, s_A).clamp_(max=torch.finfo(s_A.dtype).max)
    return _Basis(s_A, s_G, E_A, E_G, S)


# ---------------------------------------------------------------------------------- between refreshes


class EigenvalueUpdate:
    """An inverse whose S takes in the statistics of one step; the old one is only read."""

    def __init__(self, inverse: DampedInverse, decay: float) -> None:
        self._inverse = inverse
        self._averages = [
            _Average(piece, decay) if isinstance(piece, EigenvalueCorrected) else None
            for piece in inverse.pieces
        ]

    def add(self, taps: Sequence[Taps], weight: float) -> None:
        """Add what one backward pass shows of all units; `weight` is what squares of gradients count."""
        for average, unit in zip(self._averages, taps, strict=True):
            # Uses that are no longer seen tell of no example; the next refresh has another block.
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

    def __init__(self, old: EigenvalueCorrected, decay: float) -> None:
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
            columns, rows = _rotate(columns, self._old.E_A), _rotate(rows, self._old.E_G)
            self._sum.addmm_(rows.square().mT, columns.square(), alpha=weight)
            return
        for V in gradients_of_examples(taps):
            rotated = _rotate(_rotate(V, self._old.E_A).mT, self._old.E_G).mT
            self._sum.add_(rotated.square().sum(dim=0), alpha=weight)

    def new(self) -> Tensor:
        """What was added, without the old S, which comes back in `value`."""
        if self._sum is None:
            self._sum = torch.zeros_like(self._old.S)
        else:
            self._sum.sub_(self._old.S, alpha=self._decay)
        self._apart = True
        return self._sum

    def value(self) -> EigenvalueCorrected:
        """The operator with the new S; the old one if nothing was added."""
        if self._sum is None:
            return self._old
        if self._apart:
            self._sum.add_(self._old.S, alpha=self._decay)
        # A square may be infinite, or 0 · ∞, if A and G are not; what it was the last time will do.
        S = torch.where(self._sum.isfinite(), self._sum, self._old.S)
        return replace(self._old, S=S, observed=self._old.observed + 1)
