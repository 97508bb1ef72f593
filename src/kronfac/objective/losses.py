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
of torch calls the function of the same name, so both are read here. `LOSSES` is the table of all of them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import handle_torch_function, has_torch_function_variadic

from kronfac.errors import TargetError, UnsupportedLossError
from kronfac.objective.gauss_newton import GaussNewton
from kronfac.objective.likelihoods import (
    Bernoulli,
    BernoulliProbability,
    Categorical,
    Gaussian,
    HeteroscedasticGaussian,
    Huber,
    Likelihood,
    Poisson,
    likelihood_loss,
)
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


def read_cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Terms:
    """The terms of a call of `cross_entropy`."""
    mean = is_mean("cross_entropy", reduction, size_average, reduce)
    shape = torch.Size(input.shape)
    if input.dim() == 1:  # one example, without a batch dimension
        input, target = input.unsqueeze(0), target.unsqueeze(0)
    classes, soft = input.shape[1], target.is_floating_point()
    expected = input.shape if soft else torch.Size((len(input), *input.shape[2:]))
    if target.shape != expected:
        raise TargetError(
            f"cross_entropy needs class indices of shape {(len(input), *input.shape[2:])} and an integer "
            f"dtype, or distributions of shape {tuple(input.shape)} and a floating one; got "
            f"{tuple(target.shape)}, {target.dtype}."
        )
    target = target.detach()
    targets = target.movedim(1, -1).reshape(-1, classes) if soft else target.reshape(-1)
    uniform = label_smoothing / classes
    # The curvature of −Σ_c v_c q_c log p_c is (Σ_c v_c q_c)(diag(p) − p pᵀ), q with the smoothing.
    weights: Tensor | None = None
    counted: Tensor | float = float(len(targets))
    if soft:
        if weight is not None:
            weights = ((1 - label_smoothing) * targets + uniform) @ weight.detach()
    else:
        kept = targets != ignore_index
        if weight is None and not targets.is_cuda and bool(kept.all()):
            # What is usual; on a GPU the question would cost a synchronisation.
            scale = 1 / len(targets) if mean else 1.0
            likelihood = Categorical(label_smoothing)
            return Terms(likelihood, shape, scale, None, targets, not mean, channels=True)
        # Not −100, which is no class: whatever is there is multiplied by 0.
        targets = targets.where(kept, torch.zeros((), dtype=targets.dtype, device=targets.device))
        of_class = input.new_ones(()) if weight is None else weight.detach()[targets]
        counted = (kept * of_class).sum()
        weights = kept * ((1 - label_smoothing) * of_class + uniform * _sum(weight, classes))
    scale = 1.0
    if mean and isinstance(counted, Tensor):
        assert weights is not None
        weights = weights / counted
    elif mean:
        scale = 1 / len(targets)
    likelihood = Categorical(label_smoothing)
    divided = counted if mean and isinstance(counted, Tensor) else None
    return Terms(
        likelihood, shape, scale, weights, targets, not mean, channels=True, denominator=divided
    )


def _sum(weight: Tensor | None, classes: int) -> Tensor | float:
    return float(classes) if weight is None else weight.detach().sum()


def read_nll(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
) -> Terms:
    """The terms of a call of `nll_loss`."""
    is_mean("nll_loss", reduction, size_average, reduce)
    if target.is_floating_point():
        raise TargetError(f"nll_loss needs class indices of an integer dtype; got {target.dtype}.")
    return read_cross_entropy(input, target, weight, ignore_index=ignore_index, reduction=reduction)


Reader = Callable[..., Terms]
"""From a loss function's own arguments to its terms."""
_SQUARE, _LOGISTIC = Gaussian(variance=0.5), Bernoulli()
"""Made once: they are modules, which take longer to make than all else here."""


def _mse(
    input: Tensor,
    target: Tensor,
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: str = "mean",
    weight: Tensor | None = None,
) -> Terms:
    mean = is_mean("mse_loss", reduction, size_average, reduce)
    return elementwise(_SQUARE, input, target, mean, weight, over_weights=True)


def _huber(
    input: Tensor,
    target: Tensor,
    reduction: str = "mean",
    delta: float = 1.0,
    weight: Tensor | None = None,
) -> Terms:
    mean = is_mean("huber_loss", reduction)
    return elementwise(Huber(delta), input, target, mean, weight, over_weights=True)


def _smooth_l1(
    input: Tensor,
    target: Tensor,
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: str = "mean",
    beta: float = 1.0,
) -> Terms:
    mean = is_mean("smooth_l1_loss", reduction, size_average, reduce)
    return elementwise(smooth_l1(beta), input, target, mean)


def smooth_l1(beta: float) -> Huber:
    """The likelihood of `smooth_l1_loss`, which is `huber_loss` with δ = β, divided by β.

    Raises:
        UnsupportedLossError: β is 0.
    """
    if beta == 0:
        raise UnsupportedLossError(
            "KFAC needs smooth_l1_loss with a positive beta: with 0 it is the absolute value, whose "
            "curvature has no bound. Use a beta of about the smallest residual that matters."
        )
    return Huber(beta, 1 / beta)


def _bce(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: str = "mean",
    pos_weight: Tensor | None = None,
) -> Terms:
    mean = is_mean("binary_cross_entropy_with_logits", reduction, size_average, reduce)
    likelihood = _LOGISTIC
    likelihood.check(input, target)
    if pos_weight is not None:
        # −[p y log σ(z) + (1 − y) log(1 − σ(z))] has the curvature (p y + 1 − y) σ(z) (1 − σ(z)).
        positive = 1 + (pos_weight.detach() - 1) * target.detach()
        weight = positive if weight is None else weight * positive
    return elementwise(likelihood, input, target, mean, weight)


def _bce_of_probabilities(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: str = "mean",
) -> Terms:
    mean = is_mean("binary_cross_entropy", reduction, size_average, reduce)
    return elementwise(BernoulliProbability(), input, target, mean, weight)


def _poisson(
    input: Tensor,
    target: Tensor,
    log_input: bool = True,
    full: bool = False,
    size_average: bool | None = None,
    eps: float = 1e-8,
    reduce: bool | None = None,
    reduction: str = "mean",
) -> Terms:
    mean = is_mean("poisson_nll_loss", reduction, size_average, reduce)
    return elementwise(Poisson(log_input, eps), input, target, mean)


def _likelihood(likelihood: Likelihood, outputs: Tensor, targets: Tensor) -> Terms:
    likelihood.check(outputs, targets)
    scale = 1.0 if likelihood.summed else 1 / len(outputs)
    targets = targets.detach()
    if isinstance(likelihood, GaussNewton):
        likelihood.check_terms(outputs, targets)
        likelihood = likelihood.arranged(outputs.shape[1:])
    elif targets.shape == outputs.shape:
        targets = rows(outputs, targets)
    return Terms(likelihood, outputs.shape, scale, None, targets, summed=likelihood.summed)


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


JOINED: dict[Callable[..., Any], Callable[..., Tensor]] = {
    functional.gaussian_nll_loss: _gaussian_nll
}
"""What K-FAC calls in the place of a loss function, so that the call is about one tensor.

Its first argument is whether this happens inside the model: without gradients, as the model runs again,
nothing tells whether a variance is learned, so there it is taken to be. If it is not, its Jacobian is 0.
"""


@dataclass(frozen=True)
class TorchLoss:
    """A loss module of torch, and the function that it calls."""

    function: Callable[..., Tensor]
    read: Reader | None
    """None if `JOINED` replaces the function."""
    likelihood: Callable[[Any], Likelihood]
    """From the module to the likelihood of its terms."""
    options: tuple[str, ...] = ()
    """The module's attributes that are arguments of the function."""
    over_outputs: bool = True
    """Whether a mean is also over the outputs of a term."""


LOSSES: dict[type[nn.Module], TorchLoss] = {
    nn.MSELoss: TorchLoss(functional.mse_loss, _mse, lambda loss: Gaussian(variance=0.5)),
    nn.HuberLoss: TorchLoss(
        functional.huber_loss, _huber, lambda loss: Huber(loss.delta), ("delta",)
    ),
    nn.SmoothL1Loss: TorchLoss(
        functional.smooth_l1_loss, _smooth_l1, lambda loss: smooth_l1(loss.beta), ("beta",)
    ),
    nn.BCEWithLogitsLoss: TorchLoss(
        functional.binary_cross_entropy_with_logits,
        _bce,
        lambda loss: Bernoulli(),
        ("weight", "pos_weight"),
    ),
    nn.BCELoss: TorchLoss(
        functional.binary_cross_entropy,
        _bce_of_probabilities,
        lambda loss: BernoulliProbability(),
        ("weight",),
    ),
    nn.PoissonNLLLoss: TorchLoss(
        functional.poisson_nll_loss,
        _poisson,
        lambda loss: Poisson(loss.log_input, loss.eps),
        ("log_input", "full", "eps"),
    ),
    nn.GaussianNLLLoss: TorchLoss(
        functional.gaussian_nll_loss,
        None,
        lambda loss: HeteroscedasticGaussian(loss.eps),
        ("full", "eps"),
    ),
    nn.CrossEntropyLoss: TorchLoss(
        functional.cross_entropy,
        read_cross_entropy,
        lambda loss: Categorical(loss.label_smoothing),
        ("weight", "ignore_index", "label_smoothing"),
        over_outputs=False,
    ),
    nn.NLLLoss: TorchLoss(
        functional.nll_loss,
        read_nll,
        lambda loss: Categorical(),
        ("weight", "ignore_index"),
        over_outputs=False,
    ),
}
"""All losses of torch that K-FAC knows."""

READERS: dict[Callable[..., Any], Reader] = {
    likelihood_loss: _likelihood,
    gaussian_nll_of_means: _read_means,
    gaussian_nll_of_pairs: _read_pairs,
    **{loss.function: loss.read for loss in LOSSES.values() if loss.read is not None},
}
"""The reader of every loss function that K-FAC knows; `observe.py` adds its own."""
