"""The loss that KFAC is given: a module, and how its calls are read."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from kronfac.errors import ClosureError, UnsupportedLossError, UnsupportedModelError
from kronfac.objective.base import Likelihood, likelihood_loss
from kronfac.objective.bernoulli import Bernoulli
from kronfac.objective.categorical import Categorical
from kronfac.objective.gaussian import Gaussian
from kronfac.objective.heteroscedastic import HeteroscedasticGaussian
from kronfac.objective.huber import Huber
from kronfac.objective.joined import JOINED
from kronfac.objective.losses import READERS, smooth_l1
from kronfac.objective.poisson import Poisson
from kronfac.objective.probability import BernoulliProbability
from kronfac.objective.terms import Terms


class UnknownLoss(nn.Module):
    """In the place of a loss that `KFAC` was not told, and that has to be seen where it is called."""

    def forward(self, *given: Any) -> Tensor:
        """Raise an error: this is not to be called.

        Raises:
            UnsupportedLossError: always.
        """
        raise UnsupportedLossError(
            "KFAC was not told the loss. Give it: KFAC.for_parameters(params, loss, lr=…)."
        )


@dataclass(frozen=True)
class Objective:
    """What `KFAC.closure` minimises, and what a closure is taken to minimise if no loss call is seen."""

    module: nn.Module
    """What the user calls."""
    likelihood: Likelihood
    function: Callable[..., Tensor]
    """What the module calls."""
    options: dict[str, Any] = field(default_factory=dict)
    """Its keyword arguments there."""
    mean: bool = True
    """Whether the loss is a mean; else it is a sum."""
    over_outputs: bool = False
    """Whether the mean is also over the outputs of a term, as torch's element-wise losses take it."""

    @property
    def of_pairs(self) -> bool:
        """Whether the model returns two tensors, a mean and a variance."""
        return self.function in JOINED

    def loss(self, outputs: Any, targets: Tensor) -> Tensor:
        """The loss of what the model returned.

        Raises:
            UnsupportedModelError: a loss of mean and variance got something else.
        """
        if self.of_pairs:
            if not isinstance(outputs, (tuple, list)) or len(outputs) != 2:
                raise UnsupportedModelError(
                    f"KFAC.closure with {type(self.module).__name__} needs a model that returns a tuple "
                    f"(mean, variance); got {type(outputs).__name__}. Return one, or write a closure."
                )
            loss: Tensor = self.module(outputs[0], targets, outputs[1])
            return loss
        if not isinstance(outputs, Tensor):
            keys = f" with the keys {list(outputs)}" if isinstance(outputs, Mapping) else ""
            raise UnsupportedModelError(
                f"KFAC.closure calls the loss with what the model returns, which must be a tensor; got a "
                f"{type(outputs).__name__}{keys}. Call model, loss and backward() yourself, as in "
                'loss_fn(model(x)["logits"], y).backward(), then step().'
            )
        loss = self.module(outputs, targets)
        return loss

    def read(self, outputs: Tensor, targets: Tensor) -> Terms:
        """The terms of a call.

        Raises:
            TargetError: the targets do not fit.
            UnsupportedLossError: the loss is not known.
        """
        if isinstance(self.module, UnknownLoss):
            self.module()
        first = (self.module,) if self.function is likelihood_loss else ()
        return READERS[self.function](*first, outputs, targets, **self.options)

    def denominator(self, targets: Tensor) -> float:
        """What a mean over these targets divides by, relative to others; 0 if all of them are ignored."""
        if "ignore_index" not in self.options or targets.is_floating_point():
            return float(len(targets))
        kept = targets != self.options["ignore_index"]
        weight = self.options["weight"]
        if weight is None:
            return float(kept.sum())
        return float(weight[targets.where(kept, torch.zeros_like(targets))][kept].sum())

    def declare(self, shape: torch.Size) -> Terms:
        """The terms of a call with outputs of this shape, if nothing is known of its targets.

        Raises:
            ClosureError: the loss has no curvature that its shape alone tells.
        """
        if isinstance(self.module, UnknownLoss):
            raise ClosureError(
                "KFAC.for_parameters was not told the loss, and has not seen one called: it sees losses of "
                "torch.nn.functional in a closure and in the model's forward. Give it the loss module that "
                "you call, or a likelihood: for_parameters(params, kronfac.Categorical(), lr=…)."
            )
        if self.of_pairs:
            raise ClosureError(
                f"The closure did not call {type(self.module).__name__} where KFAC sees it, and the "
                "model's outputs alone do not say which are means and which are variances. Call it in the "
                "closure, or declare the outputs with kronfac.observe and kronfac.HeteroscedasticGaussian."
            )
        channels = isinstance(self.likelihood, Categorical) and len(shape) > 1
        terms = Terms(self.likelihood, shape, summed=not self.mean, channels=channels)
        if not self.mean:
            return terms
        count = shape.numel() if self.over_outputs else terms.count
        return terms.scaled(1 / count)


@dataclass(frozen=True)
class _Form:
    """How a loss module of torch calls its function."""

    function: Callable[..., Tensor]
    likelihood: Callable[[Any], Likelihood]
    options: tuple[str, ...] = ()
    """The module's attributes that are arguments of the function."""
    over_outputs: bool = True


_FORMS: dict[type[nn.Module], _Form] = {
    nn.MSELoss: _Form(functional.mse_loss, lambda loss: Gaussian(variance=0.5)),
    nn.HuberLoss: _Form(functional.huber_loss, lambda loss: Huber(loss.delta), ("delta",)),
    nn.SmoothL1Loss: _Form(functional.smooth_l1_loss, lambda loss: smooth_l1(loss.beta), ("beta",)),
    nn.BCEWithLogitsLoss: _Form(
        functional.binary_cross_entropy_with_logits,
        lambda loss: Bernoulli(),
        ("weight", "pos_weight"),
    ),
    nn.BCELoss: _Form(
        functional.binary_cross_entropy, lambda loss: BernoulliProbability(), ("weight",)
    ),
    nn.PoissonNLLLoss: _Form(
        functional.poisson_nll_loss,
        lambda loss: Poisson(loss.log_input, loss.eps),
        ("log_input", "full", "eps"),
    ),
    nn.GaussianNLLLoss: _Form(
        functional.gaussian_nll_loss,
        lambda loss: HeteroscedasticGaussian(loss.eps),
        ("full", "eps"),
    ),
    nn.CrossEntropyLoss: _Form(
        functional.cross_entropy,
        lambda loss: Categorical(loss.label_smoothing),
        ("weight", "ignore_index", "label_smoothing"),
        over_outputs=False,
    ),
    nn.NLLLoss: _Form(
        functional.nll_loss,
        lambda loss: Categorical(),
        ("weight", "ignore_index"),
        over_outputs=False,
    ),
}


def is_loss(module: nn.Module) -> bool:
    """Whether a module is a loss that is known, and no model."""
    return isinstance(module, Likelihood) or type(module) in _FORMS


def objective_of(loss: nn.Module) -> Objective:
    """The objective that a loss module computes.

    Raises:
        UnsupportedLossError: the module is not one that KFAC knows, or is no scalar.
    """
    if isinstance(loss, UnknownLoss):
        return Objective(loss, Gaussian(), likelihood_loss)
    if isinstance(loss, Likelihood):
        return Objective(loss, loss, likelihood_loss, mean=not loss.summed)
    # Exact types: a subclass may compute anything in its forward.
    form = _FORMS.get(type(loss))
    name = type(loss).__name__
    if not isinstance(loss, nn.Module):
        name = f"the {name} {getattr(loss, '__name__', loss)}"
    if isinstance(loss, type) and (loss in _FORMS or issubclass(loss, Likelihood)):
        raise UnsupportedLossError(
            f"KFAC needs a loss module, not its class; got {name}. Make one: {loss.__name__}()."
        )
    modules = [kind.__name__ for kind, form in _FORMS.items() if form.function is loss]
    if modules:
        raise UnsupportedLossError(
            f"KFAC needs a loss module; got {name}. Give it nn.{modules[0]}(), and call that in the loop; "
            "a closure may also call the function."
        )
    if form is None:
        known = ", ".join(module.__name__ for module in _FORMS)
        raise UnsupportedLossError(
            "KFAC needs a loss that is the negative log-likelihood of a predictive distribution; "
            f"{name} is not one it knows. Use {known}, or a likelihood such as kronfac.Gaussian, "
            "kronfac.Bernoulli or kronfac.Categorical. For any other loss that is convex in the model's "
            "outputs, give KFAC kronfac.GaussNewton(loss)."
        )
    reduction = str(loss.reduction)
    if reduction not in ("mean", "sum"):
        raise UnsupportedLossError(
            f"KFAC needs {name} with reduction 'mean' or 'sum', a scalar; got {reduction!r}. Give it "
            f"{name}(); a closure may call torch's function with reduction='none' and average the result."
        )
    options = {option: getattr(loss, option) for option in form.options}
    return Objective(
        loss,
        form.likelihood(loss),
        form.function,
        {"reduction": reduction, **options},
        reduction == "mean",
        form.over_outputs,
    )
