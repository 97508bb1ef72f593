"""A sum of two Kronecker products, for a unit that is used both ways: A₁ ⊗ G₁ + A₂ ⊗ G₂.

A tied embedding and language-model head, or the weight of a tied autoencoder, is multiplied as s = V ā in
one place and as s = Vᵀ ā in another. The gradient of an example is the sum of both uses' gradients. Without
the correlation between the two, its second moment is the sum of theirs, each factorised as in
`KroneckerBlock`:

    direct:      A₁ = mean of ā āᵀ,   G₁ = Σ g gᵀ
    transposed:  A₂ = Σ g gᵀ,         G₂ = mean of ā āᵀ

with A for the columns and G for the rows. A vocabulary has many rows: G₁ and G₂ are then kept as diagonals,
so that no matrix of rows times rows is needed.
"""

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from kronfac.curvature.block import Average, Block, Moments
from kronfac.curvature.kronecker import (
    FactorAverage,
    KroneckerBlock,
    KroneckerMoments,
    transposed,
    uses_of,
)
from kronfac.curvature.taps import GroupedTap, Tap, Taps
from kronfac.curvature.tikhonov import FactoredTikhonov, Tikhonov, mean_eigenvalue
from kronfac.linalg import KroneckerSumInverse, invert_sum
from kronfac.storage import Layout


@dataclass(frozen=True)
class KroneckerSumMoments(Moments):
    """The factors of both products."""

    direct: KroneckerMoments
    transposed: KroneckerMoments

    def check(self, *units: Layout) -> None:
        super().check(*units)
        self.direct.check(*units)
        self.transposed.check(*units)

    def damped(self, gamma: float, tikhonov: Tikhonov) -> KroneckerSumInverse:
        """The inverse of Σₖ (Aₖ + πₖγₖI) ⊗ (Gₖ + γₖ/πₖ I).

        γ is divided by the products' sizes tₖ, the product of the mean eigenvalues of their factors:
        γₖ² = γ² tₖ / (t₁ + t₂). Then γ₁² + γ₂² = γ², so that γ²I is added in total, beside the cross terms;
        every factor gets the same share γ / (t₁ + t₂)^½ of its own mean eigenvalue; and if one product is
        zero, the other one gets its usual damping.

        Deviation: the exact form, with γ²I added to the sum, has no inverse in Kronecker factors, because
        three matrices can't be diagonalised together. The factored form replaces it.
        """
        rule = tikhonov if isinstance(tikhonov, FactoredTikhonov) else FactoredTikhonov()
        products = (self.direct, self.transposed)
        sizes = torch.stack([_root_size(m) for m in products])
        if not bool(sizes.any()):
            sizes = torch.ones_like(sizes)
        gammas = [float(share) * gamma for share in sizes / sizes.norm()]
        shifted = [rule.damp(m.A, m.G, g) for m, g in zip(products, gammas, strict=True)]
        # The larger product certainly has damping.
        (A, B), (C, D) = shifted if gammas[0] >= gammas[1] else shifted[::-1]
        return invert_sum(A, B, C, D)

    def trace(self) -> Tensor:
        """tr(A₁) tr(G₁) + tr(A₂) tr(G₂)."""
        return self.direct.trace() + self.transposed.trace()

    def factor_traces(self) -> Tensor:
        """tr(A₁) tr(G₁) + tr(A₂) tr(G₂), where no factor is kept as its diagonal."""
        return self.direct.factor_traces() + self.transposed.factor_traces()

    def dense(self) -> Tensor:
        """A₁ ⊗ G₁ + A₂ ⊗ G₂."""
        return self.direct.dense() + self.transposed.dense()

    @property
    def size(self) -> int:
        return self.direct.size


def _root_size(moments: KroneckerMoments) -> Tensor:
    """√t, float64."""
    # Root by root: the product may be larger than the dtype of the factors can hold.
    root_A, root_G = (
        mean_eigenvalue(M).double().clamp(min=0).sqrt() for M in (moments.A, moments.G)
    )
    return root_A * root_G


@dataclass(frozen=True)
class KroneckerSumBlock(Block):
    """A₁ ⊗ G₁ + A₂ ⊗ G₂.

    Args:
        direct: how to factorise the uses s = V ā.
        transposed: how to factorise the uses s = Vᵀ ā. In both, `diagonal_inputs` is about A, the factor of
            the columns, and `diagonal_grads` about G, the factor of the rows.
    """

    moments: ClassVar[type[Moments]] = KroneckerSumMoments
    direct: KroneckerBlock = field(default_factory=KroneckerBlock)
    transposed: KroneckerBlock = field(default_factory=KroneckerBlock)

    def observe(self, taps: Taps, weight: float) -> Moments:
        average = self.average(None, 0.0)
        average.add(taps, 1.0, weight)
        return average.value()

    def average(self, old: Moments | None, decay: float) -> "KroneckerSumAverage":
        assert old is None or isinstance(old, KroneckerSumMoments)
        return KroneckerSumAverage(self, old, decay)


class KroneckerSumAverage(Average):
    """A `FactorAverage` for each product."""

    def __init__(
        self, block: KroneckerSumBlock, old: KroneckerSumMoments | None, decay: float
    ) -> None:
        self._new = old is None
        direct, transposed = (None, None) if old is None else (old.direct, old.transposed)
        self._averages = (
            FactorAverage(block.direct, direct, decay),
            FactorAverage(block.transposed, transposed, decay),
        )
        self.products = [product for average in self._averages for product in average.products]

    def add(self, taps: Taps, each: float, weight: float) -> None:
        """Add the statistics of one backward pass. A product without any use starts at 0."""
        uses = uses_of(taps)
        if self._new and uses:
            self._new = False
            for direction, average in enumerate(self._averages):
                average.add([_zeros(uses[0], bool(direction))], 0.0, 0.0)
        for direction, average in enumerate(self._averages):
            average.add([tap for tap in uses if transposed([tap]) == direction], each, weight)

    def value(self) -> KroneckerSumMoments:
        direct, other = (average.value() for average in self._averages)
        assert isinstance(direct, KroneckerMoments)
        assert isinstance(other, KroneckerMoments)
        return KroneckerSumMoments(direct, other)


def _zeros(like: Tap | GroupedTap, direction: bool) -> Tap:
    """A use by one example in this direction, all zeros."""
    inputs, grads = like.inputs.shape[-1], like.grads.shape[-1]
    if transposed([like]) != direction:
        inputs, grads = grads, inputs
    new = like.grads.new_zeros
    return Tap(new(1, 1, inputs), new(1, 1, grads), transposed=direction)
