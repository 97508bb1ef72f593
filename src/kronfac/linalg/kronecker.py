"""A ⊗ G acting on matrices: (A ⊗ G) vec(V) = vec(G V Aᵀ), vec stacking columns [MG15 §4.2].

Layouts: A is (in, in), G is (out, out), V is (out, in).
"""

from dataclasses import dataclass

import torch
from torch import Tensor


def kron(A: Tensor, B: Tensor) -> Tensor:
    """A ⊗ B for any strides; `torch.kron` fails on some."""
    return torch.einsum("ij,kl->ikjl", A, B).reshape(len(A) * len(B), -1)


def low_rank_pays(shape: tuple[int, int], cases: int) -> bool:
    """Whether 𝒢 (m, out) and 𝒜 (m, in) are cheaper to multiply by G and A before each other than after."""
    d_out, d_in = shape
    return cases * (d_in**2 + d_out**2 + d_in * d_out) < d_out * d_in * (d_in + d_out)


@dataclass(frozen=True)
class KroneckerProduct:
    """A ⊗ G, for symmetric A and G."""

    A: Tensor  # (in, in)
    G: Tensor  # (out, out)

    def mv(self, V: Tensor) -> Tensor:
        """G V A."""
        return self.G @ V @ self.A

    def mv_low_rank(self, output_grads: Tensor, inputs: Tensor) -> Tensor:
        """G (𝒢ᵀ 𝒜) A, from 𝒢 (m, out) and 𝒜 (m, in), without forming 𝒢ᵀ 𝒜 [MG15 §8, end]."""
        return (output_grads @ self.G).mT @ (inputs @ self.A)

    def low_rank_pays(self, cases: int) -> bool:
        """Whether `mv_low_rank` needs fewer multiplications than `mv` for this many cases."""
        return low_rank_pays((len(self.G), len(self.A)), cases)

    def to_dense(self) -> Tensor:
        """The (in·out, in·out) matrix."""
        return kron(self.A, self.G)


@dataclass(frozen=True)
class EigenKroneckerSum:
    """(C ⊗ D + ξ I)⁻¹ in the eigenbases of C and D, the simpler form at the end of [MG15 App. B].

    vec(V) ↦ vec(E_D [(E_Dᵀ V E_C) ⊘ (s_D s_Cᵀ + ξ)] E_Cᵀ)
    """

    E_C: Tensor  # (in, in)
    s_C: Tensor  # (in,)
    E_D: Tensor  # (out, out)
    s_D: Tensor  # (out,)
    xi: float

    def mv(self, V: Tensor) -> Tensor:
        """(C ⊗ D + ξ I)⁻¹ applied to V."""
        rotated = self.E_D.mT @ V @ self.E_C
        return self.E_D @ (rotated / (torch.outer(self.s_D, self.s_C) + self.xi)) @ self.E_C.mT

    def to_dense(self) -> Tensor:
        """The (in·out, in·out) matrix."""
        E = kron(self.E_C, self.E_D)
        return (E / (torch.outer(self.s_C, self.s_D).reshape(-1) + self.xi)) @ E.mT
