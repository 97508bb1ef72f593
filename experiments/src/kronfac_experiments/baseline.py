"""The baseline of [MG15 §13]: Nesterov momentum as Sutskever et al. (2013) tuned it."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

UPDATES_PER_RISE = 250
"""Updates between two rises of μ (Sutskever et al. 2013, §3)."""


def momentum_at(t: int, maximum: float) -> float:
    """μ_t = min(1 − 2^(−1 − log₂(⌊t/250⌋ + 1)), μ_max): ½ at t = 0, ¾ from t = 250, ⅚ from t = 500."""
    # 2^(−1 − log₂ n) is 1 / 2n, and this way it is exact.
    return min(1 - 1 / (2 * (t // UPDATES_PER_RISE + 1)), maximum)


class PerParameter(torch.optim.Optimizer):
    """An optimizer that moves each parameter by its own gradient and state."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step; the gradients are the closure's, or those that are there without one."""
        returned = None
        if closure is not None:
            with torch.enable_grad():
                returned = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.move(parameter, parameter.grad, self.state[parameter], group)
        return returned

    def move(
        self, parameter: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]
    ) -> None:
        """Move a parameter, with its state and the settings of its group."""
        raise NotImplementedError


class NesterovMomentum(PerParameter):
    """Nesterov's accelerated gradient with a momentum that rises as it goes.

    With v₀ = 0 and t = 0, 1, 2, …

        v ← μ_t v − ε ∇h(θ + μ_t v),   θ ← θ + v,   μ_t = min(1 − 2^(−1 − log₂(⌊t/250⌋ + 1)), μ_max)

    The gradient is wanted at φ = θ + μ_t v, so φ is what the model holds, and the closure is an
    ordinary one. In terms of φ the same update is

        v ← μ_t v − ε g,   φ ← φ − ε g + μ_{t+1} v,   g = ∇h(φ)

    `torch.optim.SGD(nesterov=True)` is not the same if μ changes: it uses one μ for both.

    Deviation: Sutskever et al. lower μ to 0.9 for the last 1000 updates. Here the iterates are
    averaged instead, as in [MG15 §13], and no end has to be known.

    Example:
        >>> model = nn.Linear(2, 1)
        >>> optimizer = NesterovMomentum(model.parameters(), lr=0.01, mu_max=0.99)

    Args:
        params: Parameters, or groups of them.
        lr: ε.
        mu_max: μ_max; Sutskever et al. choose from 0, 0.9, 0.99, 0.995 and 0.999.
        weight_decay: η of h(θ) + η/2 ‖θ‖², biases included.

    Reference: Sutskever, Martens, Dahl and Hinton, On the importance of initialization and
    momentum in deep learning, 2013.
    """

    def __init__(
        self,
        params: Iterable[nn.Parameter] | Iterable[dict[str, Any]],
        lr: float,
        mu_max: float = 0.99,
        weight_decay: float = 0.0,
    ) -> None:
        if not 0 < lr < float("inf"):
            raise ValueError(f"NesterovMomentum needs a positive, finite lr; got {lr}.")
        if not 0 <= mu_max < 1:
            raise ValueError(f"NesterovMomentum needs 0 <= mu_max < 1; got {mu_max}.")
        if not 0 <= weight_decay < float("inf"):
            raise ValueError(
                f"NesterovMomentum needs a finite weight_decay, not negative; got {weight_decay}."
            )
        defaults = {"lr": lr, "mu_max": mu_max, "weight_decay": weight_decay, "updates": 0}
        super().__init__(params, defaults)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step; the gradients are the closure's, or those that are there without one."""
        returned = super().step(closure)
        for group in self.param_groups:
            group["updates"] += 1
        return returned

    def move(
        self, parameter: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]
    ) -> None:
        """v ← μ_t v − ε g,  φ ← φ − ε g + μ_{t+1} v."""
        t, maximum, lr = group["updates"], group["mu_max"], group["lr"]
        if group["weight_decay"]:
            gradient = gradient.add(parameter, alpha=group["weight_decay"])
        if "velocity" not in state:
            state["velocity"] = torch.zeros_like(parameter)
        velocity = state["velocity"]
        velocity.mul_(momentum_at(t, maximum)).add_(gradient, alpha=-lr)
        parameter.add_(gradient, alpha=-lr).add_(velocity, alpha=momentum_at(t + 1, maximum))
