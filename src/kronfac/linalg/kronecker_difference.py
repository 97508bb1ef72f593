"""(A ⊗ B − C ⊗ D)⁻¹ for A, B positive definite and C, D positive semi-definite [MG15 App. B].

Write A = L₁L₁ᵀ, B = L₂L₂ᵀ, and C = R₁R₁ᵀ, D = R₂R₂ᵀ for any roots. With Xᵢ = Lᵢ⁻¹Rᵢ,

    A ⊗ B − C ⊗ D = (L₁ ⊗ L₂) (I − X₁X₁ᵀ ⊗ X₂X₂ᵀ) (L₁ ⊗ L₂)ᵀ.

Let Xᵢ = EᵢSᵢ^½Fᵢᵀ be the singular value decomposition and Pᵢ = EᵢSᵢ^½ = XᵢFᵢ. Since
1/(1 − s) = 1 + s/(1 − s), the inverse is that of A ⊗ B and a correction in as many columns as R has:

    (A ⊗ B − C ⊗ D)⁻¹ = A⁻¹ ⊗ B⁻¹ + (K₁ ⊗ K₂)(I − S₁ ⊗ S₂)⁻¹(K₁ ⊗ K₂)ᵀ,   Kᵢ = Lᵢ⁻ᵀPᵢ.

Deviation: the paper uses symmetric square roots and the eigenvectors of A^{-1/2} C A^{-1/2}, a full basis.
The inverse is the same. This form needs no square root (Cholesky instead of a second eigendecomposition),
decomposes the smaller of XᵀX and XXᵀ, and never divides by a small singular value. Despite rounding it is a
positive definite matrix plus a positive semi-definite one, so that it stays positive in float32 with
rank-deficient statistics. `kronecker_sum.py` has the inverse of the sum.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.linalg import solve_triangular

from kronfac.linalg.kronecker import kron
from kronfac.linalg.spd import eigh, inverse_from_cholesky
from kronfac.storage import Shapes, Storable


def _scaled_left_singular(X: Tensor, name: str) -> tuple[Tensor, Tensor]:
    """P = E S^½ and s = diag S of X = E S^½ Fᵀ, by the smaller of its two Gram matrices."""
    rows, columns = X.shape
    if columns < rows:
        s, F = eigh(X.mT @ X, name)
        return X @ F, s
    s, E = eigh(X @ X.mT, name)
    return E * s.sqrt(), s


@dataclass(frozen=True)
class KroneckerDifferenceInverse(Storable):
    """(A ⊗ B − C ⊗ D)⁻¹ by decomposition: V ↦ B⁻¹VA⁻¹ + K₂[(K₂ᵀVK₁) ⊘ (11ᵀ − s₂s₁ᵀ)]K₁ᵀ."""

    A_inv: Tensor  # (in, in)
    B_inv: Tensor  # (out, out)
    K1: Tensor  # (in, r1)
    K2: Tensor  # (out, r2)
    weights: Tensor  # (r2, r1): 1 / (1 − s₂s₁ᵀ)

    def shapes(self, rows: int, columns: int) -> Shapes:
        inverses: Shapes = {"A_inv": (columns, columns), "B_inv": (rows, rows)}
        return {**inverses, "K1": (columns, "r1"), "K2": (rows, "r2"), "weights": ("r2", "r1")}

    def mv(self, V: Tensor) -> Tensor:
        inner = (self.K2.mT @ V @ self.K1) * self.weights
        return self.B_inv @ V @ self.A_inv + self.K2 @ inner @ self.K1.mT

    def to_dense(self) -> Tensor:
        K = kron(self.K1, self.K2)
        return kron(self.A_inv, self.B_inv) + (K * self.weights.mT.reshape(-1)) @ K.mT


def decompose(L1: Tensor, L2: Tensor, R1: Tensor, R2: Tensor) -> KroneckerDifferenceInverse:
    """Prepare (L₁L₁ᵀ ⊗ L₂L₂ᵀ − R₁R₁ᵀ ⊗ R₂R₂ᵀ)⁻¹; the difference must be positive."""
    X1, X2 = (solve_triangular(L, R, upper=False) for L, R in ((L1, R1), (L2, R2)))
    P1, s1 = _scaled_left_singular(X1, "factor, input side")
    P2, s2 = _scaled_left_singular(X2, "factor, output side")
    # If s₂s₁ is below ε, the correction is lost in rounding. Damped statistics have many such columns, and
    # more with stronger damping.
    epsilon = torch.finfo(s1.dtype).eps
    keep1, keep2 = s1 * s2.max() > epsilon, s2 * s1.max() > epsilon
    P1, s1, P2, s2 = P1[:, keep1], s1[keep1], P2[:, keep2], s2[keep2]
    # The s are squared canonical correlations, below 1 in exact arithmetic. A difference that rounding made
    # singular gets the smallest gap that the dtype can represent.
    product = torch.outer(s2.clamp(max=1), s1.clamp(max=1)).clamp(max=1 - epsilon)
    return KroneckerDifferenceInverse(
        A_inv=inverse_from_cholesky(L1),
        B_inv=inverse_from_cholesky(L2),
        K1=solve_triangular(L1.mT, P1, upper=True),
        K2=solve_triangular(L2.mT, P2, upper=True),
        weights=1 / (1 - product),
    )
