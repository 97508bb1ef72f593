"""Exponentially decayed averaging of the iterates, loosely after Polyak [MG15 §13]."""

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel


def averaged(model: nn.Module, decay: float = 0.99) -> AveragedModel:
    """A copy of the model that holds the average of its parameters over `update_parameters` calls.

    θ̄_t = ξ_t θ̄_{t−1} + (1 − ξ_t) θ_t, with ξ_t = min(1 − 1/t, `decay`) at the t-th call: the first
    one copies, and up to t = 1 / (1 − `decay`) it is the plain mean. The paper has ξ = 0.99; the
    authors' program makes its first call at iteration 200, as the iterates before are far away.

    Deviation: the paper states a constant ξ. That would weigh the first iterate as heavily as the
    last hundred; min(1 − 1/t, ξ) is what the authors' program does.

    Example:
        >>> model = nn.Linear(2, 1)
        >>> average = averaged(model)
        >>> average.update_parameters(model)  # after each step of the optimizer
    """
    if not 0.0 <= decay < 1.0:
        raise ValueError(f"averaged needs 0 <= decay < 1, got decay={decay}.")

    def average(mean: Tensor, parameter: Tensor, updates: Tensor | int) -> Tensor:
        """θ̄ + (1 − ξ_t) (θ − θ̄), where `updates` is t − 1."""
        # The weight stays a tensor: reading the counter would synchronise with the device.
        precision = torch.promote_types(mean.dtype, torch.float32)
        t = torch.as_tensor(updates, device=mean.device, dtype=precision) + 1
        weight = t.reciprocal().clamp(min=1.0 - decay)
        return torch.lerp(mean, parameter, weight.to(mean.dtype))

    return AveragedModel(model, avg_fn=average)
