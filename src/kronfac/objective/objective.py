"""The loss that KFAC is given: a module, and how to read its calls."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from kronfac.errors import ClosureError, UnsupportedLossError, UnsupportedModelError
from kronfac.objective.likelihoods import Categorical
from kronfac.objective.losses import JOINED, LOSSES, READERS
from kronfac.objective.terms import Likelihood, Terms, likelihood_loss


@dataclass(frozen=True)
class Objective:
    """What `KFAC.closure` minimises, and what K-FAC assumes of a closure in which it sees no loss call."""

    module: nn.Module
    """The loss module that the user calls."""
    likelihood: Likelihood
    function: Callable[..., Tensor]
    """The function that the module calls."""
    options: dict[str, Any] = field(default_factory=dict)
    """The function's keyword arguments."""
    mean: bool = True
    """Whether the loss is a mean; else it is a sum."""
    over_outputs: bool = False
    """Whether the mean is also over the outputs of a term, as in torch's element-wise losses."""

    @property
    def of_pairs(self) -> bool:
        """Whether the model returns two tensors, a mean and a variance."""
        return self.function in JOINED

    def loss(self, outputs: Any, targets: Tensor) -> Tensor:
        """The loss of what the model returned.

        Raises:
            UnsupportedModelError: the model did not return what the loss needs.
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
        first = (self.module,) if self.function is likelihood_loss else ()
        return READERS[self.function](*first, outputs, targets, **self.options)

    def denominator(self, targets: Tensor) -> float:
        """The divisor of a mean over these targets, up to a constant; 0 if all of them are ignored."""
        if "ignore_index" not in self.options or targets.is_floating_point():
            return float(len(targets))
        kept = targets != self.options["ignore_index"]
        weight = self.options["weight"]
        if weight is None:
            return float(kept.sum())
        return float(weight[targets.where(kept, torch.zeros_like(targets))][kept].sum())

    def declare(self, shape: torch.Size) -> Terms:
        """The terms of a call with outputs of this shape, without known targets.

        Raises:
            ClosureError: the curvature does not follow from the shape alone.
        """
        if self.of_pairs:
            raise ClosureError(
                f"KFAC saw no call of {type(self.module).__name__} in the closure, and the model's outputs "
                "alone do not show which are means and which are variances. Call the loss in the closure, "
                "or declare the outputs with kronfac.observe and kronfac.HeteroscedasticGaussian."
            )
        channels = isinstance(self.likelihood, Categorical) and len(shape) > 1
        terms = Terms(self.likelihood, shape, summed=not self.mean, channels=channels)
        if not self.mean:
            return terms
        count = shape.numel() if self.over_outputs else terms.count
        return terms.scaled(1 / count)


def is_loss(module: nn.Module) -> bool:
    """Whether a module is a loss that KFAC knows."""
    return isinstance(module, Likelihood) or type(module) in LOSSES


def objective_of(loss: nn.Module) -> Objective:
    """The objective of a loss module.

    Raises:
        UnsupportedLossError: KFAC does not know the module, or its loss is not a scalar.
    """
    if isinstance(loss, Likelihood):
        return Objective(loss, loss, likelihood_loss, mean=not loss.summed)
    # Exact types: a subclass may compute anything in its forward.
    form = LOSSES.get(type(loss))
    name = type(loss).__name__
    if not isinstance(loss, nn.Module):
        name = f"the {name} {getattr(loss, '__name__', loss)}"
    if isinstance(loss, type) and (loss in LOSSES or issubclass(loss, Likelihood)):
        raise UnsupportedLossError(
            f"KFAC needs a loss module, not its class; got {name}. Make one: {loss.__name__}()."
        )
    modules = [kind.__name__ for kind, known in LOSSES.items() if known.function is loss]
    if modules:
        raise UnsupportedLossError(
            f"KFAC needs a loss module; got {name}. Give it nn.{modules[0]}(), and call that in the loop; "
            "a closure may also call the function."
        )
    if form is None:
        known = ", ".join(module.__name__ for module in LOSSES)
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
    weights = {name: getattr(loss, name) for name in form.weights}
    return Objective(
        loss,
        form.likelihood(**options),
        form.function,
        {"reduction": reduction, **options, **weights},
        reduction == "mean",
        over_outputs=not form.classes,
    )
