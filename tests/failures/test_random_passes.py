"""Dropout and other noise in `forward`: passes that are compared use the same random numbers."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kronfac import KFAC, LevenbergMarquardtRule
from tests.conftest import normal
from tests.failures.steps import rejections

WEIGHT_DECAY = 1e-3


class Quiet(nn.Module):
    """A network with room for noise behind its first layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.hidden = nn.Linear(4, 12, dtype=torch.float64)
        self.out = nn.Linear(12, 1, dtype=torch.float64)

    def noise(self, a: Tensor) -> Tensor:
        return a

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.noise(torch.tanh(self.hidden(x))))


class DropoutModule(Quiet):
    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.2)

    def noise(self, a: Tensor) -> Tensor:
        return self.dropout(a)


class FunctionalDropout(Quiet):
    def noise(self, a: Tensor) -> Tensor:
        return F.dropout(a, 0.2, self.training)


class AddedNoise(Quiet):
    def noise(self, a: Tensor) -> Tensor:
        return a + 0.2 * torch.randn_like(a) if self.training else a


NOISY = [DropoutModule, FunctionalDropout, AddedNoise]


def parameters(model: nn.Module) -> dict[str, Tensor]:
    """A copy of every parameter."""
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def mini_batch(step: int) -> tuple[Tensor, Tensor]:
    x = normal(64, 4, seed=step)
    return x, x.prod(dim=1, keepdim=True) + x[:, :1]


def change_of_objective(model: nn.Module, closure: Any, before: Any) -> float:
    """h(θ) − h(θ_before) on the rows and with the random numbers of the closure's call, at its θ."""
    x, y = closure.rows
    values = []
    for theta in (closure.theta, before):
        with torch.random.fork_rng(), torch.no_grad():
            torch.set_rng_state(closure.random_state)
            outputs = torch.func.functional_call(model, theta, (x,))
        penalty = WEIGHT_DECAY / 2 * sum(float(p.square().sum()) for p in theta.values())
        values.append(float(F.mse_loss(outputs, y)) + penalty)
    return values[0] - values[1]


class Closure:
    """Remembers θ and the random state that it was first called with."""

    def __init__(self, optimizer: KFAC, loss: nn.Module, step: int) -> None:
        self.optimizer, self.loss, self.rows = optimizer, loss, mini_batch(step)
        self.theta: Any = None

    def __call__(self) -> Tensor:
        if self.theta is None:
            self.theta = parameters(self.optimizer.model)
            self.random_state = torch.get_rng_state()
        self.optimizer.zero_grad()
        x, y = self.rows
        value = self.loss(self.optimizer.model(x), y)
        value.backward()
        return value


@pytest.mark.parametrize("network", [Quiet, *NOISY])
def test_the_reduction_ratio_is_with_the_same_masks_before_and_after(network):
    loss = nn.MSELoss()
    optimizer = KFAC(network(), loss, weight_decay=WEIGHT_DECAY)
    before, predicted = None, None
    ratios = []
    for step in range(25):
        closure = Closure(optimizer, loss, step)
        optimizer.step(closure)
        report = optimizer.report
        if report.next_rho is not None and not math.isnan(report.next_rho):
            change = change_of_objective(optimizer.model, closure, before)
            ratios.append((report.next_rho, change / predicted))
        # A step that replaces a rejected one starts where that one did.
        before = before if rejections(optimizer) else closure.theta
        predicted = report.predicted_change
    # Iterations 2 to 20, which all validate the step before, and 25.
    assert len(ratios) == 20
    for ours, truth in ratios:
        assert abs(ours - truth) <= 1e-6 * max(abs(truth), 1.0), ratios


@pytest.mark.parametrize("network", [Quiet, *NOISY])
def test_the_ratio_of_the_step_itself_is_with_the_masks_of_the_closure(network):
    loss = nn.MSELoss()
    damping = LevenbergMarquardtRule(lambda_=0.1, interval=1)
    optimizer = KFAC(network(), loss, weight_decay=WEIGHT_DECAY, damping=damping)
    for step in range(3):
        closure = Closure(optimizer, loss, step)
        optimizer.step(closure)
        after = parameters(optimizer.model)
        truth = -change_of_objective(optimizer.model, closure, after)
        truth /= optimizer.report.predicted_change
        assert abs(optimizer.report.rho - truth) <= 1e-6 * max(abs(truth), 1.0)
