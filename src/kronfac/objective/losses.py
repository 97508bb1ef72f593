"""How loss functions are read: a call with outputs and targets, as `Terms`.

| loss | likelihood | s, mean | s, sum |
| --- | --- | --- | --- |
| `kronfac.Gaussian`, `Bernoulli`, `Categorical`, called | itself | 1 / terms | – |
| `mse_loss` | Gaussian(σ² = ½) | 1 / (terms · event) | 1 |
| `binary_cross_entropy_with_logits` | Bernoulli | 1 / (terms · event) | 1 |
| `cross_entropy` | Categorical | 1 / Σw | 1 |

So `MSELoss()` is the average negative log-likelihood of a Gaussian with variance event / 2. A loss module
of torch calls the function of the same name, so both are read here.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from kronfac.errors import TargetError, UnsupportedLossError
from kronfac.objective.base import Likelihood, likelihood_loss
from kronfac.objective.bernoulli import Bernoulli
from kronfac.objective.categorical import Categorical
from kronfac.objective.gaussian import Gaussian
from kronfac.objective.terms import Terms

Reader = Callable[..., Terms]
"""From a loss function's own arguments to its terms."""
_SQUARE, _LOGISTIC = Gaussian(variance=0.5), Bernoulli()
"""Made once: they are modules, which take longer to make than all else here."""


def _reduction(name: str, reduction: str, size_average: bool | None, reduce: bool | None) -> bool:
    """Whether the loss is a mean; False if it is a sum."""
    if size_average is not None or reduce is not None:
        raise UnsupportedLossError(
            f"KFAC reads {name} with the argument reduction, not size_average and reduce."
        )
    if reduction not in ("mean", "sum"):
        raise UnsupportedLossError(
            f"KFAC needs {name} with reduction 'mean' or 'sum', a scalar; got {reduction!r}."
        )
    return reduction == "mean"


def _rows(outputs: Tensor, values: Tensor) -> Tensor:
    """Values of the outputs' shape as (terms, event)."""
    return values.expand_as(outputs).reshape(len(outputs) if outputs.dim() else 1, -1)


def _shape(outputs: Tensor) -> torch.Size:
    return outputs.shape if outputs.dim() else torch.Size((1,))


def _mse(
    input: Tensor,
    target: Tensor,
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: str = "mean",
    weight: Tensor | None = None,
) -> Terms:
    likelihood = _SQUARE
    likelihood.check(input, target)
    mean = _reduction("mse_loss", reduction, size_average, reduce)
    scale = 1 / input.numel() if mean else 1.0
    weights = None if weight is None else _rows(input, weight.detach())
    if weights is not None and mean:
        weights, scale = weights / weights.sum(), 1.0
    targets = _rows(input, target.detach())
    return Terms(likelihood, _shape(input), scale, weights, targets, summed=not mean)


def _bce(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: str = "mean",
    pos_weight: Tensor | None = None,
) -> Terms:
    likelihood = _LOGISTIC
    likelihood.check(input, target)
    mean = _reduction("binary_cross_entropy_with_logits", reduction, size_average, reduce)
    weights = None if weight is None else _rows(input, weight.detach())
    if pos_weight is not None:
        # −[p y log σ(z) + (1 − y) log(1 − σ(z))] has the curvature (p y + 1 − y) σ(z) (1 − σ(z)).
        positive = _rows(input, 1 + (pos_weight.detach() - 1) * target.detach())
        weights = positive if weights is None else weights * positive
    scale = 1 / input.numel() if mean else 1.0
    targets = _rows(input, target.detach())
    return Terms(likelihood, _shape(input), scale, weights, targets, summed=not mean)


def _cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Terms:
    mean = _reduction("cross_entropy", reduction, size_average, reduce)
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
    return Terms(likelihood, shape, scale, weights, targets, not mean, channels=True)


def _sum(weight: Tensor | None, classes: int) -> Tensor | float:
    return float(classes) if weight is None else weight.detach().sum()


def _likelihood(likelihood: Likelihood, outputs: Tensor, targets: Tensor) -> Terms:
    likelihood.check(outputs, targets)
    if targets.shape == outputs.shape:
        targets = _rows(outputs, targets)
    return Terms(likelihood, outputs.shape, 1 / len(outputs), None, targets.detach())


READERS: dict[Callable[..., Any], Reader] = {
    functional.mse_loss: _mse,
    functional.binary_cross_entropy_with_logits: _bce,
    functional.cross_entropy: _cross_entropy,
    likelihood_loss: _likelihood,
}
"""The reader of every loss function that K-FAC knows."""
