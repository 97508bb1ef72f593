"""What the arguments of torch's losses have in common: reductions, and values as (terms, event)."""

import torch
from torch import Tensor

from kronfac.errors import UnsupportedLossError
from kronfac.objective.base import Likelihood
from kronfac.objective.terms import Terms


def is_mean(
    name: str, reduction: str, size_average: bool | None = None, reduce: bool | None = None
) -> bool:
    """Whether the loss is a mean; False if it is a sum, or is left for the caller to reduce.

    Raises:
        UnsupportedLossError: the reduction is unknown, or is given by arguments that torch has deprecated.
    """
    if size_average is not None or reduce is not None:
        raise UnsupportedLossError(
            f"KFAC reads {name} with the argument reduction, not size_average and reduce."
        )
    if reduction not in ("mean", "sum", "none"):
        raise UnsupportedLossError(
            f"KFAC reads {name} with reduction 'mean', 'sum' or 'none'; got {reduction!r}."
        )
    return reduction == "mean"


def rows(outputs: Tensor, values: Tensor) -> Tensor:
    """Values of the outputs' shape as (terms, event)."""
    return values.expand_as(outputs).reshape(len(outputs) if outputs.dim() else 1, -1)


def elementwise(
    likelihood: Likelihood,
    input: Tensor,
    target: Tensor,
    mean: bool,
    weight: Tensor | None = None,
    over_weights: bool = False,
) -> Terms:
    """The terms of a loss whose outputs do not meet.

    Args:
        likelihood: of the outputs of one term.
        input: the outputs.
        target: of the same shape.
        mean: whether the loss is a mean over all outputs; else it is a sum.
        weight: of each output, of a shape that expands to the outputs'.
        over_weights: whether a mean divides by the sum of the weights; else by the number of outputs.
    """
    likelihood.check(input, target)
    shape = input.shape if input.dim() else torch.Size((1,))
    scale = 1 / input.numel() if mean else 1.0
    weights = None if weight is None else rows(input, weight.detach())
    divided: Tensor | None = None
    if weights is not None and mean and over_weights:
        divided, scale = weights.sum(), 1.0
        weights = weights / divided
    targets = rows(input, target.detach())
    return Terms(likelihood, shape, scale, weights, targets, not mean, denominator=divided)
