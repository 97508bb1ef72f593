"""(A ⊗ B + C ⊗ D)⁻¹ for A, B positive definite and C, D positive semi-definite [MG15 App. B].

With A = L₁L₁ᵀ, B = L₂L₂ᵀ and the eigendecompositions L₁⁻¹CL₁⁻ᵀ = E₁S₁E₁ᵀ, L₂⁻¹DL₂⁻ᵀ = E₂S₂E₂ᵀ,

    (A ⊗ B + C ⊗ D)⁻¹ = (K₁ ⊗ K₂)(I + S₁ ⊗ S₂)⁻¹(K₁ ⊗ K₂)ᵀ,   Kᵢ = Lᵢ⁻ᵀEᵢ,

because Kᵢ diagonalises both matrices of its side: K₁ᵀAK₁ = I, K₁ᵀCK₁ = S₁. If both are diagonal, so is K₁,
and it is kept as a vector: with diagonal B and D there is a separate problem for every row of V.

A form with a correction, A⁻¹ ⊗ B⁻¹ − …, as in `kronecker_difference.py`, would lose digits where C ⊗ D is
much larger than A ⊗ B; here all terms are positive.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from kronfac.errors import NotPositiveDefiniteError
from kronfac.linalg.kronecker import kron, multiply_left, multiply_right
from kronfac.linalg.spd import cholesky, eigh
from kronfac.storage import Shapes, Storable


@dataclass(frozen=True)
class KroneckerSumInverse(Storable):
    """(A ⊗ B + C ⊗ D)⁻¹: V ↦ K₂[(K₂ᵀVK₁) ⊘ (11ᵀ + s₂s₁ᵀ)]K₁ᵀ."""

    K1: Tensor  # (in, in), or (in,) if diagonal
    K2: Tensor  # (out, out), or (out,)
    s1: Tensor  # (in,)
    s2: Tensor  # (out,)

    def shapes(self, rows: int, columns: int) -> Shapes:
        bases: Shapes = {"K1": [(columns, columns), (columns,)], "K2": [(rows, rows), (rows,)]}
        return {**bases, "s1": (columns,), "s2": (rows,)}

    def mv(self, V: Tensor) -> Tensor:
        inner = multiply_right(multiply_left(_transposed(self.K2), V), self.K1)
        inner = inner / (1 + torch.outer(self.s2, self.s1))
        return multiply_right(multiply_left(self.K2, inner), _transposed(self.K1))

    def to_dense(self) -> Tensor:
        K = kron(*(torch.diag(K) if K.dim() == 1 else K for K in (self.K1, self.K2)))
        return (K / (1 + torch.outer(self.s1, self.s2).reshape(-1))) @ K.mT


def _transposed(K: Tensor) -> Tensor:
    return K if K.dim() == 1 else K.mT


def invert_sum(
    A: Tensor, B: Tensor, C: Tensor, D: Tensor, name: str = "sum"
) -> KroneckerSumInverse:
    """(A ⊗ B + C ⊗ D)⁻¹; each of them may be given by its diagonal.

    Raises:
        NonFiniteError, NotPositiveDefiniteError: there is none.
    """
    K1, s1 = diagonalize(A, C, f"{name}, input side")
    K2, s2 = diagonalize(B, D, f"{name}, output side")
    return KroneckerSumInverse(K1, K2, s1, s2)


def diagonalize(A: Tensor, C: Tensor, name: str = "pair") -> tuple[Tensor, Tensor]:
    """K and s with KᵀAK = I and KᵀCK = diag(s); K is a vector if A and C both are."""
    if A.dim() == C.dim() == 1:
        K, s = A.rsqrt(), C / A
        if not bool((K.isfinite() & s.isfinite() & (K > 0)).all()):
            raise NotPositiveDefiniteError(
                f"{name} ({len(A)} × {len(A)}, diagonal) is not positive. A larger damping makes it so."
            )
        return K, s
    A, C = (torch.diag(M) if M.dim() == 1 else M for M in (A, C))
    L = cholesky(A, name)
    half = torch.linalg.solve_triangular(L, C, upper=False)
    both = torch.linalg.solve_triangular(L, half.mT, upper=False)
    s, E = eigh((both + both.mT) / 2, name)
    return torch.linalg.solve_triangular(L.mT, E, upper=True), s
