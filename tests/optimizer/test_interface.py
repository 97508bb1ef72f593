"""KFAC as a `torch.optim.Optimizer`, and what its report says."""

import inspect
import math
import time

import pytest
import torch
from torch import Tensor, nn

from kronfac import KFAC, GammaSearch, LevenbergMarquardtRule, QuadraticModel
from tests.conftest import mlp, normal, passes_either_way
from tests.optimizer.pseudocode import Pseudocode
from tests.optimizer.runs import INVERSES, agree

passes = passes_either_way()

LOSS = nn.MSELoss()


def data(step: int) -> tuple[Tensor, Tensor]:
    return normal(15, 4, seed=step), normal(15, 3, seed=100 + step)


def test_it_is_an_optimizer_with_one_group_of_all_parameters():
    model = mlp([4, 5, 3])
    optimizer = KFAC(model, LOSS, weight_decay=0.25)
    assert isinstance(optimizer, torch.optim.Optimizer)
    (group,) = optimizer.param_groups
    assert {id(p) for p in group["params"]} == {id(p) for p in model.parameters()}
    assert group["weight_decay"] == 0.25


def test_at_most_sixteen_settings_beside_those_of_every_optimizer():
    parameters = inspect.signature(KFAC).parameters.values()
    settings = [p for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY]
    assert len([p for p in settings if p.name not in ("params", "lr", "weight_decay")]) <= 16
    assert all(p.default is not inspect.Parameter.empty for p in settings)


def test_repr_says_what_it_is():
    optimizer = KFAC(mlp([4, 5, 3]), LOSS, weight_decay=0.25)
    assert repr(optimizer).startswith("KFAC (")
    assert "weight_decay: 0.25" in repr(optimizer)


def test_a_frozen_layer_is_no_parameter_of_it_and_stays():
    model = mlp([4, 5, 5, 3])
    model[2].requires_grad_(False)
    kept = model[2].weight.detach().clone()
    optimizer = KFAC(model, LOSS)
    assert len(optimizer.param_groups[0]["params"]) == 4
    optimizer.step(optimizer.closure(*data(0)))
    assert torch.equal(model[2].weight, kept)
    assert model[2].weight.grad is None


def test_zero_grad():
    model = mlp([4, 5, 3])
    optimizer = KFAC(model, LOSS)
    optimizer.step(optimizer.closure(*data(0)))
    assert all(p.grad is not None for p in model.parameters())
    optimizer.zero_grad(set_to_none=False)
    assert all(not p.grad.any() for p in model.parameters())
    optimizer.zero_grad()
    assert all(p.grad is None for p in model.parameters())


def test_a_group_of_parameters_from_elsewhere_is_refused():
    optimizer = KFAC(mlp([4, 5, 3]), LOSS)
    with pytest.raises(ValueError, match="parameters of the model"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})
    assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize("inverse", INVERSES)
def test_a_change_of_weight_decay_takes_effect_at_once(inverse):
    model = mlp([4, 5, 4, 3], seed=3)
    tridiagonal = inverse == "block_tridiagonal"
    optimizer = KFAC(
        model,
        LOSS,
        inverse=inverse,
        fisher="exact",
        damping=LevenbergMarquardtRule(lambda_=0.5, interval=2),
        gamma=GammaSearch(interval=6, minimum=0.1),
        inverse_interval=3,
    )
    expected = Pseudocode(
        model, LOSS, tridiagonal=tridiagonal, lambda_=0.5, T1=2, T2=6, T3=3, gamma_min=0.1
    )
    for step, decay in enumerate([0.0, 0.0, 0.3, 0.3, 0.3, 0.02, 0.02, 0.0]):
        optimizer.param_groups[0]["weight_decay"] = expected.eta = decay
        agree(optimizer, expected, *data(step))


def test_step_hooks_of_torch_are_called():
    optimizer = KFAC(mlp([4, 5, 3]), LOSS)
    called = []
    optimizer.register_step_pre_hook(lambda *_: called.append("before"))
    optimizer.register_step_post_hook(lambda *_: called.append("after"))
    optimizer.step(optimizer.closure(*data(0)))
    assert called == ["before", "after"]


# ----------------------------------------------------------------------------------------- report


def test_there_is_no_report_before_the_first_step():
    assert KFAC(mlp([4, 5, 3]), LOSS).report is None


def test_what_the_report_holds():
    model = mlp([4, 5, 3], seed=3)
    damping = LevenbergMarquardtRule(lambda_=0.5, interval=2)
    optimizer = KFAC(model, LOSS, weight_decay=0.25, damping=damping)
    reports = []
    for step in range(4):
        x, y = data(step)
        loss = float(LOSS(model(x), y).detach())
        optimizer.step(optimizer.closure(x, y))
        reports.append(optimizer.report)
        # As the closure returned it: without the weight decay's part.
        assert optimizer.report.loss == pytest.approx(loss, rel=1e-14)
    assert [report.iteration for report in reports] == [1, 2, 3, 4]
    assert [report.examples for report in reports] == [15] * 4
    assert [report.rho is None for report in reports] == [True, False, True, False]
    assert [report.mu is None for report in reports] == [True, False, False, False]
    assert reports[0].gamma == pytest.approx(math.sqrt(0.5 + 0.25))
    assert reports[0].lambda_ == 0.5
    assert not any(report.refused for report in reports)
    assert len({id(report) for report in reports}) == 4


def test_the_seconds_of_a_step_are_those_that_passed():
    optimizer = KFAC(mlp([4, 5, 3]), LOSS, damping=LevenbergMarquardtRule(interval=1))
    optimizer.step(optimizer.closure(*data(0)))
    start = time.perf_counter()
    optimizer.step(optimizer.closure(*data(1)))
    passed = time.perf_counter() - start
    seconds = optimizer.report.seconds
    assert set(seconds) == {
        "gradient",
        "statistics",
        "inverse",
        "direction",
        "fisher_products",
        "step_rule",
        "reduction_ratio",
        "commit",
    }
    assert all(value >= 0 for value in seconds.values())
    assert sum(seconds.values()) <= passed


def test_without_momentum_there_is_no_mu():
    optimizer = KFAC(mlp([4, 5, 3]), LOSS, step_rule=QuadraticModel(momentum=False))
    for step in range(3):
        optimizer.step(optimizer.closure(*data(step)))
        assert optimizer.report.mu is None


def test_a_stationary_point_is_left_alone():
    # ∇h = 0: there is no direction to go, and nothing to divide by.
    model = mlp([4, 5, 3], seed=3)
    x = normal(15, 4)
    y = model(x).detach()
    kept = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = KFAC(model, LOSS, damping=LevenbergMarquardtRule(lambda_=0.5, interval=1))
    for _ in range(3):
        optimizer.step(optimizer.closure(x, y))
        assert not optimizer.report.refused
        assert optimizer.report.predicted_change == 0
        assert optimizer.report.rho is None
        assert optimizer.report.lambda_ == 0.5
    for name, p in model.named_parameters():
        assert torch.equal(p, kept[name])
