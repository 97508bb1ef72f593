"""How far one matrix is from another, and F̃ from F beside the bound by cumulants [MG15 §3.1]."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from kronfac_experiments.diagnostics.block_matrix import MAX_GIGABYTES, BlockMatrix
from kronfac_experiments.diagnostics.cases import Inputs
from kronfac_experiments.diagnostics.cumulants import Cumulants, cumulants
from kronfac_experiments.diagnostics.exact import exact_fisher
from kronfac_experiments.diagnostics.kronecker import kronecker_fisher


@dataclass(frozen=True)
class Comparison:
    """The distance of an approximation N from M."""

    absolute: float
    """Σ |M − N| over all pairs of weights."""
    relative_absolute: float
    """Σ |M − N| / Σ |M|."""
    relative_frobenius: float
    """‖M − N‖_F / ‖M‖_F."""
    relative_by_block: Tensor  # (ℓ, ℓ)
    """Σ |M − N| / Σ |M| of every block."""


def compare(reference: BlockMatrix, approximation: BlockMatrix) -> Comparison:
    """The distance of `approximation` from `reference`."""
    difference = reference - approximation
    sums, sizes = difference.block_sums(), reference.block_sums()
    return Comparison(
        absolute=float(sums.sum()),
        relative_absolute=float(sums.sum() / sizes.sum()),
        relative_frobenius=float(difference.dense.norm() / reference.dense.norm()),
        relative_by_block=sums / sizes,
    )


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
        """From the matrices themselves, if they are at hand."""
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


def approximation_error(
    model: nn.Module,
    loss: nn.Module,
    x: Inputs,
    *,
    layers: Sequence[str] | None = None,
    chunk: int | None = None,
    max_gigabytes: float = MAX_GIGABYTES,
) -> ApproximationError:
    """Σ |F − F̃| over all pairs of weights, beside its bound by cumulants of order three and four.

    Example:
        >>> model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
        >>> error = approximation_error(model, nn.CrossEntropyLoss(), torch.randn(50, 3))
        >>> error.total <= error.bound
        True

    The arguments are those of `exact_fisher`.
    """
    F = exact_fisher(model, loss, x, layers=layers, chunk=chunk, max_gigabytes=max_gigabytes)
    F_tilde = kronecker_fisher(
        model, loss, x, layers=layers, chunk=chunk, max_gigabytes=max_gigabytes
    )
    terms = cumulants(model, loss, x, layers=layers, chunk=chunk, max_gigabytes=max_gigabytes)
    return ApproximationError.of(F, F_tilde.dense(), terms)
