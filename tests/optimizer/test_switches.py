"""Every part of the defaults can be switched off, by its rule or by None."""

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kronfac import (
    KFAC,
    AdaptiveDamping,
    AdaptiveGamma,
    FixedDamping,
    LevenbergMarquardtRule,
    QuadraticModel,
    RawStep,
)
from kronfac.extend import Acceptance, LongMemory
from tests.conftest import mlp, normal

LOSS = nn.MSELoss()


def noisy_run(steps: int = 65, **settings: Any) -> KFAC:
    """Mini-batches with little in common, so that every part has something to do."""
    optimizer = KFAC(mlp([3, 8, 2], seed=1), LOSS, **settings)
    for k in range(1, steps + 1):
        optimizer.step(optimizer.closure(*data(k)))
    return optimizer


def data(k: int) -> tuple[Tensor, Tensor]:
    x = normal(16, 3, seed=2 * k)
    return x, x[:, :2].sin() + normal(16, 2, seed=2 * k + 1)


def test_by_default_all_of_them_are_at_work():
    optimizer = noisy_run()
    state = optimizer._state
    assert state.acceptance.confirmed < 0.25
    assert state.step.memory.average is not None
    assert state.step.momentum is not state.acceptance.pending.delta
    assert optimizer.report.memory > 1


@pytest.mark.parametrize("damping", [LevenbergMarquardtRule(0.5), FixedDamping(0.5)])
def test_validation_on_the_next_mini_batch(damping):
    optimizer = KFAC(mlp([3, 8, 2], seed=1), LOSS, damping=damping)
    for k in range(30):
        optimizer.step(optimizer.closure(*data(k)))
        assert optimizer.report.next_rho is None
    state = optimizer._state.acceptance
    assert (state.confirmed, state.noise, state.validated) == (None, None, 0)
    assert state.pending.kept is None, "nothing is kept for a validation that never comes"


def test_the_long_memory():
    optimizer = noisy_run(step_rule=QuadraticModel(bounded=True))
    assert optimizer.report.memory == 1
    assert optimizer._state.step.memory.average is None
    assert optimizer._state.step.momentum is optimizer._state.acceptance.pending.delta


def test_the_averaged_iterate():
    memory = LongMemory(averaged=None)
    optimizer = noisy_run(step_rule=QuadraticModel(bounded=True, memory=memory))
    assert optimizer._state.step.memory.average is None
    assert optimizer.report.memory == pytest.approx(0.15 * 65)


def test_gamma_by_the_sampling_error():
    tried = []

    class Watched(AdaptiveGamma):
        def candidates(self, state, m):
            found = super().candidates(state, m)
            tried.append((m.iteration, m.confidence, found))
            return found

    noisy_run(gamma=Watched())
    late = [len(found) for k, confirmed, found in tried if k > 20 and confirmed < 0.5]
    assert late == [1] * 4
    refreshes = [k for k, _, _ in tried]
    tried.clear()
    noisy_run(gamma=Watched(strength=None))
    assert [k for k, _, _ in tried] == refreshes
    assert [len(found) for _, _, found in tried] == [1] + [2] * (len(refreshes) - 1)


def test_the_search_for_the_first_lambda():
    assert noisy_run(1).report.trials > 0
    optimizer = noisy_run(1, damping=AdaptiveDamping(lambda_=0.3, search=None))
    assert optimizer.report.trials == 0
    assert optimizer.report.lambda_ == 0.3


@pytest.mark.parametrize("off", [None, Acceptance(rejection=None)])
def test_rejection(off):
    for acceptance, rejected in ((Acceptance(), True), (off, False)):
        optimizer = KFAC(mlp([4, 6, 3], seed=3), LOSS, acceptance=acceptance)
        x = normal(80, 4)
        y = x[:, :3].sin()
        sensible = optimizer.settings
        for k in range(3):
            optimizer.settings = replace(sensible, step_rule=RawStep(30.0)) if k == 1 else sensible
            optimizer.step(optimizer.closure(x, y))
        assert optimizer.report.rejected == rejected
        assert optimizer.report.next_rho is not None, "it is validated, for λ"
        assert (optimizer._state.acceptance.pending.kept is not None) == rejected


def test_validation_out_of_turn():
    reports = {}
    for suspicion in (4.0, None):
        damping = AdaptiveDamping(settling=15, interval=100)
        acceptance = Acceptance(suspicion=suspicion)
        optimizer = KFAC(mlp([4, 6, 3], seed=3), LOSS, damping=damping, acceptance=acceptance)
        for k in range(17):
            x = normal(80, 4, seed=k)
            y = x[:, :3].sin() + (30.0 if k == 16 else 0.0)
            optimizer.step(optimizer.closure(x, y))
        reports[suspicion] = optimizer.report
    assert reports[4.0].next_rho is not None
    assert reports[None].next_rho is None


@pytest.mark.parametrize("name", ["rejection", "suspicion"])
@pytest.mark.parametrize("value", [0.0, -1.0, float("inf"), float("nan")])
def test_settings_of_the_acceptance_are_checked(name, value):
    with pytest.raises(ValueError, match=name):
        Acceptance(**{name: value})


def test_a_copy_has_them_switched_off_too():
    optimizer = noisy_run(3, acceptance=None)
    assert copy.deepcopy(optimizer).settings == optimizer.settings
    assert all(torch.isfinite(p).all() for p in optimizer.model.parameters())
