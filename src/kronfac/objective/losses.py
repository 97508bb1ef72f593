"""How loss functions are read: a call with outputs and targets, as `Terms`.

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
of torch calls the function of the same name, so both are read here.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.nn import functional

from kronfac.errors import UnsupportedLossError
from kronfac.objective.base import Likelihood, likelihood_loss
from kronfac.objective.bernoulli import Bernoulli
from kronfac.objective.class_losses import read_cross_entropy, read_nll
from kronfac.objective.gauss_newton import GaussNewton
from kronfac.objective.gaussian import Gaussian
from kronfac.objective.huber import Huber
from kronfac.objective.poisson import Poisson
from kronfac.objective.probability import BernoulliProbability
from kronfac.objective.reduction import elementwise, is_mean, rows
from kronfac.objective.terms import Terms

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


READERS: dict[Callable[..., Any], Reader] = {
    functional.mse_loss: _mse,
    functional.huber_loss: _huber,
    functional.smooth_l1_loss: _smooth_l1,
    functional.binary_cross_entropy_with_logits: _bce,
    functional.binary_cross_entropy: _bce_of_probabilities,
    functional.poisson_nll_loss: _poisson,
    functional.cross_entropy: read_cross_entropy,
    functional.nll_loss: read_nll,
    likelihood_loss: _likelihood,
}
"""The reader of every loss function that K-FAC knows."""
