"""What a step did, in numbers that the public interface gives."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from kronfac import KFAC, FixedDamping, FixedGamma, Intervals, RawStep
from tests.reference import gauss_newton as reference

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


def curvatures(
    optimizer: KFAC,
    logits: Callable[[Callable[..., Tensor]], Tensor],
    loss: Callable[[Tensor], Tensor],
    steps: int = 3,
) -> Iterator[tuple[float, float]]:
    """δᵀFδ by K-FAC's account and the true one, for some steps of an optimizer with `FIXED`.

    The report says M(δ) − M(0) = ½ δᵀ(F + (λ + η)I)δ + ∇hᵀδ, in which all but F is known.
    """
    model = optimizer.model
    eta = float(optimizer.param_groups[0]["weight_decay"])

    def objective(module: Callable[..., Tensor]) -> Tensor:
        return loss(logits(module))

    for _ in range(steps):
        before = reference.parameters(model)
        slope = reference.gradient(model, objective)
        optimizer.step(closure_of(optimizer, objective))
        assert optimizer.report is not None
        assert optimizer.report.predicted_change is not None, optimizer.report
        after = reference.parameters(model)
        delta = {name: after[name] - before[name] for name in before}
        linear = reference.inner(slope, delta) + eta * reference.inner(before, delta)
        damped = 2 * (optimizer.report.predicted_change - linear)
        ours = damped - (LAMBDA + eta) * reference.inner(delta, delta)
        yield ours, reference.curvature(model, before, logits, loss, delta)


def assert_right_curvature(
    optimizer: KFAC,
    logits: Callable[[Callable[..., Tensor]], Tensor],
    loss: Callable[[Tensor], Tensor],
) -> None:
    """δᵀFδ is the dense one, for a few steps."""
    for ours, truth in curvatures(optimizer, logits, loss):
        assert truth > 0
        assert abs(ours - truth) <= 1e-6 * truth, f"{ours / truth:.4g} times the truth"


def flat(model: nn.Module) -> Tensor:
    """All parameters in one vector, a copy."""
    return torch.cat([p.detach().flatten() for p in model.parameters()])
