"""How losses over classes are read: `cross_entropy` of logits, `nll_loss` of log-probabilities.

In z = log p the negative log-likelihood −z_y is linear, and its Hessian is 0. The Fisher is diag(p). As
Σ_c e^{z_c} = 1 for all parameters, pᵀJ = 0, and diag(p) − p pᵀ gives the same JᵀF_R J: the Fisher of a
categorical distribution with logits z, since softmax(log p) = p. So both losses are read alike.
"""

import torch
from torch import Tensor

from kronfac.errors import TargetError
from kronfac.objective.categorical import Categorical
from kronfac.objective.reduction import is_mean
from kronfac.objective.terms import Terms


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
