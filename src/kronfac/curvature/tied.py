"""A sum of two Kronecker products, for a unit that is used both ways: A₁ ⊗ G₁ + A₂ ⊗ G₂.

A tied embedding and language-model head, or the weight of a tied autoencoder, is multiplied as s = V ā in
one place and as s = Vᵀ ā in another. The gradient of an example is the sum of both uses' gradients. With
what correlates the two left out, its second moment is the sum of theirs, each factorised as
`KroneckerBlock` does it:

    direct:      A₁ = mean of ā āᵀ,   G₁ = Σ g gᵀ
    transposed:  A₂ = Σ g gᵀ,         G₂ = mean of ā āᵀ

with A on the side of the columns and G on that of the rows. Rows may be many, as those of a vocabulary; the
factors on their side are kept as diagonals then, and nothing is as large as rows times rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from kronfac.curvature.block import Block, Moments, Part
from kronfac.curvature.kronecker import KroneckerAverage, KroneckerBlock, KroneckerMoments
from kronfac.curvature.taps import SummedGradient, Tap, Taps
from kronfac.curvature.tikhonov import FactoredTikhonov, Tikhonov
from kronfac.linalg import KroneckerSumInverse, invert_sum, shift_diagonal
from kronfac.storage import Layout


@dataclass(frozen=True)
class KroneckerSumMoments(Moments):
    """The factors of both products."""

    direct: KroneckerMoments
    transposed: KroneckerMoments

    def check(self, *units: Layout) -> None:
        """Raise a StateError if they can't be of this unit."""
        super().check(*units)
        self.direct.check(*units)
        self.transposed.check(*units)

    def damped(self, gamma: float, tikhonov: Tikhonov) -> KroneckerSumInverse:
        """The inverse of Σₖ (Aₖ + πₖγₖI) ⊗ (Gₖ + γₖ/πₖ I).

        γ is divided between the products by their sizes tₖ, the product of the mean eigenvalues of their
        factors (or of their sizes in another norm): γₖ² = γ² tₖ / (t₁ + t₂). Then γ₁² + γ₂² = γ², so that
        γ²I is what is added in all beside the cross terms; every factor gets the same share
        γ / (t₁ + t₂)^½ of its own mean eigenvalue; and if one of the products vanishes, the damping is
        that of the other alone.

        Deviation: the exact form, γ²I added to the sum, has no inverse by Kronecker factors: three matrices
        on one side can't be diagonalised together. The factored form stands for it.
        """
        rule = tikhonov if isinstance(tikhonov, FactoredTikhonov) else FactoredTikhonov()
        products = (self.direct, self.transposed)
        sizes = torch.stack([_root_size(m, rule) for m in products])
        if not bool(sizes.any()):
            sizes = torch.ones_like(sizes)
        gammas = [float(share) * gamma for share in sizes / sizes.norm()]
        shifted = [_shifted(m, rule, g) for m, g in zip(products, gammas, strict=True)]
        # The larger product is the one that has damping for certain.
        (A, B), (C, D) = shifted if gammas[0] >= gammas[1] else shifted[::-1]
        return invert_sum(A, B, C, D)

    def trace(self) -> Tensor:
        """tr(A₁) tr(G₁) + tr(A₂) tr(G₂)."""
        return self.direct.trace() + self.transposed.trace()

    def factor_traces(self) -> Tensor:
        """The sum of those of both products."""
        return self.direct.factor_traces() + self.transposed.factor_traces()

    def dense(self) -> Tensor:
        """A₁ ⊗ G₁ + A₂ ⊗ G₂."""
        return self.direct.dense() + self.transposed.dense()

    def probe(self) -> list[Tensor]:
        """The traces of all factors."""
        return [*self.direct.probe(), *self.transposed.probe()]

    @property
    def size(self) -> int:
        """The number of parameters."""
        return self.direct.size


def _root_size(moments: KroneckerMoments, rule: FactoredTikhonov) -> Tensor:
    """√t = (‖A ⊗ I‖ ‖I ⊗ G‖)^½, float64."""
    # Root by root: the product may be larger than the dtype of the factors can hold.
    root_A, root_G = (
        size.double().clamp(min=0).sqrt() for size in rule.sizes(moments.A, moments.G)
    )
    return root_A * root_G


def _shifted(
    moments: KroneckerMoments, rule: FactoredTikhonov, gamma: float
) -> tuple[Tensor, Tensor]:
    """A + πγI and G + γ/π I."""
    shift_A, shift_G = rule.shifts(moments.A, moments.G, gamma)
    return shift_diagonal(moments.A, shift_A), shift_diagonal(moments.G, shift_G)


@dataclass(frozen=True)
class KroneckerSumBlock(Block):
    """A₁ ⊗ G₁ + A₂ ⊗ G₂.

    Args:
        direct: how the uses s = V ā are factorised.
        transposed: how the uses s = Vᵀ ā are. In both, `diagonal_inputs` is for A, the side of the columns,
            and `diagonal_grads` for G, the side of the rows.
    """

    moments: ClassVar[type[Moments]] = KroneckerSumMoments
    direct: KroneckerBlock = field(default_factory=KroneckerBlock)
    transposed: KroneckerBlock = field(default_factory=KroneckerBlock)

    def observe(self, taps: Taps, share: float, weight: float) -> KroneckerSumMoments:
        """The moments of one backward pass."""
        average = KroneckerSumAverage(self, None, 0.0)
        average.add(taps, True, share, weight)
        return average.value()

    def average(self, old: Moments | None, decay: float) -> "KroneckerSumAverage":
        """The moving averages of both products."""
        assert old is None or isinstance(old, KroneckerSumMoments)
        return KroneckerSumAverage(self, old, decay)


class KroneckerSumAverage:
    """A `KroneckerAverage` for each product."""

    def __init__(
        self, block: KroneckerSumBlock, old: KroneckerSumMoments | None, decay: float
    ) -> None:
        self._block = block
        self._direct = KroneckerAverage(block.direct, None if old is None else old.direct, decay)
        self._transposed = KroneckerAverage(
            block.transposed, None if old is None else old.transposed, decay
        )
        self._used = [old is not None] * 2

    def add(self, taps: Taps, first: bool, share: float, weight: float) -> None:
        """Add what one backward pass shows."""
        assert not isinstance(taps, SummedGradient), "a Kronecker block needs the uses of its unit"
        uses = [tap for tap in taps if isinstance(tap, Tap)]
        assert len(uses) == len(taps), "a Kronecker block needs inputs and gradients of every use"
        for i, average in enumerate((self._direct, self._transposed)):
            part = [tap for tap in uses if tap.transposed == bool(i)]
            self._used[i] = self._used[i] or bool(part)
            average.add(part, first, share, weight)

    def value(self) -> KroneckerSumMoments:
        """The averages with everything that was added; a product without any use is 0."""
        if all(self._used) or not any(self._used):
            return KroneckerSumMoments(self._direct.value(), self._transposed.value())
        if self._used[0]:
            direct = self._direct.value()
            return KroneckerSumMoments(direct, _zeros(self._block.transposed, direct))
        transposed = self._transposed.value()
        return KroneckerSumMoments(_zeros(self._block.direct, transposed), transposed)

    def count_by_vector(self) -> None:
        """Let every vector ā count 1, in both products."""
        for average in self._averages:
            average.count_by_vector()

    def parts(self) -> list[Part]:
        """All sums, those of the direct uses first; zeros for a product without any use here."""
        used = [average for average, u in zip(self._averages, self._used, strict=True) if u]
        like = KroneckerMoments(*(side.sum for side in used[0].sides))
        blocks = (self._block.direct, self._block.transposed)
        for number, (average, block) in enumerate(zip(self._averages, blocks, strict=True)):
            if not self._used[number]:
                average.begin(_zeros(block, like), transposed=bool(number))
        return [part for average in self._averages for part in average.parts()]

    def counts(self) -> list[float]:
        """Those of both products."""
        return [count for average in self._averages for count in average.counts()]

    def recount(self, counts: Sequence[float]) -> None:
        """Take over the numbers on all ranks; a product that any of them uses is one."""
        for number, average in enumerate(self._averages):
            own = counts[2 * number : 2 * number + 2]
            average.recount(own)
            self._used[number] = max(own) > 0

    @property
    def _averages(self) -> tuple[KroneckerAverage, KroneckerAverage]:
        return self._direct, self._transposed


def _zeros(block: KroneckerBlock, like: KroneckerMoments) -> KroneckerMoments:
    """Factors that are 0, of the shapes that this block would give them."""
    sides = ((like.A, block.diagonal_inputs), (like.G, block.diagonal_grads))
    A, G = (M.new_zeros((len(M),) if diagonal else (len(M), len(M))) for M, diagonal in sides)
    return KroneckerMoments(A, G)
