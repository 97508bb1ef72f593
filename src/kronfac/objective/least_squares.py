"""`kronfac.least_squares`: residuals that shall be zero, such as those of a differential equation."""

from dataclasses import replace

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function_unary

from kronfac.errors import TargetError
from kronfac.objective.gaussian import Residual
from kronfac.objective.losses import READERS
from kronfac.objective.reduction import elementwise, is_mean
from kronfac.objective.terms import Terms


def least_squares(
    residual: Tensor, weight: float | Tensor = 1.0, *, reduction: str = "mean"
) -> Tensor:
    """The mean, or the sum, of w r² over all elements of a residual, as a loss that K-FAC sees.

    For closures with several residuals, each with a weight of its own; their sum is the objective and its
    Gauss–Newton matrix 2 Σ w JᵀJ is the curvature. There are no targets: a residual has them in it.

    Example:
        >>> loss = least_squares(u(inside), 0.1) + least_squares(model(boundary) - g)

    Args:
        residual: r, (terms, …), computed from the model's outputs.
        weight: w, at least 0: a number, or a tensor (terms,) or of the residual's shape.
        reduction: "mean" over all elements, or "sum".
    """
    if has_torch_function_unary(residual):
        result: Tensor = handle_torch_function(
            least_squares, (residual,), residual, weight, reduction=reduction
        )
        return result
    if reduction not in ("mean", "sum"):
        raise ValueError(
            f"kronfac.least_squares is a 'mean' or a 'sum'; got the reduction {reduction!r}."
        )
    mean = reduction == "mean"
    squares = residual.square() * _expanded(residual, weight)
    return squares.mean() if mean else squares.sum()


def _expanded(residual: Tensor, weight: float | Tensor) -> float | Tensor:
    """The weights as they are multiplied with the residuals."""
    if not isinstance(weight, Tensor):
        if not 0 <= weight < float("inf"):
            raise ValueError(f"kronfac.least_squares needs a weight of at least 0; got {weight}.")
        return weight
    if weight.dim() == 0 or weight.shape == residual.shape:
        return weight
    if weight.shape != residual.shape[:1]:
        raise TargetError(
            f"kronfac.least_squares needs one weight, or ({len(residual)},) for the terms, or as many as "
            f"residuals, {tuple(residual.shape)}; got {tuple(weight.shape)}."
        )
    return weight.reshape(-1, *(1 for _ in residual.shape[1:]))


def _read(residual: Tensor, weight: float | Tensor = 1.0, *, reduction: str = "mean") -> Terms:
    mean = is_mean("least_squares", reduction)
    zeros = torch.zeros_like(residual)
    weights = _expanded(residual, weight)
    if isinstance(weights, Tensor):
        return elementwise(Residual(variance=0.5), residual, zeros, mean, weights)
    terms = elementwise(Residual(variance=0.5), residual, zeros, mean)
    return replace(terms, scale=terms.scale * weights)


READERS[least_squares] = _read
