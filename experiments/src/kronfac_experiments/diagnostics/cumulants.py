"""The error of F̃ in cumulants of order three and four [MG15 §3.1, App. A].

For the weights [W_i]_{k₂k₁} and [W_j]_{k₄k₃}, with ā⁽¹⁾ = [ā_{i−1}]_{k₁}, g⁽¹⁾ = [g_i]_{k₂} and so on,

    [F − F̃] = κ(ā⁽¹⁾, ā⁽²⁾, g⁽¹⁾, g⁽²⁾) + E[ā⁽¹⁾] κ(ā⁽²⁾, g⁽¹⁾, g⁽²⁾) + E[ā⁽²⁾] κ(ā⁽¹⁾, g⁽¹⁾, g⁽²⁾).

By the paper's lemma E[g] = 0 and E[ā g] = 0, products of ā's included, so that of the general
cumulants little is left. With ã = ā − E[ā],

    κ(ā, g⁽¹⁾, g⁽²⁾)        = E[ã g⁽¹⁾ g⁽²⁾]
    κ(ā⁽¹⁾, ā⁽²⁾, g⁽¹⁾, g⁽²⁾) = E[ã⁽¹⁾ ã⁽²⁾ g⁽¹⁾ g⁽²⁾] − E[ã⁽¹⁾ ã⁽²⁾] E[g⁽¹⁾ g⁽²⁾].

The first of these moments are an (examples, in') × (examples, out·out') product for a pair of layers, the
second are what `fourth_moments` makes of centred inputs.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kronfac.linalg.kronecker import kron
from kronfac_experiments.diagnostics.block_matrix import BlockMatrix, compare, filled
from kronfac_experiments.diagnostics.fisher import Examples, add, fourth_moments, summed_products


@dataclass(frozen=True)
class Cumulants:
    """The terms of eqn. 2 for every pair of weights; the third is the second one transposed."""

    fourth: BlockMatrix
    """κ(ā⁽¹⁾, ā⁽²⁾, g⁽¹⁾, g⁽²⁾)."""
    third: BlockMatrix
    """E[ā⁽¹⁾] κ(ā⁽²⁾, g⁽¹⁾, g⁽²⁾); row (1), column (2). Not symmetric."""

    def error(self) -> BlockMatrix:
        """The sum of the three terms, which is F − F̃."""
        return self._with(self.fourth.dense + self.third.dense + self.third.dense.mT)

    def bound(self) -> BlockMatrix:
        """The sum of their absolute values, which is at least |F − F̃| [eqn. 3]."""
        third = self.third.dense.abs()
        return self._with(self.fourth.dense.abs() + third + third.mT)

    def _with(self, dense: Tensor) -> BlockMatrix:
        return BlockMatrix(dense, self.fourth.names, self.fourth.sizes)


@dataclass(frozen=True)
class ApproximationError:
    """F − F̃ in numbers; sums go over all pairs of weights, both orders of a pair counted."""

    total: float
    """Σ |F − F̃|: 2894.4 for the example of [MG15 §3.1]."""
    bound: float
    """Σ of the absolute terms of eqn. 3, at least `total`: 4134.6 there."""
    fourth_order: float
    """The part of `bound` that is Σ |κ(ā⁽¹⁾, ā⁽²⁾, g⁽¹⁾, g⁽²⁾)|; the rest has third-order cumulants."""
    relative: float
    """Σ |F − F̃| / Σ |F|."""
    relative_frobenius: float
    """‖F − F̃‖_F / ‖F‖_F."""
    total_by_block: Tensor  # (ℓ, ℓ)
    bound_by_block: Tensor  # (ℓ, ℓ)

    @classmethod
    def of(cls, F: BlockMatrix, F_tilde: BlockMatrix, terms: Cumulants) -> "ApproximationError":
        """From the matrices."""
        comparison = compare(F, F_tilde)
        bound = terms.bound()
        return cls(
            total=comparison.absolute,
            bound=float(bound.dense.sum()),
            fourth_order=float(terms.fourth.dense.abs().sum()),
            relative=comparison.relative_absolute,
            relative_frobenius=comparison.relative_frobenius,
            total_by_block=(F - F_tilde).block_sums(),
            bound_by_block=bound.block_sums(),
        )


def cumulants(examples: Examples) -> Cumulants:
    """The cumulants behind F − F̃, exact over the model's y and the examples x."""
    means = examples.mean_inputs()
    third, products = _third_order(examples, means)
    fourth = fourth_moments(examples, means)
    fourth.dense.sub_(products.dense)
    return Cumulants(fourth, third)


def _third_order(examples: Examples, means: Sequence[Tensor]) -> tuple[BlockMatrix, BlockMatrix]:
    """E[ā⁽¹⁾] E[ã⁽²⁾ g⁽¹⁾ g⁽²⁾], and E[ã⁽¹⁾ ã⁽²⁾] E[g⁽¹⁾ g⁽²⁾], for all pairs of weights."""
    shapes = examples.shapes
    pairs = [(i, j) for i in range(len(shapes)) for j in range(len(shapes))]
    moments: dict[tuple[int, int], Tensor] = {}  # (in_j, out_i · out_j)
    A: dict[tuple[int, int], Tensor] = {}
    G: dict[tuple[int, int], Tensor] = {}
    for part in examples:
        centred = [c.a - mean for c, mean in zip(part, means, strict=True)]
        for i, j in pairs:
            g = summed_products(part[i].g, part[j].g)
            add(moments, (i, j), centred[j].mT @ g)
            add(A, (i, j), centred[i].mT @ centred[j])
            add(G, (i, j), g.sum(dim=0))

    def third(i: int, j: int) -> Tensor:
        (out, _), (out_, in_) = shapes[i], shapes[j]
        kappa = moments[i, j].view(in_, out, out_) / examples.count
        product = torch.einsum("a,bgh->agbh", means[i], kappa)
        return product.reshape(examples.sizes[i], examples.sizes[j])

    def second(i: int, j: int) -> Tensor:
        return kron(A[i, j], G[i, j].view(shapes[i][0], shapes[j][0])) / examples.count**2

    return (
        filled(examples.names, examples.sizes, third, like=means[0]),
        filled(examples.names, examples.sizes, second, like=means[0]),
    )
