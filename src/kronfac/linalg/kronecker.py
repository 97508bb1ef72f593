"""A ⊗ G acting on matrices: (A ⊗ G) vec(V) = vec(G V Aᵀ), vec stacking columns [MG15 §4.2].

Layouts: A is (in, in), G is (out, out), V is (out, in).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from kronfac.storage import Shapes, Storable


def kron(A: Tensor, B: Tensor) -> Tensor:
    """A ⊗ B for any strides; `torch.kron` fails on some."""
    return torch.einsum("ij,kl->ikjl", A, B).reshape(len(A) * len(B), -1)


def low_rank_pays(shape: tuple[int, int], cases: int) -> bool:
    """Whether 𝒢 (m, out) and 𝒜 (m, in) are cheaper to multiply by G and A before each other than after."""
    d_out, d_in = shape
    return cases * (d_in**2 + d_out**2 + d_in * d_out) < d_out * d_in * (d_in + d_out)


@dataclass(frozen=True)
class OuterProduct:
    """V = 𝒢ᵀ𝒜 by its factors, which for few examples are cheaper to multiply than V is [MG15 §8, end]."""

    grads: Tensor  # 𝒢 (m, out)
    inputs: Tensor  # 𝒜 (m, in)

    def to_dense(self) -> Tensor:
        """V."""
        return self.grads.mT @ self.inputs

    def pays(self) -> bool:
        """Whether a product with A ⊗ G needs fewer multiplications by way of the factors."""
        shape = self.grads.shape[1], self.inputs.shape[1]
        return low_rank_pays(shape, len(self.grads))


@dataclass(frozen=True)
class KroneckerProduct(Storable):
    """A ⊗ G, for symmetric A and G; a diagonal one may be given as a vector."""

    A: Tensor  # (in, in), or (in,)
    G: Tensor  # (out, out), or (out,)

    def shapes(self, rows: int, columns: int) -> Shapes:
        """Square sides, or their diagonals."""
        return {"A": [(columns, columns), (columns,)], "G": [(rows, rows), (rows,)]}

    def mv(self, V: Tensor | OuterProduct) -> Tensor:
        """G V A."""
        if not isinstance(V, OuterProduct):
            return multiply_right(multiply_left(self.G, V), self.A)
        if not V.pays():
            return self.mv(V.to_dense())
        return multiply_right(V.grads, self.G).mT @ multiply_right(V.inputs, self.A)

    def to_dense(self) -> Tensor:
        """The (in·out, in·out) matrix."""
        return kron(*(torch.diag(M) if M.dim() == 1 else M for M in (self.A, self.G)))


def multiply_left(M: Tensor, V: Tensor) -> Tensor:
    """M V, for a diagonal M also from its diagonal."""
    return M[:, None] * V if M.dim() == 1 else M @ V


def multiply_right(V: Tensor, M: Tensor) -> Tensor:
    """V M, for a diagonal M also from its diagonal."""
    return V * M if M.dim() == 1 else V @ M


@dataclass(frozen=True)
class EigenKroneckerSum(Storable):
    """(C ⊗ D + ξ I)⁻¹ in the eigenbases of C and D, the simpler form at the end of [MG15 App. B].

    vec(V) ↦ vec(E_D [(E_Dᵀ V E_C) ⊘ (s_D s_Cᵀ + ξ)] E_Cᵀ)
    """

    E_C: Tensor  # (in, in)
    s_C: Tensor  # (in,)
    E_D: Tensor  # (out, out)
    s_D: Tensor  # (out,)
    xi: float

    def shapes(self, rows: int, columns: int) -> Shapes:
        """Eigenbases and eigenvalues."""
        bases: Shapes = {"E_C": (columns, columns), "E_D": (rows, rows)}
        return {**bases, "s_C": (columns,), "s_D": (rows,)}

    def mv(self, V: Tensor) -> Tensor:
        """(C ⊗ D + ξ I)⁻¹ applied to V."""
        rotated = self.E_D.mT @ V @ self.E_C
        return self.E_D @ (rotated / (torch.outer(self.s_D, self.s_C) + self.xi)) @ self.E_C.mT

    def to_dense(self) -> Tensor:
        """The (in·out, in·out) matrix."""
        E = kron(self.E_C, self.E_D)
        return (E / (torch.outer(self.s_C, self.s_D).reshape(-1) + self.xi)) @ E.mT
