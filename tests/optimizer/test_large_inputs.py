"""Inputs of 1e10 in float32: their second moments fit, products of these do not."""

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kronfac import KFAC, ConjugateGradients
from kronfac.extend import (
    BlockDiagonalInverse,
    BlockTridiagonalInverse,
    ExactTikhonov,
    FactoredTikhonov,
)
from tests.conftest import mlp, normal

SETTINGS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "one": {"inverse": BlockDiagonalInverse(FactoredTikhonov("one"))},
    "exact_tikhonov": {"inverse": BlockDiagonalInverse(ExactTikhonov())},
    "low_rank": {"inverse": BlockDiagonalInverse(low_rank=True)},
    "block_tridiagonal": {"inverse": BlockTridiagonalInverse()},
    "weight_decay": {"weight_decay": 1e-3},
    "conjugate_gradients": {"step_rule": ConjugateGradients(cg_steps=3)},
}
STEPS = 30


@pytest.mark.parametrize("activation", ["tanh", "relu"])
@pytest.mark.parametrize("settings", SETTINGS)
def test_a_run_on_inputs_of_1e10_stays_finite_and_trains(settings, activation):
    # Hidden units of tanh are saturated, and no gradient reaches the first layer: its G is 0.
    x = 1e10 * normal(200, 5, dtype=torch.float32)
    y = (x.sum(dim=1, keepdim=True) * 1e-10).sin()
    model = mlp([5, 20, 20, 1], activation, dtype=torch.float32)
    optimizer = KFAC(model, nn.MSELoss(), **SETTINGS[settings])
    losses = []
    for _ in range(STEPS):
        losses.append(float(optimizer.step(optimizer.closure(x, y))))
        assert not optimizer.report.refused, optimizer.report.events
        kinds = {event.kind for event in optimizer.report.events}
        assert not kinds & {"candidate_failed", "refresh_failed"}, optimizer.report.events
    assert losses[-1] < 0.5 * losses[0]
    for name, parameter in model.named_parameters():
        assert parameter.isfinite().all(), name
    state = optimizer.state_dict()["kfac"]
    for number in numbers(state):
        assert bool(torch.as_tensor(number).isfinite().all())
    report = optimizer.report
    assert all(map(math.isfinite, (report.lambda_, report.gamma, report.alpha)))


def numbers(value: Any) -> Iterator[Tensor | float]:
    if isinstance(value, (Tensor, float)):
        yield value
    elif isinstance(value, dict):
        for key, item in value.items():
            if key != "length":  # of momentum's memory: as long as may be
                yield from numbers(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from numbers(item)
