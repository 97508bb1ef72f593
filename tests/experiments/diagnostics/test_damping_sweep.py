"""The steps that `damping_sweep` tries are those that KFAC would take."""

import copy
import math

import pytest
import torch
from torch.testing import assert_close
from torch.utils._pytree import tree_leaves

from kronfac import (
    KFAC,
    Bernoulli,
    FixedGamma,
    Intervals,
    LevenbergMarquardtRule,
    QuadraticModel,
    RawStep,
)
from kronfac_experiments.diagnostics import damping_sweep
from kronfac_experiments.diagnostics.damping import RULES
from tests.conftest import mlp, normal, random_targets

GAMMAS = (0.05, 0.5)
DECAY = 1e-3


@pytest.fixture(params=[0, 3], ids=["", "a refresh under way"])
def run(request):
    """An optimizer after five steps, and a mini-batch for the next."""
    model, x = mlp((3, 5, 4, 2)), normal(30, 3, seed=4)
    y = random_targets(model(x), "bernoulli")
    optimizer = KFAC(
        model,
        Bernoulli(),
        inverse="block_tridiagonal",
        weight_decay=DECAY,
        damping=LevenbergMarquardtRule(),
        intervals=Intervals(inverse_interval=5, inverse_lag=request.param),
    )
    for _ in range(5):
        optimizer.step(optimizer.closure(x, y))
    assert (optimizer._state.refresh is not None) == bool(request.param)
    return optimizer, x, y


def objective(model, x, y):
    with torch.no_grad():
        squares = sum(float((p * p).sum()) for p in model.parameters())
        return float(Bernoulli()(model(x), y)) + DECAY / 2 * squares


@pytest.mark.parametrize(
    ("rule", "step_rule"),
    [
        ("re-scaling and momentum", QuadraticModel(bounded=False, memory=None)),
        ("re-scaling", QuadraticModel(momentum=False, bounded=False, memory=None)),
        ("neither", RawStep()),
    ],
)
def test_improvement_is_that_of_the_step_taken(run, rule, step_rule):
    optimizer, x, y = run
    found = damping_sweep(optimizer, optimizer.closure(x, y), GAMMAS)
    for gamma in GAMMAS:
        model = copy.deepcopy(optimizer.model)
        taken = KFAC(
            model,
            Bernoulli(),
            inverse="block_tridiagonal",
            weight_decay=DECAY,
            damping=LevenbergMarquardtRule(),
            gamma=FixedGamma(),
            step_rule=step_rule,
            intervals=Intervals(inverse_interval=1),
        )
        state = copy.deepcopy(optimizer.state_dict())
        state["kfac"]["gamma"] = {"class": "kronfac.GammaState", "gamma": gamma}
        if not step_rule.momentum:
            state["kfac"]["step"]["momentum"] = None
            state["state"] = {}
        taken.load_state_dict(state)
        before = objective(model, x, y)
        taken.step(taken.closure(x, y))
        (one,) = [i for i in found if i.rule == rule and i.gamma == gamma]
        assert_close(one.improvement, before - objective(model, x, y), rtol=1e-8, atol=1e-10)
        assert_close(one.predicted, -taken.report.predicted_change, rtol=1e-8, atol=1e-10)
        assert_close(one.alpha, taken.report.alpha, rtol=1e-8, atol=1e-10)
        assert_close(one.mu, taken.report.mu or 0.0, rtol=1e-8, atol=1e-10)


def test_every_rule_with_every_gamma_and_nothing_changes(run):
    optimizer, x, y = run
    parameters = copy.deepcopy(optimizer.model.state_dict())
    state = copy.deepcopy(optimizer.state_dict())
    found = damping_sweep(optimizer, optimizer.closure(x, y), GAMMAS)
    assert [(i.rule, i.gamma) for i in found] == [(r, g) for r in RULES for g in GAMMAS]
    assert found == damping_sweep(optimizer, optimizer.closure(x, y), GAMMAS)
    for name, value in optimizer.model.state_dict().items():
        assert torch.equal(value, parameters[name])
    leaves = zip(tree_leaves(optimizer.state_dict()), tree_leaves(state), strict=True)
    assert all(torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in leaves)
    # The best of the span is no worse, by the model that it is the best for.
    full, scaled, raw = ([i for i in found if i.rule == rule] for rule in RULES)
    for one, two, three in zip(full, scaled, raw, strict=True):
        assert one.predicted >= two.predicted - 1e-12 >= three.predicted - 2e-12


def test_steps_that_cannot_be_computed_are_nan(run):
    optimizer, x, y = run
    y = y.clone()
    y[0, 0] = math.nan
    found = damping_sweep(optimizer, optimizer.closure(x, y), GAMMAS)
    assert all(math.isnan(i.improvement) for i in found)


def test_a_lambda_that_is_not_yet_known():
    model, x = mlp((3, 5, 2)), normal(30, 3, seed=4)
    optimizer = KFAC(model, Bernoulli())
    with pytest.raises(ValueError, match="finds in the first step"):
        damping_sweep(optimizer, optimizer.closure(x, x[:, :2].sigmoid()), GAMMAS)
