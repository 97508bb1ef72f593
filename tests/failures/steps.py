"""What a step did, in numbers that the public interface gives."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from kronfac import KFAC, FixedDamping, FixedGamma, Intervals, RawStep

LAMBDA, GAMMA, ALPHA = 0.3, 0.5, 0.5
FIXED: dict[str, Any] = {
    "damping": FixedDamping(LAMBDA),
    "gamma": FixedGamma(GAMMA),
    "step_rule": RawStep(ALPHA),
    "intervals": Intervals(1.0, 1.0),
}
"""Nothing is chosen, and everything is taken on all examples."""


def rejections(optimizer: KFAC) -> int:
    """How many steps the last call of `step` rejected."""
    assert optimizer.report is not None
    return sum(event.kind == "rejected" for event in optimizer.report.events)


def closure_of(optimizer: KFAC, objective: Callable[[nn.Module], Tensor]) -> Callable[[], Tensor]:
    """The closure that a user writes for `objective(model)`."""

    def closure() -> Tensor:
        optimizer.zero_grad()
        value = objective(optimizer.model)
        value.backward()
        return value

    return closure


def train(optimizer: KFAC, closure: Callable[[], Tensor], steps: int) -> list[float]:
    """The loss before each step."""
    return [float(optimizer.step(closure).detach()) for _ in range(steps)]


def flat(model: nn.Module) -> Tensor:
    """All parameters in one vector, a copy."""
    return torch.cat([p.detach().flatten() for p in model.parameters()])
