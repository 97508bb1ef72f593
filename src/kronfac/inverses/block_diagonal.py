"""F̆⁻¹ = diag(A₀⁻¹ ⊗ G₁⁻¹, A₁⁻¹ ⊗ G₂⁻¹, …) [MG15 §4.2]."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from kronfac.factors import KroneckerFactors
from kronfac.inverses.base import ApproximateInverse, DampedInverse, Matrices
from kronfac.inverses.damping import ExactTikhonov, FactoredTikhonov, factor_names
from kronfac.linalg import (
    EigenKroneckerSum,
    KroneckerProduct,
    each,
    eigh,
    low_rank_pays,
    shifted_inverses,
)

Block = KroneckerProduct | EigenKroneckerSum


@dataclass(frozen=True)
class BlockDiagonalInverse(ApproximateInverse):
    """The Fisher as if layers were independent: U_i = G_i⁻¹ V_i A_i⁻¹.

    Args:
        tikhonov: how the damping enters, `FactoredTikhonov(norm)` or `ExactTikhonov()`.
        low_rank: multiply 𝒢 (out, m) and 𝒜 (m, in) by the inverses before each other, for layers
            where that is cheaper (m < d). The gradient then has to come from `KFAC.closure`, and the
            weight decay's part η F̆⁻¹θ is kept apart and refreshed with the inverse [MG15 §8, end]. None
            for where that changes nothing but rounding: without weight decay, for gradients that
            `KFAC.closure` found by hand, if for one layer at least it takes half the multiplications.
    """

    tikhonov: FactoredTikhonov | ExactTikhonov = field(default_factory=FactoredTikhonov)
    low_rank: bool | None = None

    def __post_init__(self) -> None:
        if self.low_rank and isinstance(self.tikhonov, ExactTikhonov):
            raise ValueError(
                "BlockDiagonalInverse(low_rank=True) needs a Kronecker-factored inverse; "
                "ExactTikhonov has none. Use FactoredTikhonov."
            )

    def wants_rows(
        self, shapes: Sequence[tuple[int, int]], cases: int, weight_decay: float
    ) -> bool:
        if self.low_rank is not None:
            return self.low_rank
        if weight_decay or isinstance(self.tikhonov, ExactTikhonov):
            return False
        return any(low_rank_pays(shape, 2 * cases) for shape in shapes)

    def prepare(self, factors: KroneckerFactors) -> "_Factored | _Exact":
        if isinstance(self.tikhonov, ExactTikhonov):
            count = len(factors.A)
            decomposed = each(eigh, (*factors.A, *factors.G), factor_names(count))
            return _Exact(tuple(decomposed[:count]), tuple(decomposed[count:]))
        return _Factored(factors, self.tikhonov)

    def load(self, packed: dict[str, Any]) -> "DampedBlockDiagonal":
        block = EigenKroneckerSum if isinstance(self.tikhonov, ExactTikhonov) else KroneckerProduct
        return DampedBlockDiagonal(tuple(block(**fields) for fields in packed["blocks"]))


@dataclass(frozen=True)
class DampedBlockDiagonal(DampedInverse):
    """One block a layer."""

    blocks: tuple[Block, ...]

    def mv(self, vectors: Sequence[Tensor]) -> Matrices:
        """U_i = G_i⁻¹ V_i A_i⁻¹."""
        return tuple(block.mv(V) for block, V in zip(self.blocks, vectors, strict=True))

    def mv_low_rank(
        self,
        vectors: Sequence[Tensor],
        outer: Sequence[tuple[Tensor, Tensor]],
        decayed: Sequence[Tensor] | None,
    ) -> Matrices:
        """F̆⁻¹(𝒢ᵀ𝒜 + ηθ) from 𝒢 (m, out), 𝒜 (m, in) and η F̆⁻¹θ, layer by layer where that is cheaper.

        Elsewhere it is `mv` of `vectors`, the same gradients multiplied out.
        """
        products = []
        for i, (block, V, (G_rows, A_rows)) in enumerate(
            zip(self.blocks, vectors, outer, strict=True)
        ):
            assert isinstance(block, KroneckerProduct)
            if not block.low_rank_pays(len(G_rows)):
                products.append(block.mv(V))
                continue
            U = block.mv_low_rank(G_rows, A_rows)
            products.append(U if decayed is None else U + decayed[i])
        return tuple(products)


@dataclass(frozen=True)
class _Factored:
    factors: KroneckerFactors
    tikhonov: FactoredTikhonov

    def damped(self, gamma: float) -> DampedBlockDiagonal:
        A, G = self.factors.A, self.factors.G
        shifts = self.tikhonov.shifts(self.factors, gamma)
        inverted = shifted_inverses((*A, *G), shifts, factor_names(len(A)))
        blocks = map(KroneckerProduct, inverted[: len(A)], inverted[len(A) :])
        return DampedBlockDiagonal(tuple(blocks))


@dataclass(frozen=True)
class _Exact:
    A: tuple[tuple[Tensor, Tensor], ...]  # eigenvalues and eigenvectors
    G: tuple[tuple[Tensor, Tensor], ...]

    def damped(self, gamma: float) -> DampedBlockDiagonal:
        return DampedBlockDiagonal(
            tuple(
                EigenKroneckerSum(E_A, s_A, E_G, s_G, gamma**2)
                for (s_A, E_A), (s_G, E_G) in zip(self.A, self.G, strict=True)
            )
        )
