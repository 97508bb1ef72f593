"""λ₀ is found on the first mini-batch."""

import copy
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from kronfac import KFAC, AdaptiveDamping, FixedDamping, FixedGamma
from kronfac.extend import BlockDiagonalInverse, ExactTikhonov, LambdaSearch, SampledFisher
from tests.conftest import mlp, normal
from tests.optimizer.runs import INVERSES

LOSS = nn.MSELoss()
SEARCH = LambdaSearch()
TRUSTED, MOST_TRIALS = SEARCH.trusted, SEARCH.most_trials
least_trusted = SEARCH.least_trusted
ETA = 1e-3


def objective(model: nn.Module, x, y) -> float:
    with torch.no_grad():
        squares = sum(float(p.square().sum()) for p in model.parameters())
        return float(LOSS(model(x), y)) + ETA / 2 * squares


def mean_curvature(optimizer: KFAC) -> float:
    """tr F̃ over the number of parameters, by the definition of the blocks."""
    blocks = optimizer.state_dict()["kfac"]["curvature"]["blocks"]
    trace = sum(float(block["A"].trace() * block["G"].trace()) for block in blocks)
    return trace / sum(len(block["A"]) * len(block["G"]) for block in blocks)


@pytest.mark.parametrize("start", [None, 1e-3, 1.0, 150.0, 1e4])
@pytest.mark.parametrize("inverse", INVERSES)
@pytest.mark.parametrize("far", [False, True])
def test_the_first_lambda_is_about_the_smallest_whose_step_the_model_describes(inverse, start, far):
    """The floor, if steps to targets nearby are trusted with any damping; above it for targets far away."""
    model = mlp([4, 8, 3], seed=3)
    x = normal(60, 4)
    y = 10 * x[:, :3].tanh() if far else (3 * x[:, :3]).sin()
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
    assert 1 <= optimizer.report.trials <= MOST_TRIALS

    def rho(lambda_: float) -> float:
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
        change = objective(tried, x, y) - objective(model, x, y)
        return change / fixed.report.predicted_change

    floor = SEARCH.least_curvature * mean_curvature(optimizer)
    if far:
        assert lambda_ > 100 * floor
        assert rho(3 * lambda_) > TRUSTED > rho(lambda_ / 10)
        assert rho(lambda_) == pytest.approx(TRUSTED, abs=0.15)
    else:
        assert lambda_ == pytest.approx(floor, rel=1e-12)
        assert rho(lambda_) > TRUSTED


@given(crossing=st.floats(-6.5, 6.5))
def test_the_search_finds_where_rho_falls_to_the_trusted_value(crossing):
    """ρ rises from 0.2 to 1 over a decade, linearly in log x."""
    tried = []

    def rho(x: float) -> float:
        tried.append(x)
        return min(max(TRUSTED + 0.8 * (math.log10(x) - crossing), 0.2), 1.0)

    found, trials = least_trusted(rho, 1.0)
    assert math.log10(found) == pytest.approx(crossing, abs=0.55)
    assert trials == len(tried) <= MOST_TRIALS


def test_what_fails_counts_as_zero():
    found, _ = least_trusted(lambda x: 1.0 if x > 50 else -math.inf, 1.0)
    assert found == pytest.approx(100 * 10**-0.4)


def test_the_search_ends_where_nothing_or_everything_is_trusted():
    assert least_trusted(lambda x: 1.0, 1.0) == (pytest.approx(1e-9), MOST_TRIALS)
    assert least_trusted(lambda x: -math.inf, 1.0) == (pytest.approx(1e9), MOST_TRIALS)
    assert least_trusted(lambda x: 1.0, 1.0, floor=2e-4) == (pytest.approx(2e-4), 5)


def test_where_rho_says_nothing_the_search_stays():
    assert least_trusted(lambda x: math.nan, 1.0) == (1.0, 2)
    found, _ = least_trusted(lambda x: math.nan if x < 0.5e-2 else 1.0, 1.0)
    assert found == pytest.approx(1e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_first_mini_batch_that_is_fitted_already_does_not_make_lambda_huge(dtype):
    model = mlp([4, 8, 3], seed=3).to(dtype)
    x = normal(60, 4).to(dtype)
    optimizer = KFAC(model, LOSS)
    optimizer.step(optimizer.closure(x, model(x).detach()))
    assert optimizer.report.lambda_ < 1e3
    y = (3 * x[:, :3]).sin()
    losses = [float(optimizer.step(optimizer.closure(x, y))) for _ in range(30)]
    assert losses[-1] < losses[0] / 3


def test_with_dropout_trials_draw_the_masks_of_the_closure():
    """A module that keeps what it is asked to leaves out says whether they do."""
    masks = []

    class Watched(nn.Dropout):
        def forward(self, x):
            out = super().forward(x)
            mask = out.detach() == 0
            if mask.any():  # the check of where the examples are is made without dropout
                masks.append(mask)
            return out

    watched = Watched(0.5)
    model = nn.Sequential(*mlp([4, 8], seed=3), watched, *mlp([8, 3], seed=4))
    optimizer = KFAC(model, LOSS)
    optimizer.step(optimizer.closure(normal(60, 4), normal(60, 3)))
    assert optimizer.report.trials > 1
    assert len(masks) > optimizer.report.trials
    assert all(torch.equal(mask, masks[0]) for mask in masks)
    optimizer.step(optimizer.closure(normal(60, 4), normal(60, 3)))
    assert not torch.equal(masks[-1], masks[0]), "but those of the next step are others"


@pytest.mark.parametrize("inverse", [BlockDiagonalInverse(ExactTikhonov()), "block_tridiagonal"])
def test_a_first_mini_batch_that_is_not_finite_is_refused(inverse):
    optimizer = KFAC(mlp([4, 5, 3]), LOSS, inverse=inverse)
    optimizer.step(optimizer.closure(normal(20, 4) * math.nan, normal(20, 3)))
    assert optimizer.report.refused
    optimizer.step(optimizer.closure(normal(20, 4), normal(20, 3)))
    assert not optimizer.report.refused


@pytest.mark.parametrize(
    ("damping", "start"),
    [
        (AdaptiveDamping(search=None), None),
        (AdaptiveDamping(lambda_=0.7, search=None), 0.7),
        (FixedDamping(0.3), 0.3),
    ],
)
def test_without_a_search_lambda_stays_where_it_starts(damping, start):
    optimizer = KFAC(mlp([4, 5, 3]), LOSS, damping=damping)
    optimizer.step(optimizer.closure(normal(20, 4), normal(20, 3)))
    expected = mean_curvature(optimizer) if start is None else start
    assert optimizer.report.trials == 0
    assert optimizer.report.lambda_ == pytest.approx(expected, rel=1e-12)
    assert optimizer.report.gamma == pytest.approx(math.sqrt(expected))
