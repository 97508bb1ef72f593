"""What the report of a step says."""

import math
import time

import pytest
import torch
from torch import Tensor, nn

from kronfac import KFAC, LevenbergMarquardtRule
from tests.conftest import mlp, normal

LOSS = nn.MSELoss()


def data(step: int) -> tuple[Tensor, Tensor]:
    return normal(15, 4, seed=step), normal(15, 3, seed=100 + step)


def test_what_the_report_holds():
    model = mlp([4, 5, 3], seed=3)
    damping = LevenbergMarquardtRule(lambda_=0.5, interval=2)
    optimizer = KFAC(model, LOSS, weight_decay=0.25, damping=damping)
    assert optimizer.report is None
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
