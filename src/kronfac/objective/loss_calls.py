"""Losses written by hand: `kronfac.observe` for declared predictions, `kronfac.least_squares`."""

from dataclasses import replace

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function_unary

from kronfac.errors import TargetError
from kronfac.objective.likelihoods import Residual
from kronfac.objective.losses import READERS, elementwise, is_mean
from kronfac.objective.terms import Likelihood, Terms


def observe(
    z: Tensor,
    likelihood: Likelihood,
    *,
    targets: Tensor | None = None,
    weight: Tensor | None = None,
    scale: float = 1.0,
) -> Tensor:
    """Declare that the objective has the summands scale · Σ_t w_t · −log r(y_t | z_t); returns z.

    Use it with a loss written by hand, in the closure or in the model. It computes nothing. K-FAC uses the
    curvature of the declared terms, and the loss that the closure returns.

    Example:
        >>> z = kronfac.observe(model(x), kronfac.Gaussian(variance=0.5), scale=1 / len(x))
        >>> loss = (z - y).square().sum() / len(x)

    Args:
        z: outputs, (terms, …).
        likelihood: the predictive distribution whose negative logarithm is the loss.
        targets: needed by `fisher="empirical"` and by `GaussNewton`, and used by `Huber`.
        weight: w, (terms,), such as 0 for padding.
        scale: s, such as 1/terms for a mean.
    """
    if has_torch_function_unary(z):
        result: Tensor = handle_torch_function(
            observe, (z,), z, likelihood, targets=targets, weight=weight, scale=scale
        )
        return result
    return z


def _read_observed(
    z: Tensor, likelihood: Likelihood, targets: Tensor | None, weight: Tensor | None, scale: float
) -> Terms:
    if not isinstance(likelihood, Likelihood):
        raise TypeError(
            f"kronfac.observe needs a likelihood, such as kronfac.Gaussian(); got {likelihood!r}."
        )
    if targets is not None:
        likelihood, targets = likelihood.arrange(z, targets)
    if weight is not None and weight.shape != z.shape[:1]:
        raise TargetError(
            f"kronfac.observe needs one weight per term, of shape ({len(z)},); got "
            f"{tuple(weight.shape)}."
        )
    return Terms(likelihood, z.shape, scale, weight, targets, summed=scale == 1)


READERS[observe] = _read_observed


def least_squares(
    residual: Tensor, weight: float | Tensor = 1.0, *, reduction: str = "mean"
) -> Tensor:
    """The mean or sum of w r² over all elements of a residual, as a loss that K-FAC can see.

    A closure may add several of them, each with its own weight. The sum is the objective, and its
    Gauss–Newton matrix 2 Σ w JᵀJ is the curvature. Targets are part of the residual.

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
            f"kronfac.least_squares needs the reduction 'mean' or 'sum'; got {reduction!r}."
        )
    mean = reduction == "mean"
    squares = residual.square() * _expanded(residual, weight)
    return squares.mean() if mean else squares.sum()


def _expanded(residual: Tensor, weight: float | Tensor) -> float | Tensor:
    """The weights in a shape that multiplies the residuals."""
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


def _read_residual(
    residual: Tensor, weight: float | Tensor = 1.0, *, reduction: str = "mean"
) -> Terms:
    mean = is_mean("least_squares", reduction)
    zeros = torch.zeros_like(residual)
    weights = _expanded(residual, weight)
    if isinstance(weights, Tensor):
        return elementwise(Residual(variance=0.5), residual, zeros, mean, weights)
    terms = elementwise(Residual(variance=0.5), residual, zeros, mean)
    return replace(terms, scale=terms.scale * weights)


READERS[least_squares] = _read_residual
