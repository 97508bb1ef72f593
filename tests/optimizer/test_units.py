"""With the default rules and η = 0 a run does not depend on the units of the loss."""

import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kronfac import KFAC, AdaptiveGamma, Gaussian
from kronfac.control.gamma import LEAST_TRIED
from tests.conftest import mlp, normal
from tests.optimizer.runs import INVERSES

EXAMPLES = 64
SAME = {"rtol": 1e-6, "atol": 1e-7}
"""Rounding error after a run."""


def regression(step: int, noise: float) -> tuple[Tensor, Tensor]:
    x = normal(EXAMPLES, 4, seed=2 * step)
    y = torch.cat([x[:, :1] * x[:, 1:2], x[:, 2:3].sin()], dim=1)
    return x, y + noise * normal(EXAMPLES, 2, seed=2 * step + 1)


def run(
    loss: nn.Module,
    data: Callable[[int], tuple[Tensor, Tensor]],
    steps: int,
    inverse: str = "block_diagonal",
    **settings: Any,
) -> tuple[Tensor, KFAC]:
    model = mlp([4, 8, 8, 2], seed=3)
    optimizer = KFAC(model, loss, inverse=inverse, **settings)
    for k in range(steps):
        optimizer.step(optimizer.closure(*data(k)))
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()]), optimizer


DATA: dict[str, Callable[[int], tuple[Tensor, Tensor]]] = {
    "full batch": lambda k: regression(0, 0.0),
    "mini-batches": lambda k: regression(k, 0.0),
    "noise": lambda k: regression(k, 1.0),
}


@functools.cache
def unscaled(inverse: str, data: str) -> tuple[Tensor, KFAC]:
    return run(Gaussian(), DATA[data], 30, inverse)


@pytest.mark.parametrize("variance", [1e-8, 3.0, 1e8])
@pytest.mark.parametrize("data", DATA)
@pytest.mark.parametrize("inverse", INVERSES)
def test_the_variance_of_a_gaussian_is_a_unit(inverse, data, variance):
    expected, one = unscaled(inverse, data)
    found, other = run(Gaussian(variance=variance), DATA[data], 30, inverse)
    torch.testing.assert_close(found, expected, **SAME)
    assert other.report.lambda_ * variance == pytest.approx(one.report.lambda_, rel=1e-5)
    assert other.report.gamma * variance**0.5 == pytest.approx(one.report.gamma, rel=1e-5)


@pytest.mark.parametrize("variance", [1e-8, 1e8])
def test_where_gamma_is_at_its_floor_too(variance, monkeypatch):
    """By M alone γ falls to its floor, if M is fitted to noise; here to that of float32, which is near."""
    least = LEAST_TRIED * (torch.finfo(torch.float32).eps / torch.finfo(torch.float64).eps) ** 0.5
    monkeypatch.setattr("kronfac.control.gamma.LEAST_TRIED", least)
    gamma = AdaptiveGamma(strength=None)
    expected, one = run(Gaussian(), DATA["noise"], 130, gamma=gamma)
    found, other = run(Gaussian(variance=variance), DATA["noise"], 130, gamma=gamma)
    state = one.state_dict()["kfac"]
    blocks = [(block["A"], block["G"]) for block in state["curvature"]["blocks"]]
    trace = sum(float(A.trace() * G.trace()) for A, G in blocks)
    mean = trace / sum(len(A) * len(G) for A, G in blocks)
    curvature = max(state["gamma"]["curvature"], mean)
    assert one.report.gamma == pytest.approx(LEAST_TRIED * math.sqrt(curvature), rel=0.1)
    assert other.report.gamma * variance**0.5 == pytest.approx(one.report.gamma, rel=1e-5)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def classes(step: int) -> tuple[Tensor, Tensor]:
    x, y = regression(step, 1.0)
    return x, y.argmax(dim=1)


def bits(step: int) -> tuple[Tensor, Tensor]:
    x, y = regression(step, 1.0)
    return x, (y > 0).double()


@pytest.mark.parametrize("inverse", INVERSES)
@pytest.mark.parametrize(
    ("loss", "data", "scale"),
    [
        (nn.MSELoss, DATA["noise"], 2 * EXAMPLES),
        (nn.BCEWithLogitsLoss, bits, 2 * EXAMPLES),
        (nn.CrossEntropyLoss, classes, EXAMPLES),
    ],
)
def test_a_sum_is_the_mean_in_other_units(loss, data, scale, inverse):
    """With as many examples in every mini-batch."""
    expected, one = run(loss(), data, 30, inverse)
    found, other = run(loss(reduction="sum"), data, 30, inverse)
    torch.testing.assert_close(found, expected, **SAME)
    assert other.report.loss == pytest.approx(scale * one.report.loss, rel=1e-5)
    assert other.report.lambda_ == pytest.approx(scale * one.report.lambda_, rel=1e-5)


@pytest.mark.parametrize("inverse", INVERSES)
def test_in_units_of_a_power_of_four_runs_are_equal_to_the_bit(inverse):
    """A sum over 64 examples: every number of the run, √ included, differs in its exponent alone."""
    expected, _ = run(nn.CrossEntropyLoss(), classes, 45, inverse)
    found, _ = run(nn.CrossEntropyLoss(reduction="sum"), classes, 45, inverse)
    assert torch.equal(found, expected)
