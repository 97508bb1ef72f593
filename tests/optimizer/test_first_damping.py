"""λ₀ is found on the first mini-batch."""

import copy
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from kronfac import KFAC, AdaptiveDamping, FixedDamping, FixedGamma, SampledFisher
from kronfac.first_damping import MOST_TRIALS, best_by_factors
from tests.conftest import mlp, normal
from tests.optimizer.runs import INVERSES

LOSS = nn.MSELoss()
ETA = 1e-3


def objective(model: nn.Module, x, y) -> float:
    with torch.no_grad():
        squares = sum(float(p.square().sum()) for p in model.parameters())
        return float(LOSS(model(x), y)) + ETA / 2 * squares


@pytest.mark.parametrize("start", [None, 1e-3, 1.0, 150.0, 1e4])
@pytest.mark.parametrize("inverse", INVERSES)
def test_the_first_lambda_is_the_best_of_its_decade_neighbours(inverse, start):
    """The step of λ₀/10 and the one of 10 λ₀ lower the objective by less, or by hardly more."""
    model = mlp([4, 8, 3], seed=3)
    x = normal(60, 4)
    y = (3 * x[:, :3]).sin()
    optimizer = KFAC(
        copy.deepcopy(model),
        LOSS,
        inverse=inverse,
        weight_decay=ETA,
        damping=AdaptiveDamping(lambda_=start),
        fisher=SampledFisher(seed=4),
    )
    optimizer.step(optimizer.closure(x, y))
    lambda_ = optimizer.report.lambda_
    assert 2 <= optimizer.report.trials <= MOST_TRIALS
    if start is not None:
        decades = math.log10(lambda_ / start)
        assert decades == pytest.approx(round(decades), abs=1e-9)

    def decrease(lambda_: float) -> float:
        # A trial is a step of the block-diagonal inverse with γ = √(λ + η), whatever the inverse.
        tried = copy.deepcopy(model)
        fixed = KFAC(
            tried,
            LOSS,
            weight_decay=ETA,
            damping=FixedDamping(lambda_),
            gamma=FixedGamma(),
            fisher=SampledFisher(seed=4),
        )
        fixed.step(fixed.closure(x, y))
        return objective(model, x, y) - objective(tried, x, y)

    assert decrease(lambda_) >= decrease(10 * lambda_)
    assert 1.05 * decrease(lambda_) >= decrease(lambda_ / 10)


@given(best=st.integers(-5, 5))
def test_the_search_goes_uphill_and_stops(best):
    tried = []

    def gain(x: float) -> float:
        tried.append(x)
        return 100.0 - (math.log10(x) - best) ** 2 * 10

    found, trials = best_by_factors(gain, 1.0)
    assert found == pytest.approx(10.0**best)
    assert trials == len(tried) <= MOST_TRIALS


def test_what_gains_hardly_more_is_not_followed_for_ever():
    found, trials = best_by_factors(lambda x: 1.0 - 0.01 * math.log10(x), 1.0)
    assert found == pytest.approx(0.1)
    assert trials < MOST_TRIALS


def test_a_failure_is_no_gain():
    found, _ = best_by_factors(lambda x: -math.inf if x < 1e3 else -x, 1.0)
    assert 1e3 <= found <= 1e4


def test_settings_of_the_paper_try_nothing():
    optimizer = KFAC(mlp([4, 5, 3]), LOSS, damping=FixedDamping(0.3))
    optimizer.step(optimizer.closure(normal(20, 4), normal(20, 3)))
    assert optimizer.report.trials == 0
    assert optimizer.report.lambda_ == 0.3
