"""F̃ with all its blocks A_ij ⊗ G_ij, its two approximations and their inverses [MG15 §3, §4].

    F̃   every block, exact expectations                          §3
    F̆   the diagonal blocks of F̃                                 §4.2
    F̂   agrees with F̃ on the tridiagonal blocks, and its inverse is block-tridiagonal   §4.3

F̆⁻¹ and F̂⁻¹ are made by the inverses that KFAC multiplies with, here written out; F̃⁻¹, which nobody
computes in training, is a dense inverse.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kronfac.curvature import (
    BlockDiagonalInverse,
    BlockTridiagonalInverse,
    Curvature,
    FactoredTikhonov,
    KroneckerMoments,
    Link,
)
from kronfac.curvature.block_tridiagonal import DampedChain
from kronfac.errors import NotPositiveDefiniteError
from kronfac.linalg import inverse_from_cholesky, symmetrize
from kronfac.linalg.kronecker import kron
from kronfac_experiments.diagnostics.block_matrix import BlockMatrix, filled
from kronfac_experiments.diagnostics.fisher import Examples, add

Blocks = tuple[tuple[Tensor, ...], ...]
"""Blocks[i][j], a matrix for every pair of layers."""


def kronecker_fisher(examples: Examples) -> "KroneckerFisher":
    """F̃_ij = A_ij ⊗ G_ij with A_ij = E[ā_i ā_jᵀ] and G_ij = E[g_i g_jᵀ], for all i and j.

    Of a part of the layers it is that part of F̃, and its inverse is the inverse of that part.
    """
    count = len(examples.names)
    A: dict[tuple[int, int], Tensor] = {}
    G: dict[tuple[int, int], Tensor] = {}
    for part in examples:
        for i in range(count):
            for j in range(i, count):
                # A sum over y is a sum over more rows.
                g, h = part[i].g.flatten(0, 1), part[j].g.flatten(0, 1)
                add(A, (i, j), part[i].a.mT @ part[j].a)
                add(G, (i, j), g.mT @ h)

    def mean(sums: dict[tuple[int, int], Tensor], i: int, j: int) -> Tensor:
        if i > j:
            return mean(sums, j, i).mT
        moments = sums[i, j] / examples.count
        return symmetrize(moments) if i == j else moments

    return KroneckerFisher(
        A=tuple(tuple(mean(A, i, j) for j in range(count)) for i in range(count)),
        G=tuple(tuple(mean(G, i, j) for j in range(count)) for i in range(count)),
        names=examples.names,
    )


@dataclass(frozen=True)
class KroneckerFisher:
    """F̃ by its factors; `dense()` and the other methods write matrices out."""

    A: Blocks  # A[i][j] (in_i, in_j)
    G: Blocks  # G[i][j] (out_i, out_j)
    names: tuple[str, ...]
    """Names of the layers."""

    @property
    def sizes(self) -> tuple[int, ...]:
        """Weights of each layer."""
        return tuple(len(self.A[i][i]) * len(self.G[i][i]) for i in range(len(self.names)))

    @property
    def curvature(self) -> Curvature:
        """The factors that KFAC keeps of these, the diagonal and the neighbouring ones."""
        last = len(self.names) - 1
        return Curvature(
            blocks=tuple(KroneckerMoments(self.A[i][i], self.G[i][i]) for i in range(last + 1)),
            links=tuple(Link(self.A[i][i + 1], self.G[i][i + 1]) for i in range(last)),
        )

    def damped(self, gamma: float) -> "KroneckerFisher":
        """(A_ii + π_i γ I) ⊗ (G_ii + γ/π_i I) for the diagonal blocks; the others as they are [§6.3].

        With γ > 0 this is positive definite: at least γ² I more than F̃.
        """
        A, G = ([list(row) for row in blocks] for blocks in (self.A, self.G))
        for i in range(len(self.names)):
            A[i][i], G[i][i] = FactoredTikhonov().damp(A[i][i], G[i][i], gamma)
        return replace(self, A=tuple(map(tuple, A)), G=tuple(map(tuple, G)))

    def dense(self) -> BlockMatrix:
        """F̃."""
        return self._written_out(self.A, self.G)

    def inverse(self) -> BlockMatrix:
        """F̃⁻¹, by the Cholesky factor of the dense matrix.

        Raises:
            NotPositiveDefiniteError: F̃ is singular to rounding; `damped` with a larger γ is not.
        """
        F = self.dense()
        return replace(F, dense=inverse_from_cholesky(_strict_cholesky(F.dense, "F̃")))

    def block_diagonal(self) -> BlockMatrix:
        """F̆ = diag(F̃₁₁, F̃₂₂, …)."""
        blocks = [block.dense() for block in self.curvature.blocks]
        return BlockMatrix(torch.block_diag(*blocks), self.names, self.sizes)

    def block_diagonal_inverse(self) -> BlockMatrix:
        """F̆⁻¹ = diag(A₁₁⁻¹ ⊗ G₁₁⁻¹, …), as `BlockDiagonalInverse` has it.

        Raises:
            NotPositiveDefiniteError: a factor is singular to rounding.
        """
        self._check_factors()
        # The damping is in the factors already, if they are damped.
        damped = BlockDiagonalInverse().prepare(self.curvature).damped(0.0)
        blocks = [piece.to_dense() for piece in damped.pieces]  # type: ignore[union-attr]
        return BlockMatrix(torch.block_diag(*blocks), self.names, self.sizes)

    def block_tridiagonal(self) -> BlockMatrix:
        """F̂, from the chain F̂_ij = Ψ_i F̂_{i+1,j} for j > i + 1.

        Ψ_i = Ψᴬ_i ⊗ Ψᴳ_i, so that every block of F̂ is a Kronecker product, as every block of F̃ is.

        Raises:
            NotPositiveDefiniteError: a factor is singular to rounding.
        """
        chain = self._chain()
        return self._written_out(_continued(self.A, chain.Psi_A), _continued(self.G, chain.Psi_G))

    def block_tridiagonal_inverse(self) -> BlockMatrix:
        """F̂⁻¹ = Ξᵀ Λ Ξ, as `BlockTridiagonalInverse` has it.

        Raises:
            NotPositiveDefiniteError: a factor is singular to rounding.
        """
        chain = self._chain()
        # Λ is block-diagonal and Ξ has two blocks in a row, so that no product is of whole matrices:
        # Λ_i + Ψ_{i−1}ᵀ Λ_{i−1} Ψ_{i−1} on the diagonal and −Λ_i Ψ_i above it.
        Lambda = [Sigma_inv.to_dense() for Sigma_inv in chain.Sigma_inv]
        Psi = [kron(A, G) for A, G in zip(chain.Psi_A, chain.Psi_G, strict=True)]
        above = [-(L @ P) for L, P in zip(Lambda, Psi, strict=False)]

        def block(i: int, j: int) -> Tensor | None:
            if i > j:
                value = block(j, i)
                return None if value is None else value.mT
            if i < j:
                return above[i] if j == i + 1 else None
            return symmetrize(Lambda[i] - Psi[i - 1].mT @ above[i - 1]) if i else Lambda[0]

        return filled(self.names, self.sizes, block, like=Lambda[0])

    def _chain(self) -> DampedChain:
        self._check_factors()
        (chain,) = BlockTridiagonalInverse().prepare(self.curvature).damped(0.0).pieces
        assert isinstance(chain, DampedChain)
        return chain

    def _written_out(self, A: Blocks, G: Blocks) -> BlockMatrix:
        return filled(self.names, self.sizes, lambda i, j: kron(A[i][j], G[i][j]), like=A[0][0])

    def _check_factors(self) -> None:
        # In training a singular factor gets a little jitter, which here would pass for the truth.
        for i, name in enumerate(self.names):
            _strict_cholesky(self.A[i][i], f"A of layer {name!r}")
            _strict_cholesky(self.G[i][i], f"G of layer {name!r}")


def _strict_cholesky(M: Tensor, name: str) -> Tensor:
    """L with L Lᵀ = M, refused if rounding decides what L is."""
    L: Tensor
    L, info = torch.linalg.cholesky_ex(M)
    pivots = L.diagonal().square()
    if int(info) or not bool(pivots.min() > len(M) * torch.finfo(M.dtype).eps * pivots.max()):
        raise NotPositiveDefiniteError(
            f"{name} ({len(M)} × {len(M)}) is singular to rounding and has no inverse. Damp it: "
            "kronecker_fisher(…).damped(gamma), with a larger γ if it is damped already."
        )
    return L


def _continued(M: Blocks, Psi: Sequence[Tensor]) -> Blocks:
    """M with the blocks beyond the neighbouring ones replaced by M_ij = Ψ_i M_{i+1,j}."""
    blocks = [list(row) for row in M]
    count = len(blocks)
    for distance in range(2, count):
        for i in range(count - distance):
            j = i + distance
            blocks[i][j] = Psi[i] @ blocks[i + 1][j]
            blocks[j][i] = blocks[i][j].mT
    return tuple(map(tuple, blocks))
