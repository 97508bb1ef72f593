"""F̂⁻¹ = Ξᵀ Λ Ξ, the inverse that is block-tridiagonal [MG15 §4.3].

F̂ agrees with F̃ on its tridiagonal blocks and has a block-tridiagonal inverse: the gradients of the
layers are taken for a Gaussian chain in which layer i depends on layer i + 1,

    vec(DWᵢ) ~ N(Ψᵢ vec(DWᵢ₊₁), Σᵢ),   Ψᵢ = Ψᴬᵢ ⊗ Ψᴳᵢ,   Ψᴬᵢ = A_nextᵢ Aᵢ₊₁⁻¹,   Ψᴳᵢ = G_nextᵢ Gᵢ₊₁⁻¹,
    Σᵢ = Aᵢ ⊗ Gᵢ − Ψᴬᵢ Aᵢ₊₁ Ψᴬᵢᵀ ⊗ Ψᴳᵢ Gᵢ₊₁ Ψᴳᵢᵀ,

with A and G damped, A_next and G_next as they are. Λ = diag(Σ₁⁻¹, …, Σ_ℓ⁻¹), the last Σ being
A_ℓ ⊗ G_ℓ, and Ξ has the identity on its diagonal and −Ψᵢ above it.

With Aᵢ₊₁ = L Lᵀ the subtracted term is R Rᵀ for R = A_nextᵢ L⁻ᵀ, and Ψᴬᵢ = R L⁻¹: the root that
`linalg.kronecker_difference` wants comes for free.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, get_args

import torch
from torch import Tensor

from kronfac.factors import KroneckerFactors
from kronfac.inverses.base import ApproximateInverse, DampedInverse, Matrices
from kronfac.inverses.block_diagonal import BlockDiagonalInverse
from kronfac.inverses.damping import FactoredTikhonov, factor_names
from kronfac.linalg import (
    KroneckerDifferenceInverse,
    KroneckerProduct,
    SmithDifferenceInverse,
    decompose,
    each,
    inverse_from_cholesky,
    shifted_choleskys,
    smith,
)

Solver = Literal["decomposition", "smith"]
SigmaInverse = KroneckerDifferenceInverse | SmithDifferenceInverse | KroneckerProduct


@dataclass(frozen=True)
class BlockTridiagonalInverse(ApproximateInverse):
    """The Fisher with neighbouring layers correlated; for a chain of layers.

    Args:
        tikhonov: the norm in π. The exact form has no efficient inverse here [MG15 §6.3].
        solver: how Σ⁻¹ is computed, `"decomposition"` or `"smith"`, the squaring iteration, which
            needs no eigendecomposition but more products a step [MG15 App. B].
    """

    needs_neighbours: ClassVar[bool] = True
    tikhonov: FactoredTikhonov = field(default_factory=FactoredTikhonov)
    solver: Solver = "decomposition"

    def __post_init__(self) -> None:
        if self.solver not in get_args(Solver):
            raise ValueError(
                f"BlockTridiagonalInverse's solver is one of {get_args(Solver)}; got {self.solver!r}."
            )
        if not isinstance(self.tikhonov, FactoredTikhonov):
            raise ValueError(
                "BlockTridiagonalInverse works with FactoredTikhonov only: the exact form has no "
                f"efficient inverse in it; got {self.tikhonov!r}."
            )

    @property
    def for_trials(self) -> ApproximateInverse:
        return BlockDiagonalInverse(self.tikhonov)

    def prepare(self, factors: KroneckerFactors) -> "_Prepared":
        return _Prepared(factors, self.tikhonov, self.solver)

    def load(self, packed: dict[str, Any]) -> "DampedBlockTridiagonal":
        kind = KroneckerDifferenceInverse if self.solver == "decomposition" else _load_smith
        *conditional, last = packed["Sigma_inv"]
        return DampedBlockTridiagonal(
            Sigma_inv=(*(kind(**fields) for fields in conditional), KroneckerProduct(**last)),
            Psi_A=tuple(packed["Psi_A"]),
            Psi_G=tuple(packed["Psi_G"]),
        )


def _load_smith(**fields: Any) -> SmithDifferenceInverse:
    return SmithDifferenceInverse(
        **fields | {"lefts": tuple(fields["lefts"]), "rights": tuple(fields["rights"])}
    )


@dataclass(frozen=True)
class DampedBlockTridiagonal(DampedInverse):
    """Ξᵀ Λ Ξ."""

    Sigma_inv: tuple[SigmaInverse, ...]  # ℓ of them
    Psi_A: tuple[Tensor, ...]  # ℓ − 1, (in_i, in_{i+1})
    Psi_G: tuple[Tensor, ...]  # ℓ − 1, (out_i, out_{i+1})

    def mv(self, vectors: Sequence[Tensor]) -> Matrices:
        V = self.Xi(vectors)
        return self.Xi_transposed([block.mv(v) for block, v in zip(self.Sigma_inv, V, strict=True)])

    def Xi(self, V: Sequence[Tensor]) -> Matrices:
        """U_i = V_i − Ψᴳᵢ V_{i+1} Ψᴬᵢᵀ, U_ℓ = V_ℓ."""
        products = map(_triple, self.Psi_G, V[1:], (Psi.mT for Psi in self.Psi_A))
        return (*(v - p for v, p in zip(V, products, strict=False)), V[-1])

    def Xi_transposed(self, V: Sequence[Tensor]) -> Matrices:
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
class _Prepared:
    factors: KroneckerFactors
    tikhonov: FactoredTikhonov
    solver: Solver

    def damped(self, gamma: float) -> DampedBlockTridiagonal:
        A, G = self.factors.A, self.factors.G
        count = len(A)
        shifts = self.tikhonov.shifts(self.factors, gamma)
        L = shifted_choleskys((*A, *G), shifts, factor_names(count))
        L_A, L_G = L[:count], L[count:]
        between = each(
            _Between.of,
            L_A[:-1],
            L_G[:-1],
            self.factors.A_next,
            self.factors.G_next,
            L_A[1:],
            L_G[1:],
            [self.solver] * (count - 1),
        )
        last = KroneckerProduct(inverse_from_cholesky(L_A[-1]), inverse_from_cholesky(L_G[-1]))
        return DampedBlockTridiagonal(
            Sigma_inv=(*(b.Sigma_inv for b in between), last),
            Psi_A=tuple(b.Psi_A for b in between),
            Psi_G=tuple(b.Psi_G for b in between),
        )


@dataclass(frozen=True)
class _Between:
    """Of a layer and the next."""

    Sigma_inv: SigmaInverse
    Psi_A: Tensor
    Psi_G: Tensor

    @classmethod
    def of(
        cls,
        L_A: Tensor,
        L_G: Tensor,
        A_next: Tensor,
        G_next: Tensor,
        next_L_A: Tensor,
        next_L_G: Tensor,
        solver: Solver,
    ) -> "_Between":
        R_A, Psi_A = _regress(A_next, next_L_A)
        R_G, Psi_G = _regress(G_next, next_L_G)
        solve = decompose if solver == "decomposition" else smith
        return cls(solve(L_A, L_G, R_A, R_G), Psi_A, Psi_G)


def _regress(cross: Tensor, L: Tensor) -> tuple[Tensor, Tensor]:
    """R = N L⁻ᵀ and Ψ = R L⁻¹ for N = E[x x'ᵀ] and E[x' x'ᵀ] = L Lᵀ."""
    R = torch.linalg.solve_triangular(L.mT, cross, upper=True, left=False)
    return R, torch.linalg.solve_triangular(L, R, upper=False, left=False)
