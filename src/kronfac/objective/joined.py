"""Losses of several outputs of the network, as losses of one: `gaussian_nll_loss` of a mean and a variance.

A loss call is about one tensor z. If both mean and variance are learned, the call is replaced by one with
z = (μ, v), stacked along dimension 1, which computes the same. What stacks them is recorded like anything
else that happens between the model and the loss.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import handle_torch_function, has_torch_function_variadic

from kronfac.errors import TargetError
from kronfac.objective.gaussian import Gaussian
from kronfac.objective.heteroscedastic import HeteroscedasticGaussian
from kronfac.objective.losses import READERS
from kronfac.objective.reduction import elementwise, is_mean, rows
from kronfac.objective.terms import Terms


def _gaussian_nll(
    inside: bool,
    input: Tensor,
    target: Tensor,
    var: Tensor | float,
    full: bool = False,
    eps: float = 1e-6,
    reduction: str = "mean",
) -> Tensor:
    options: dict[str, Any] = {"full": full, "eps": eps, "reduction": reduction}
    if not isinstance(var, Tensor) or not (inside or var.requires_grad):
        return gaussian_nll_of_means(input, target, var, **options)
    if var.shape == input.shape[:-1]:
        var = var.unsqueeze(-1)
    mean = input if input.dim() else input.reshape(1)
    return gaussian_nll_of_pairs(torch.stack((mean, var.expand_as(mean)), dim=1), target, **options)


def gaussian_nll_of_means(
    input: Tensor, target: Tensor, var: Tensor | float, **options: Any
) -> Tensor:
    """`gaussian_nll_loss` with variances that are not learned."""
    if has_torch_function_variadic(input, target):
        result: Tensor = handle_torch_function(
            gaussian_nll_of_means, (input, target), input, target, var, **options
        )
        return result
    return functional.gaussian_nll_loss(input, target, var, **options)


def gaussian_nll_of_pairs(pairs: Tensor, target: Tensor, **options: Any) -> Tensor:
    """`gaussian_nll_loss` of means and variances (terms, 2, …)."""
    if has_torch_function_variadic(pairs, target):
        result: Tensor = handle_torch_function(
            gaussian_nll_of_pairs, (pairs, target), pairs, target, **options
        )
        return result
    mean, variance = pairs.unbind(dim=1)
    target = target if target.dim() else target.reshape(1)
    return functional.gaussian_nll_loss(mean, target, variance, **options)


def _read_means(
    input: Tensor,
    target: Tensor,
    var: Tensor | float,
    full: bool = False,
    eps: float = 1e-6,
    reduction: str = "mean",
) -> Terms:
    mean = is_mean("gaussian_nll_loss", reduction)
    if not isinstance(var, Tensor):
        return elementwise(Gaussian(max(var, eps)), input, target, mean)
    if var.shape == input.shape[:-1]:
        var = var.unsqueeze(-1)
    weight = 1 / var.detach().clamp(min=eps)
    return elementwise(Gaussian(), input, target, mean, weight)


def _read_pairs(
    pairs: Tensor,
    target: Tensor,
    full: bool = False,
    eps: float = 1e-6,
    reduction: str = "mean",
) -> Terms:
    mean = is_mean("gaussian_nll_loss", reduction)
    means = pairs[:, 0]
    if target.shape != means.shape and (len(means) > 1 or target.dim()):
        raise TargetError(
            f"gaussian_nll_loss needs targets of the means' shape {tuple(means.shape)}; got "
            f"{tuple(target.shape)}."
        )
    scale = 1 / means.numel() if mean else 1.0
    targets = rows(means, target.detach())
    likelihood = HeteroscedasticGaussian(eps)
    return Terms(likelihood, pairs.shape, scale, None, targets, summed=not mean)


READERS[gaussian_nll_of_means] = _read_means
READERS[gaussian_nll_of_pairs] = _read_pairs

JOINED: dict[Callable[..., Any], Callable[..., Tensor]] = {
    functional.gaussian_nll_loss: _gaussian_nll
}
"""What K-FAC calls in the place of a loss function, so that the call is about one tensor.

Its first argument is whether this happens inside the model: without gradients, as the model runs again,
nothing tells whether a variance is learned, so there it is taken to be. If it is not, its Jacobian is 0.
"""
