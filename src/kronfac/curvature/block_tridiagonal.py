"""F̂⁻¹ = Ξᵀ Λ Ξ, the inverse that is block-tridiagonal [MG15 §4.3].

F̂ agrees with F̃ on its tridiagonal blocks and has a block-tridiagonal inverse. It models the gradients of
the layers as a Gaussian chain in which layer i depends on layer i + 1,

    vec(DWᵢ) ~ N(Ψᵢ vec(DWᵢ₊₁), Σᵢ),   Ψᵢ = Ψᴬᵢ ⊗ Ψᴳᵢ,   Ψᴬᵢ = A_nextᵢ Aᵢ₊₁⁻¹,   Ψᴳᵢ = G_nextᵢ Gᵢ₊₁⁻¹,
    Σᵢ = Aᵢ ⊗ Gᵢ − Ψᴬᵢ Aᵢ₊₁ Ψᴬᵢᵀ ⊗ Ψᴳᵢ Gᵢ₊₁ Ψᴳᵢᵀ,

with damped A and G, and with A_next and G_next as estimated. Λ = diag(Σ₁⁻¹, …, Σ_ℓ⁻¹), the last Σ being
A_ℓ ⊗ G_ℓ, and Ξ has the identity on its diagonal and −Ψᵢ above it.

With Aᵢ₊₁ = L Lᵀ the subtracted term is R Rᵀ for R = A_nextᵢ L⁻ᵀ, and Ψᴬᵢ = R L⁻¹. So computing Ψ also
gives the root R that `linalg.kronecker_difference` needs.
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from kronfac.curvature.block import InverseCost, Moments, eigh_cost
from kronfac.curvature.block_diagonal import BlockDiagonalInverse, PreparedBlocks
from kronfac.curvature.inverse import (
    ApproximateInverse,
    ChainOperator,
    Curvature,
    DampedInverse,
    Failed,
    Link,
    Piece,
)
from kronfac.curvature.kronecker import KroneckerMoments
from kronfac.curvature.tikhonov import FactoredTikhonov
from kronfac.errors import NonFiniteError, NotPositiveDefiniteError, StateError
from kronfac.linalg import (
    KroneckerDifferenceInverse,
    KroneckerProduct,
    decompose,
    each,
    inverse_from_cholesky,
    shifted_choleskys,
)
from kronfac.storage import Layout

SigmaInverse = KroneckerDifferenceInverse | KroneckerProduct


@dataclass(frozen=True)
class BlockTridiagonalInverse(ApproximateInverse):
    """The Fisher with correlations between neighbouring layers of a chain; other units by themselves.

    Args:
        tikhonov: how the damping enters. The exact form has no efficient inverse here [MG15 §6.3].
    """

    couples: ClassVar[bool] = True
    tikhonov: FactoredTikhonov = field(default_factory=FactoredTikhonov)

    def __post_init__(self) -> None:
        if not isinstance(self.tikhonov, FactoredTikhonov):
            raise ValueError(
                "BlockTridiagonalInverse works with FactoredTikhonov only: the exact form has no "
                f"efficient inverse in it; got {self.tikhonov!r}."
            )

    @property
    def for_trials(self) -> ApproximateInverse:
        return BlockDiagonalInverse(self.tikhonov)

    def cost_between(self, this: tuple[int, int], following: tuple[int, int]) -> InverseCost:
        """The cost of Ψ and the second term of Σ⁻¹, at the largest possible ranks."""
        (r, c), (r_next, c_next) = this, following
        Psi = c * c_next + r * r_next
        regression = float(c * c_next**2 + r * r_next**2)
        couple = 2.0 * min(
            r * r_next * c_next + r * c_next * c, r_next * c_next * c + r * r_next * c
        )
        k_A, k_G = min(c, c_next), min(r, r_next)
        return InverseCost(
            Psi + c * k_A + r * k_G + k_A * k_G,
            regression + eigh_cost(c) + eigh_cost(r),
            couple + 2.0 * (r * c * k_G + k_G * c * k_A),
        )

    def prepare(self, curvature: Curvature) -> "PreparedChains":
        return PreparedChains(curvature, self.tikhonov)


@dataclass(frozen=True)
class DampedChain(ChainOperator):
    """Ξᵀ Λ Ξ of the units of a chain."""

    Sigma_inv: tuple[SigmaInverse, ...]  # ℓ of them
    Psi_A: tuple[Tensor, ...]  # ℓ − 1, (in_i, in_{i+1})
    Psi_G: tuple[Tensor, ...]  # ℓ − 1, (out_i, out_{i+1})

    def check(self, *units: Layout) -> None:
        """Raise a StateError if the inverse does not fit these units."""
        if len(self.Psi_A) != len(units) - 1 or len(self.Psi_G) != len(units) - 1:
            raise StateError(
                f"The state's chain of {len(units)} units must have {len(units) - 1} matrices Ψ of A and "
                f"of G; got {len(self.Psi_A)} and {len(self.Psi_G)}. Load an earlier state."
            )
        for Sigma_inv, unit in zip(self.Sigma_inv, units, strict=True):
            Sigma_inv.check(unit)
        for this, other, Psi_A, Psi_G in zip(
            units, units[1:], self.Psi_A, self.Psi_G, strict=False
        ):
            Link(Psi_A, Psi_G).check(this, other)  # the same shapes

    @property
    def length(self) -> int:
        """The number of units."""
        return len(self.Sigma_inv)

    def of_unit(self, number: int) -> SigmaInverse:
        """Σᵢ⁻¹: the part of Ξᵀ Λ Ξ for a unit by itself, without its Ψ.

        It is positive definite, and no smaller than the inverse of the unit's own curvature, because
        Σᵢ ≼ Aᵢ ⊗ Gᵢ. It is closer to that than (Ξᵀ Λ Ξ)ᵢᵢ, which relies on the neighbours' steps.
        """
        return self.Sigma_inv[number]

    def mv_chain(self, vectors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        V = self.Xi(vectors)
        return self.Xi_transposed([block.mv(v) for block, v in zip(self.Sigma_inv, V, strict=True)])

    def Xi(self, V: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """U_i = V_i − Ψᴳᵢ V_{i+1} Ψᴬᵢᵀ, U_ℓ = V_ℓ."""
        products = map(_triple, self.Psi_G, V[1:], (Psi.mT for Psi in self.Psi_A))
        return (*(v - p for v, p in zip(V, products, strict=False)), V[-1])

    def Xi_transposed(self, V: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """U_i = V_i − Ψᴳᵀ_{i−1} V_{i−1} Ψᴬ_{i−1}, U_1 = V_1."""
        products = map(_triple, (Psi.mT for Psi in self.Psi_G), V, self.Psi_A)
        return (V[0], *(v - p for v, p in zip(V[1:], products, strict=True)))


def _triple(left: Tensor, V: Tensor, right: Tensor) -> Tensor:
    """left V right, in the order that needs fewer multiplications."""
    (a, b), (_, c), (_, d) = left.shape, V.shape, right.shape
    if a * b * c + a * c * d <= b * c * d + a * b * d:
        return (left @ V) @ right
    return left @ (V @ right)


@dataclass(frozen=True)
class PreparedChains:
    """Chains of units, each inverted as a whole if possible."""

    curvature: Curvature
    tikhonov: FactoredTikhonov

    def damped(self, gamma: float) -> DampedInverse:
        runs = chains(self.curvature)
        return DampedInverse(tuple(p for run in runs for p in self._linked(*run, gamma)))

    def _linked(self, start: int, stop: int, gamma: float) -> Sequence[Piece]:
        """The inverse of one chain: whole, or divided at the units that have no inverse."""
        blocks = self.curvature.blocks[start:stop]
        if len(blocks) > 1:
            with suppress(NonFiniteError, NotPositiveDefiniteError):
                return [self._chain(blocks, self.curvature.links[start : stop - 1], gamma)]
        # A chain without an inverse: invert each unit by itself, to see which of them has none.
        alone = PreparedBlocks(blocks, self.tikhonov).damped(gamma)
        if len(blocks) == 1 or not alone.failures:  # the cause is then a link
            return alone.pieces
        pieces: list[Piece] = []
        begin = 0
        for end, message in (*alone.failures, (len(blocks), None)):
            if begin < end:
                pieces += self._linked(start + begin, start + end, gamma)
            if message is not None:
                pieces.append(Failed(message))
            begin = end + 1
        return pieces

    def _chain(
        self, blocks: Sequence[Moments], links: Sequence[Link | None], gamma: float
    ) -> DampedChain:
        pairs = [(b.A, b.G) for b in blocks if isinstance(b, KroneckerMoments)]
        known = [link for link in links if link is not None]
        count = len(pairs)
        shifts = [self.tikhonov.shifts(A, G, gamma) for A, G in pairs]
        L = shifted_choleskys(
            [*(A for A, _ in pairs), *(G for _, G in pairs)],
            [*(a for a, _ in shifts), *(g for _, g in shifts)],
            [f"{side}[{i}]" for side in "AG" for i in range(count)],
        )
        L_A, L_G = L[:count], L[count:]
        between = each(_between, L_A[:-1], L_G[:-1], known, L_A[1:], L_G[1:])
        Sigma_inv, Psi_A, Psi_G = zip(*between, strict=True)
        last = KroneckerProduct(inverse_from_cholesky(L_A[-1]), inverse_from_cholesky(L_G[-1]))
        return DampedChain((*Sigma_inv, last), Psi_A, Psi_G)


def chains(curvature: Curvature) -> list[tuple[int, int]]:
    """Runs of linked units: the number of the first, and one past the last. Other units are runs of one."""
    runs: list[tuple[int, int]] = []
    start = 0
    for i in range(len(curvature.blocks)):
        if i >= len(curvature.links) or curvature.links[i] is None:
            runs.append((start, i + 1))
            start = i + 1
    return runs


def _between(
    L_A: Tensor, L_G: Tensor, link: Link, next_L_A: Tensor, next_L_G: Tensor
) -> tuple[SigmaInverse, Tensor, Tensor]:
    """Σ⁻¹, Ψᴬ and Ψᴳ of a unit and the next."""
    R_A, Psi_A = _regress(link.A_next, next_L_A)
    R_G, Psi_G = _regress(link.G_next, next_L_G)
    return decompose(L_A, L_G, R_A, R_G), Psi_A, Psi_G


def _regress(cross: Tensor, L: Tensor) -> tuple[Tensor, Tensor]:
    """R = N L⁻ᵀ and Ψ = R L⁻¹ for N = E[x x'ᵀ] and E[x' x'ᵀ] = L Lᵀ."""
    R = torch.linalg.solve_triangular(L.mT, cross, upper=True, left=False)
    return R, torch.linalg.solve_triangular(L, R, upper=False, left=False)
