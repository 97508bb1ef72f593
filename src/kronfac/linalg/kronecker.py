"""A ⊗ G acting on matrices, (A ⊗ G) vec(V) = vec(G V Aᵀ) [MG15 §4.2], and the sums xᵀx for A and G.

Layouts: vec stacks columns, A is (in, in), G is (out, out), V is (out, in). A vector in parameter space is
a tuple of such matrices, one per unit.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from kronfac.storage import Shapes, Storable

Matrices = tuple[Tensor, ...]
"""Gradients, updates, directions, parameters."""


def kron(A: Tensor, B: Tensor) -> Tensor:
    """A ⊗ B for any strides; `torch.kron` fails for some."""
    return torch.einsum("ij,kl->ikjl", A, B).reshape(len(A) * len(B), -1)


def low_rank_pays(shape: tuple[int, int], cases: int) -> bool:
    """Whether (𝒢 G)ᵀ(𝒜 A) is cheaper than G (𝒢ᵀ𝒜) A, for 𝒢 (m, out), 𝒜 (m, in) and m = `cases`."""
    d_out, d_in = shape
    return cases * (d_in**2 + d_out**2 + d_in * d_out) < d_out * d_in * (d_in + d_out)


@dataclass(frozen=True)
class OuterProduct:
    """V = 𝒢ᵀ𝒜 by its factors, which are cheaper to multiply for few examples [MG15 §8, end]."""

    grads: Tensor  # 𝒢 (m, out)
    inputs: Tensor  # 𝒜 (m, in)

    def to_dense(self) -> Tensor:
        """V."""
        return self.grads.mT @ self.inputs

    def pays(self) -> bool:
        """Whether a product with A ⊗ G needs fewer multiplications with the factors than with V."""
        shape = self.grads.shape[1], self.inputs.shape[1]
        return low_rank_pays(shape, len(self.grads))


@dataclass(frozen=True)
class KroneckerProduct(Storable):
    """A ⊗ G, for symmetric A and G; a diagonal factor may be given as a vector."""

    A: Tensor  # (in, in), or (in,)
    G: Tensor  # (out, out), or (out,)

    def shapes(self, rows: int, columns: int) -> Shapes:
        return {"A": [(columns, columns), (columns,)], "G": [(rows, rows), (rows,)]}

    def mv(self, V: Tensor | OuterProduct) -> Tensor:
        """G V A."""
        if not isinstance(V, OuterProduct):
            return multiply_right(multiply_left(self.G, V), self.A)
        if not V.pays():
            return self.mv(V.to_dense())
        return multiply_right(V.grads, self.G).mT @ multiply_right(V.inputs, self.A)

    def to_dense(self) -> Tensor:
        return kron(*(torch.diag(M) if M.dim() == 1 else M for M in (self.A, self.G)))


def multiply_left(M: Tensor, V: Tensor) -> Tensor:
    """M V; a diagonal M may be given as a vector."""
    return M[:, None] * V if M.dim() == 1 else M @ V


def multiply_right(V: Tensor, M: Tensor) -> Tensor:
    """V M; a diagonal M may be given as a vector."""
    return V * M if M.dim() == 1 else V @ M


@dataclass(frozen=True)
class InverseInEigenbasis(Storable):
    """V ↦ E_G [(E_Gᵀ V E_A) ⊘ (S + D)] E_Aᵀ with D = d_G 1ᵀ + 1 d_Aᵀ.

    With S = s_G s_Aᵀ and D = ξ this is (A ⊗ G + ξ I)⁻¹, the simpler form at the end of [MG15 App. B]. EKFAC
    estimates another S. A basis of None is the identity.
    """

    E_A: Tensor | None  # (in, in)
    E_G: Tensor | None  # (out, out)
    S: Tensor  # (out, in)
    d_A: Tensor  # (in,)
    d_G: Tensor  # (out,)
    observed: int = 0
    """The number of steps whose statistics are in S."""

    def shapes(self, rows: int, columns: int) -> Shapes:
        bases: Shapes = {"E_A": (columns, columns), "E_G": (rows, rows)}
        return {**bases, "S": (rows, columns), "d_A": (columns,), "d_G": (rows,)}

    def mv(self, V: Tensor) -> Tensor:
        U = rotate(rotate(V, self.E_A).mT, self.E_G).mT / self.eigenvalues()
        U = U if self.E_G is None else self.E_G @ U
        return U if self.E_A is None else U @ self.E_A.mT

    def to_dense(self) -> Tensor:
        bases = zip((self.E_A, self.E_G), reversed(self.S.shape), strict=True)
        E = kron(*(self.S.new_ones(n).diag() if E is None else E for E, n in bases))
        return (E / self.eigenvalues().mT.reshape(-1)) @ E.mT

    def eigenvalues(self) -> Tensor:
        """S + D (out, in), the eigenvalues of the matrix that is inverted."""
        return (self.S + self.d_A).add_(self.d_G.unsqueeze(1))


def rotate(x: Tensor, E: Tensor | None) -> Tensor:
    """Vectors (…, features) in the basis E, Eᵀx."""
    return x if E is None else x @ E


def dot(u: Matrices, v: Matrices) -> Tensor:
    """uᵀv, summed over the units in float64."""
    parts = [torch.dot(a.reshape(-1), b.reshape(-1)).double() for a, b in zip(u, v, strict=True)]
    return torch.stack(parts).sum()


def take(tensor: Tensor, index: Tensor | slice) -> Tensor:
    """tensor[index] along the first dimension: a view for a slice.

    `index_select` takes a third of the time of indexing, which matters for small networks.
    """
    if isinstance(index, slice):
        return tensor[index]
    return tensor.index_select(0, index.to(tensor.device))


STRIP = 192
"""Rows of the product that a CPU computes at a time. Fewer rows make slow small products; more rows waste
half of each block on the diagonal. Measured for 250 to 1,000 vectors of 400 to 1,600 numbers."""


def add_gram(total: Tensor | None, x: Tensor, decay: float, weight: float) -> Tensor:
    """decay · total + weight · xᵀx, (n, n), for x (vectors, n) and a symmetric `total`, or None for zeros.

    Computed strip by strip, each up to the diagonal and then mirrored; on a GPU as one product.
    """
    n = x.shape[1]
    strips = round(n / STRIP) if x.device.type == "cpu" else 1
    if strips < 2:
        if total is None:
            return (x.mT @ x).mul_(weight)
        return torch.addmm(total, x.mT, x, beta=decay, alpha=weight)
    result = x.new_empty(n, n)
    for strip in range(strips):
        start, stop = strip * n // strips, (strip + 1) * n // strips
        own, left, right = result[start:stop, :stop], x[:, start:stop].mT, x[:, :stop]
        if total is None:
            own.addmm_(left, right, beta=0, alpha=weight)  # β = 0 does not read the empty memory
        else:
            before = total[start:stop, :stop]
            torch.addmm(before, left, right, beta=decay, alpha=weight, out=own)
        result[:start, start:stop] = own[:, :start].mT
    return result
