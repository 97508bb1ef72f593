"""F̆⁻¹ = diag(A₀⁻¹ ⊗ G₁⁻¹, A₁⁻¹ ⊗ G₂⁻¹, …) [MG15 §4.2], and other blocks by themselves."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kronfac.curvature.block import Moments
from kronfac.curvature.dense import DenseMoments, DenseOperator
from kronfac.curvature.inverse import ApproximateInverse, DampedInverse, Piece, failed
from kronfac.curvature.kronecker import KroneckerMoments
from kronfac.curvature.moments import Curvature
from kronfac.curvature.tikhonov import ExactTikhonov, FactoredTikhonov, Tikhonov
from kronfac.errors import NonFiniteError, NotPositiveDefiniteError
from kronfac.linalg import (
    EigenKroneckerSum,
    KroneckerProduct,
    each,
    eigh,
    low_rank_pays,
    shifted_inverses,
)


@dataclass(frozen=True)
class BlockDiagonalInverse(ApproximateInverse):
    """The Fisher as if units were independent: U_i = G_i⁻¹ V_i A_i⁻¹.

    Args:
        tikhonov: how the damping enters, `FactoredTikhonov(norm)` or `ExactTikhonov()`.
        low_rank: multiply 𝒢 (out, m) and 𝒜 (m, in) by the inverses before each other, for layers
            for which that is cheaper (m < d), if `KFAC.closure` found the gradient by hand. The weight
            decay's part η F̆⁻¹θ of these layers is kept apart and refreshed with the inverse, whatever the
            closure [MG15 §8, end]. None does so if it changes nothing but rounding: without weight decay,
            if for one layer at least it takes half the multiplications.
    """

    tikhonov: Tikhonov = field(default_factory=FactoredTikhonov)
    low_rank: bool | None = None

    def __post_init__(self) -> None:
        if self.low_rank and isinstance(self.tikhonov, ExactTikhonov):
            raise ValueError(
                "BlockDiagonalInverse(low_rank=True) needs a Kronecker-factored inverse; "
                "ExactTikhonov has none. Use FactoredTikhonov."
            )

    def wants_factors(
        self, shapes: Sequence[tuple[int, int]], examples: int, weight_decay: float
    ) -> bool:
        if self.low_rank is not None:
            return self.low_rank
        if weight_decay or isinstance(self.tikhonov, ExactTikhonov):
            return False
        return any(low_rank_pays(shape, 2 * examples) for shape in shapes)

    def prepare(self, curvature: Curvature) -> "PreparedBlocks":
        return PreparedBlocks(curvature.blocks, self.tikhonov)


class PreparedBlocks:
    """Blocks that are inverted one by one."""

    def __init__(self, blocks: Sequence[Moments], tikhonov: Tikhonov) -> None:
        self._blocks = blocks
        self._tikhonov = tikhonov
        self._eigen: dict[int, tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]] = {}
        if isinstance(tikhonov, ExactTikhonov):
            self._decompose()

    def damped(self, gamma: float) -> DampedInverse:
        """All blocks, or in the place of one that has no inverse why it has none."""
        pieces: dict[int, Piece] = {}
        factored = [i for i, b in enumerate(self._blocks) if isinstance(b, KroneckerMoments)]
        if isinstance(self._tikhonov, FactoredTikhonov):
            pieces |= zip(factored, self._factored(factored, gamma), strict=True)
        for i, ((s_A, E_A), (s_G, E_G)) in self._eigen.items():
            pieces[i] = EigenKroneckerSum(E_A, s_A, E_G, s_G, gamma**2)
        pieces |= self._dense(gamma)
        for i, block in enumerate(self._blocks):
            if i not in pieces:
                pieces[i] = self._one(block, gamma)
        return DampedInverse(tuple(pieces[i] for i in range(len(self._blocks))))

    def _factored(self, indices: Sequence[int], gamma: float) -> list[Piece]:
        """Kronecker blocks, all their factors at once: in parallel, equal shapes in one call."""
        assert isinstance(self._tikhonov, FactoredTikhonov)
        pairs = [(b.A, b.G) for b in self._blocks if isinstance(b, KroneckerMoments)]
        shifts = [self._tikhonov.shifts(A, G, gamma) for A, G in pairs]
        matrices = [*(A for A, _ in pairs), *(G for _, G in pairs)]
        names = [f"{side}[{i}]" for side in "AG" for i in indices]
        inverted = shifted_inverses(
            matrices, [*(a for a, _ in shifts), *(g for _, g in shifts)], names
        )
        pieces: list[Piece] = []
        for A, G in zip(inverted[: len(pairs)], inverted[len(pairs) :], strict=True):
            if isinstance(A, Tensor) and isinstance(G, Tensor):
                pieces.append(KroneckerProduct(A, G))
            else:
                pieces.append(failed(A if isinstance(A, Exception) else G))  # type: ignore[arg-type]
        return pieces

    def _dense(self, gamma: float) -> dict[int, Piece]:
        """Dense blocks by number, all at once as well: networks have dozens of normalisation layers."""
        # One that only extends DenseMoments may invert in its own way.
        dense = {i: b for i, b in enumerate(self._blocks) if type(b) is DenseMoments}
        matrices = [M for b in dense.values() for M in b.M]
        shifts = [M.new_tensor(gamma**2) for M in matrices]
        names = [f"M[{i}]" for i, b in dense.items() for _ in b.M]
        inverted = iter(shifted_inverses(matrices, shifts, names))
        pieces: dict[int, Piece] = {}
        for i, block in dense.items():
            parts = [next(inverted) for _ in block.M]
            good = [part for part in parts if isinstance(part, Tensor)]
            bad = [part for part in parts if not isinstance(part, Tensor)]
            pieces[i] = (
                failed(bad[0])
                if bad
                else DenseOperator(torch.stack(good), block.rows, block.columns)
            )
        return pieces

    def _one(self, block: Moments, gamma: float) -> Piece:
        try:
            return block.damped(gamma, self._tikhonov)
        except (NonFiniteError, NotPositiveDefiniteError) as failure:
            return failed(failure)

    def _decompose(self) -> None:
        """Eigendecompositions for the exact form; a block that has none is left for `_one` to say so."""
        dense = {
            i: b
            for i, b in enumerate(self._blocks)
            if isinstance(b, KroneckerMoments) and b.A.dim() == b.G.dim() == 2
        }
        matrices = [*(b.A for b in dense.values()), *(b.G for b in dense.values())]
        decomposed = each(_eigh, matrices, [f"{s}[{i}]" for s in "AG" for i in dense])
        for i, A, G in zip(dense, decomposed[: len(dense)], decomposed[len(dense) :], strict=True):
            if A is not None and G is not None:
                self._eigen[i] = (A, G)


def _eigh(M: Tensor, name: str) -> tuple[Tensor, Tensor] | None:
    try:
        return eigh(M, name)
    except NonFiniteError:
        return None
