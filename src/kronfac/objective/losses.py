"""Loss functions: a call with outputs and targets, read as `Terms`.

| loss | likelihood | s, mean | s, sum |
| --- | --- | --- | --- |
| `kronfac.Gaussian` and the other likelihoods, called | itself | 1 / terms | – |
| `kronfac.GaussNewton`, called | itself | 1 / terms | 1 |
| `mse_loss` | Gaussian(σ² = ½) | 1 / (terms · event) | 1 |
| `huber_loss`, `smooth_l1_loss` | Huber(δ), Huber(β, 1/β) | 1 / (terms · event) | 1 |
| `binary_cross_entropy_with_logits` | Bernoulli | 1 / (terms · event) | 1 |
| `binary_cross_entropy` | BernoulliProbability | 1 / (terms · event) | 1 |
| `poisson_nll_loss` | Poisson | 1 / (terms · event) | 1 |
| `gaussian_nll_loss` | HeteroscedasticGaussian | 1 / means | 1 |
| `cross_entropy`, `nll_loss` | Categorical | 1 / Σw | 1 |

So `MSELoss()` is the average negative log-likelihood of a Gaussian with variance event / 2. A loss module
of torch calls the function of the same name with its options as keywords: one reader serves both. `LOSSES`
is the table of all of them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import handle_torch_function, has_torch_function_variadic

from kronfac.errors import TargetError, UnsupportedLossError
from kronfac.objective.likelihoods import (
    Bernoulli,
    BernoulliProbability,
    Categorical,
    Gaussian,
    HeteroscedasticGaussian,
    Huber,
    Poisson,
)
from kronfac.objective.terms import Likelihood, Terms, likelihood_loss, rows

Reader = Callable[..., Terms]
"""From a loss function's own arguments to its terms."""


def is_mean(
    name: str, reduction: str, size_average: bool | None = None, reduce: bool | None = None
) -> bool:
    """Whether the loss is a mean; False if it is a sum, or has no reduction.

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


def elementwise(
    likelihood: Likelihood,
    input: Tensor,
    target: Tensor,
    mean: bool,
    weight: Tensor | None = None,
    over_weights: bool = False,
) -> Terms:
    """The terms of a loss that is a sum over independent outputs.

    Args:
        likelihood: of the outputs of one term.
        input: the outputs.
        target: of the same shape.
        mean: whether the loss is a mean over all outputs; else it is a sum.
        weight: of each output, in a shape that expands to that of the outputs.
        over_weights: whether a mean divides by the sum of the weights, not by the number of outputs.
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


def _read_elementwise(
    name: str,
    likelihood: Callable[..., Likelihood],
    over_weights: bool,
    input: Tensor,
    target: Tensor,
    *,
    weight: Tensor | None = None,
    pos_weight: Tensor | None = None,
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: str = "mean",
    **options: Any,
) -> Terms:
    """The terms of a call of one of torch's element-wise losses."""
    mean, found = is_mean(name, reduction, size_average, reduce), likelihood(**options)
    if pos_weight is not None:
        # −[p y log σ(z) + (1 − y) log(1 − σ(z))] has the curvature (p y + 1 − y) σ(z) (1 − σ(z)).
        found.check(input, target)
        positive = 1 + (pos_weight.detach() - 1) * target.detach()
        weight = positive if weight is None else weight * positive
    return elementwise(found, input, target, mean, weight, over_weights)


def _read_classes(
    name: str,
    input: Tensor,
    target: Tensor,
    *,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: str = "mean",
) -> Terms:
    """The terms of a call of `cross_entropy` or `nll_loss`."""
    mean = is_mean(name, reduction, size_average, reduce)
    terms = partial(
        Terms, Categorical(label_smoothing), torch.Size(input.shape), summed=not mean, channels=True
    )
    if input.dim() == 1:  # one example, without a batch dimension
        input, target = input.unsqueeze(0), target.unsqueeze(0)
    classes, soft = input.shape[1], target.is_floating_point()
    indices = (len(input), *input.shape[2:])
    if target.shape != (input.shape if soft else indices):
        raise TargetError(
            f"{name} needs class indices of shape {indices} and an integer dtype, or distributions of "
            f"shape {tuple(input.shape)} and a floating one; got {tuple(target.shape)}, {target.dtype}."
        )
    weight = None if weight is None else weight.detach()
    targets = target.detach().movedim(1, -1).reshape(-1, classes) if soft else target.reshape(-1)
    scale = 1 / len(targets) if mean else 1.0
    uniform = label_smoothing / classes
    # The curvature of −Σ_c v_c q_c log p_c is (Σ_c v_c q_c)(diag(p) − p pᵀ), q with the smoothing.
    if soft:
        smoothed = (1 - label_smoothing) * targets + uniform
        return terms(scale, None if weight is None else smoothed @ weight, targets)
    kept = targets != ignore_index
    if weight is None and not targets.is_cuda and bool(kept.all()):
        return terms(scale, None, targets)  # on a GPU `kept.all()` would be a synchronisation
    # −100 is no class; the replacement has the weight 0.
    targets = targets.where(kept, torch.zeros((), dtype=targets.dtype, device=targets.device))
    of_class = input.new_ones(()) if weight is None else weight[targets]
    sums = float(classes) if weight is None else weight.sum()
    weights = kept * ((1 - label_smoothing) * of_class + uniform * sums)
    if not mean:
        return terms(1.0, weights, targets)
    counted = (kept * of_class).sum()
    return terms(1.0, weights / counted, targets, denominator=counted)


def _read_likelihood(likelihood: Likelihood, outputs: Tensor, targets: Tensor) -> Terms:
    """The terms of a call of a likelihood."""
    summed = likelihood.summed
    likelihood, targets = likelihood.arrange(outputs, targets)
    scale = 1.0 if summed else 1 / len(outputs)
    return Terms(likelihood, outputs.shape, scale, None, targets, summed)


def join_gaussian_nll(input: Tensor, target: Tensor, var: Tensor | float, **options: Any) -> Tensor:
    """`gaussian_nll_loss` as a function of one tensor; a constant variance gets a Jacobian of 0."""
    mean = input if input.dim() else input.reshape(1)
    if not isinstance(var, Tensor):
        var = torch.full_like(mean, var)
    elif var.shape == input.shape[:-1]:
        var = var.unsqueeze(-1)
    return gaussian_nll_of_pairs(torch.stack((mean, var.expand_as(mean)), dim=1), target, **options)


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


def _read_pairs(
    pairs: Tensor,
    target: Tensor,
    full: bool = False,
    eps: float = 1e-6,
    reduction: str = "mean",
) -> Terms:
    mean, means = is_mean("gaussian_nll_loss", reduction), pairs[:, 0]
    if target.shape != means.shape and (len(means) > 1 or target.dim()):
        raise TargetError(
            f"gaussian_nll_loss needs targets of the means' shape {tuple(means.shape)}; got "
            f"{tuple(target.shape)}."
        )
    scale = 1 / means.numel() if mean else 1.0
    targets = rows(means, target.detach())
    return Terms(HeteroscedasticGaussian(eps), pairs.shape, scale, None, targets, summed=not mean)


JOINED: dict[Callable[..., Any], Callable[..., Tensor]] = {
    functional.gaussian_nll_loss: join_gaussian_nll
}
"""What K-FAC calls in place of a loss function, so that the call has one input tensor."""


@dataclass(frozen=True)
class TorchLoss:
    """A loss module of torch, the function that it calls, and how K-FAC reads the call."""

    function: Callable[..., Tensor]
    likelihood: Callable[..., Likelihood]
    """From `options` and other keyword arguments to the likelihood of a term."""
    options: tuple[str, ...] = ()
    """The module's attributes that are arguments of the likelihood."""
    weights: tuple[str, ...] = ()
    """Its attributes that weigh terms or outputs."""
    over_weights: bool = False
    """Whether an element-wise mean divides by the sum of the weights."""
    classes: bool = False
    """Whether the outputs of a term are the logits of one distribution; else the loss is element-wise."""

    @property
    def read(self) -> Reader:
        """From a call's arguments to its terms."""
        if self.classes:
            return partial(_read_classes, self.function.__name__)
        return partial(
            _read_elementwise, self.function.__name__, self.likelihood, self.over_weights
        )


def smooth_l1(beta: float = 1.0) -> Huber:
    """The likelihood of `smooth_l1_loss`, which is `huber_loss` with δ = β, divided by β.

    Raises:
        UnsupportedLossError: β is 0.
    """
    if beta == 0:
        raise UnsupportedLossError(
            "KFAC needs smooth_l1_loss with a positive beta: beta=0 is the absolute value, whose curvature "
            "is unbounded. Use a beta of about the smallest residual that matters."
        )
    return Huber(beta, 1 / beta)


_SQUARE, _LOGISTIC = Gaussian(variance=0.5), Bernoulli()
"""Made once, because making a module takes longer than everything else here."""

LOSSES: dict[type[nn.Module], TorchLoss] = {
    nn.MSELoss: TorchLoss(functional.mse_loss, lambda: _SQUARE, over_weights=True),
    nn.HuberLoss: TorchLoss(functional.huber_loss, Huber, ("delta",), over_weights=True),
    nn.SmoothL1Loss: TorchLoss(functional.smooth_l1_loss, smooth_l1, ("beta",)),
    nn.BCEWithLogitsLoss: TorchLoss(
        functional.binary_cross_entropy_with_logits,
        lambda: _LOGISTIC,
        weights=("weight", "pos_weight"),
    ),
    nn.BCELoss: TorchLoss(
        functional.binary_cross_entropy, BernoulliProbability, weights=("weight",)
    ),
    nn.PoissonNLLLoss: TorchLoss(
        functional.poisson_nll_loss,
        lambda log_input=True, full=False, eps=1e-8: Poisson(log_input, eps),
        ("log_input", "full", "eps"),
    ),
    nn.GaussianNLLLoss: TorchLoss(
        functional.gaussian_nll_loss,
        lambda full=False, eps=1e-6: HeteroscedasticGaussian(eps),
        ("full", "eps"),
    ),
    nn.CrossEntropyLoss: TorchLoss(
        functional.cross_entropy,
        Categorical,
        ("label_smoothing",),
        ("weight", "ignore_index"),
        classes=True,
    ),
    nn.NLLLoss: TorchLoss(
        functional.nll_loss, Categorical, weights=("weight", "ignore_index"), classes=True
    ),
}
"""All losses of torch that K-FAC knows."""

READERS: dict[Callable[..., Any], Reader] = {
    likelihood_loss: _read_likelihood,
    gaussian_nll_of_pairs: _read_pairs,
    **{loss.function: loss.read for loss in LOSSES.values() if loss.function not in JOINED},
}
"""The reader of every loss function that K-FAC knows; `loss_calls.py` adds its own."""
