"""F̆⁻¹ = diag(A₀⁻¹ ⊗ G₁⁻¹, A₁⁻¹ ⊗ G₂⁻¹, …) [MG15 §4.2]: every block is inverted by itself."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from kronfac.curvature.block import FactoredMoments, InverseCost, Moments, eigh_cost
from kronfac.curvature.dense import DenseMoments
from kronfac.curvature.grouped import GroupedKroneckerMoments
from kronfac.curvature.inverse import ApproximateInverse, Curvature, DampedInverse, Failed, Piece
from kronfac.curvature.kronecker import Eigen, Eigenbasis, KroneckerMoments, eigen
from kronfac.curvature.tikhonov import ExactTikhonov, FactoredTikhonov, Tikhonov
from kronfac.errors import NonFiniteError, NotPositiveDefiniteError
from kronfac.linalg import Failure, each, low_rank_pays, shifted_inverses


@dataclass(frozen=True)
class BlockDiagonalInverse(ApproximateInverse):
    """The Fisher as if units were independent: U_i = G_i⁻¹ V_i A_i⁻¹.

    Args:
        tikhonov: how the damping enters, `FactoredTikhonov(norm)` or `ExactTikhonov()`.
        low_rank: multiply 𝒢 (out, m) and 𝒜 (m, in) by the inverses before each other, for layers
            for which that is cheaper (m < d), if `KFAC.closure` found the gradient by hand and there is no
            weight decay [MG15 §8]. None does so if for one layer at least it takes half the
            multiplications.
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
        if weight_decay or isinstance(self.tikhonov, ExactTikhonov):
            return False
        if self.low_rank is not None:
            return self.low_rank
        return any(low_rank_pays(shape, 2 * examples) for shape in shapes)

    def cost(self, moments: Moments) -> InverseCost:
        exact = isinstance(self.tikhonov, ExactTikhonov)
        return cost_in_eigenbasis(moments) if exact else moments.inverse_cost()

    def prepare(self, curvature: Curvature) -> "PreparedBlocks":
        exact = isinstance(self.tikhonov, ExactTikhonov)
        return PreparedBlocks(curvature.blocks, self.tikhonov, in_eigenbases=exact)


def cost_in_eigenbasis(moments: Moments) -> InverseCost:
    """The cost of an inverse in the eigenbasis of A ⊗ G; for other blocks that of their own inverse."""
    if not isinstance(moments, KroneckerMoments):
        return moments.inverse_cost()
    sides = [len(M) for M in (moments.A, moments.G)]
    full = [len(M) for M in (moments.A, moments.G) if M.dim() == 2]
    return InverseCost(
        sum(n * n for n in full) + moments.size + sum(sides),
        sum(map(eigh_cost, full)),
        moments.size * (2 * sum(full) + 1),
    )


TOGETHER = (KroneckerMoments, GroupedKroneckerMoments, DenseMoments)
"""Moments whose matrices are inverted with those of other blocks."""


class PreparedBlocks:
    """Blocks that are inverted independently, Kronecker-factored ones optionally in their eigenbases."""

    def __init__(
        self, blocks: Sequence[Moments], tikhonov: Tikhonov, in_eigenbases: bool = False
    ) -> None:
        self._blocks, self._tikhonov = blocks, tikhonov
        self._bases: dict[int, Eigenbasis | Failure] = {}
        if in_eigenbases:
            factored = {i: b for i, b in enumerate(blocks) if isinstance(b, KroneckerMoments)}
            sides = [M for b in factored.values() for M in (b.A, b.G)]
            found = iter(
                each(_try_eigen, sides, [f"{side}[{i}]" for i in factored for side in "AG"])
            )
            self._bases = {i: _basis(next(found), next(found)) for i in factored}

    def damped(self, gamma: float) -> DampedInverse:
        """The inverses of all blocks; `Failed` for a block that has none."""
        together = self._together(gamma)
        return DampedInverse(
            tuple(
                together[i] if i in together else self._one(i, gamma)
                for i in range(len(self._blocks))
            )
        )

    def _together(self, gamma: float) -> dict[int, Piece]:
        """Invert the matrices of all blocks at once, by block: in parallel, and equal shapes in one call.

        This matters for networks with dozens of normalisation layers, whose dense blocks are small.
        """
        work = {
            i: block.shifted(gamma, self._tikhonov)
            for i, block in enumerate(self._blocks)
            # Not subclasses, which may have a `damped` of their own.
            if i not in self._bases and type(block) in TOGETHER
            if isinstance(block, FactoredMoments)
        }
        if not work:
            return {}
        matrices, shifts, names = zip(
            *((M, shift, f"{name}[{i}]") for i, own in work.items() for M, shift, name in own),
            strict=True,
        )
        inverted = iter(shifted_inverses(matrices, shifts, names))
        return {
            i: _assembled(self._blocks[i], [next(inverted) for _ in own]) for i, own in work.items()
        }

    def _one(self, number: int, gamma: float) -> Piece:
        block, basis = self._blocks[number], self._bases.get(number)
        if isinstance(basis, Exception):
            return Failed(str(basis))
        try:
            if basis is None:
                return block.damped(gamma, self._tikhonov)
            assert isinstance(block, KroneckerMoments)
            return basis.damped(block, gamma, self._tikhonov)
        except (NonFiniteError, NotPositiveDefiniteError) as failure:
            return Failed(str(failure))


def _assembled(block: Moments, inverted: Sequence[Tensor | Failure]) -> Piece:
    """The operator of the inverses of a block's matrices."""
    matrices = [M for M in inverted if isinstance(M, Tensor)]
    if len(matrices) < len(inverted):
        return Failed(str(next(M for M in inverted if not isinstance(M, Tensor))))
    assert isinstance(block, FactoredMoments)
    return block.assembled(matrices)


def _try_eigen(M: Tensor, name: str) -> Eigen | Failure:
    try:
        return eigen(M, name)
    except NonFiniteError as failure:
        return failure.with_traceback(None)  # the traceback would keep all tensors alive


def _basis(A: Eigen | Failure, G: Eigen | Failure) -> Eigenbasis | Failure:
    if not isinstance(A, tuple):
        return A
    return Eigenbasis(A, G) if isinstance(G, tuple) else G
