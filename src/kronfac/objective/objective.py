"""The loss that KFAC is given: a module, and how its calls are read."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from kronfac.errors import UnsupportedLossError
from kronfac.objective.base import Likelihood, likelihood_loss
from kronfac.objective.bernoulli import Bernoulli
from kronfac.objective.categorical import Categorical
from kronfac.objective.gaussian import Gaussian
from kronfac.objective.losses import READERS
from kronfac.objective.terms import Terms


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

    def read(self, outputs: Tensor, targets: Tensor) -> Terms:
        """The terms of a call.

        Raises:
            TargetError: the targets do not fit.
        """
        first = (self.module,) if self.function is likelihood_loss else ()
        return READERS[self.function](*first, outputs, targets, **self.options)

    def denominator(self, targets: Tensor) -> float:
        """What a mean over these targets divides by, relative to others; 0 if all of them are ignored."""
        if self.function is not functional.cross_entropy or targets.is_floating_point():
            return float(len(targets))
        kept = targets != self.options["ignore_index"]
        weight = self.options["weight"]
        if weight is None:
            return float(kept.sum())
        return float(weight[targets.where(kept, torch.zeros_like(targets))][kept].sum())

    def declare(self, shape: torch.Size) -> Terms:
        """The terms of a call with outputs of this shape, if nothing is known of its targets."""
        channels = isinstance(self.likelihood, Categorical) and len(shape) > 1
        terms = Terms(self.likelihood, shape, summed=not self.mean, channels=channels)
        if not self.mean:
            return terms
        count = shape.numel() if self.over_outputs else terms.count
        return terms.scaled(1 / count)


def objective_of(loss: nn.Module) -> Objective:
    """The objective that a loss module computes.

    Raises:
        UnsupportedLossError: the module is not one that KFAC knows, or is no scalar.
    """
    if isinstance(loss, Likelihood):
        return Objective(loss, loss, likelihood_loss)
    name = type(loss).__name__
    # Exact types: a subclass may compute anything in its forward.
    if type(loss) not in (nn.MSELoss, nn.BCEWithLogitsLoss, nn.CrossEntropyLoss):
        raise UnsupportedLossError(
            f"KFAC needs a loss that is the negative log-likelihood of a predictive distribution; "
            f"{name} is not one it knows. Use MSELoss, BCEWithLogitsLoss, CrossEntropyLoss, "
            "kronfac.Gaussian, kronfac.Bernoulli or kronfac.Categorical."
        )
    reduction = str(loss.reduction)
    if reduction not in ("mean", "sum"):
        raise UnsupportedLossError(
            f"KFAC needs {name} with reduction 'mean' or 'sum', a scalar; got {reduction!r}."
        )
    mean = reduction == "mean"
    options: dict[str, Any] = {"reduction": reduction}
    if isinstance(loss, nn.MSELoss):
        gaussian = Gaussian(variance=0.5)
        return Objective(loss, gaussian, functional.mse_loss, options, mean, over_outputs=True)
    if isinstance(loss, nn.BCEWithLogitsLoss):
        options |= {"weight": loss.weight, "pos_weight": loss.pos_weight}
        function = functional.binary_cross_entropy_with_logits
        return Objective(loss, Bernoulli(), function, options, mean, over_outputs=True)
    assert isinstance(loss, nn.CrossEntropyLoss)
    options |= {
        "weight": loss.weight,
        "ignore_index": loss.ignore_index,
        "label_smoothing": loss.label_smoothing,
    }
    categorical = Categorical(loss.label_smoothing)
    return Objective(loss, categorical, functional.cross_entropy, options, mean)
