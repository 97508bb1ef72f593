"""Refreshes beside the training: used at a fixed iteration, whatever the machine does in the meantime."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from kronfac import (
    KFAC,
    BlockDiagonalInverse,
    BlockTridiagonalInverse,
    FixedDamping,
    FixedGamma,
    GammaSearch,
    LevenbergMarquardt,
)
from kronfac.errors import NotPositiveDefiniteError
from kronfac.factors import KroneckerFactors
from kronfac.inverses.base import pack
from tests.conftest import mlp, normal
from tests.optimizer.runs import same

INTERVAL, LAG = 5, 3
PERIODS = {
    "damping": LevenbergMarquardt(lambda_=0.5, interval=2),
    "gamma": GammaSearch(interval=INTERVAL),
    "inverse_interval": INTERVAL,
    "inverse_lag": LAG,
}


def new(**settings: Any) -> KFAC:
    return KFAC(mlp([6, 9, 9, 3], seed=3), nn.MSELoss(), **PERIODS | settings)


def step(optimizer: KFAC, k: int, x_scale: float = 1.0) -> None:
    x, y = normal(7, 6, seed=k) * x_scale, normal(7, 3, seed=100 + k)
    optimizer.step(optimizer.closure(x, y))


@dataclass(frozen=True)
class Watched(BlockDiagonalInverse):
    """Does something before it begins."""

    first: Callable[[], None] = lambda: None

    def prepare(self, factors: KroneckerFactors) -> Any:
        self.first()
        return super().prepare(factors)


@pytest.mark.parametrize("kind", [BlockDiagonalInverse, BlockTridiagonalInverse])
def test_the_inverse_is_that_of_the_factors_of_the_iteration_that_began_it(kind):
    gamma = 0.3
    optimizer = new(inverse=kind(), damping=FixedDamping(0.1), gamma=FixedGamma(gamma))
    factors = {}
    for k in range(1, 15):
        step(optimizer, k)
        factors[k] = optimizer._state.factors
        # 1, 2 and 3 at once; 5 in use from 8 on, 10 from 13 on.
        begun = k if k <= 3 else 3 if k < 5 + LAG else 5 if k < 10 + LAG else 10
        expected = kind().prepare(factors[begun]).damped(gamma)
        assert same(pack(optimizer._state.inverse), pack(expected)), k
        assert optimizer._state.inverse_iteration == begun


def test_between_start_and_use_steps_are_made_while_the_refresh_is_under_way():
    used = threading.Event()
    names = []

    def wait() -> None:
        names.append(threading.current_thread().name)
        if threading.current_thread() is not threading.main_thread():
            assert used.wait(30)

    optimizer = new(inverse=Watched(first=wait))
    for k in range(1, INTERVAL + LAG):
        step(optimizer, k)  # would not return if it waited
    assert optimizer._state.inverse_iteration == 3
    used.set()
    step(optimizer, INTERVAL + LAG)
    assert optimizer._state.inverse_iteration == INTERVAL
    assert names[:3] == ["MainThread"] * 3
    assert names[3].startswith("kronfac-background")
    assert len(names) == 4


def test_a_slow_machine_makes_the_same_steps():
    slow, fast = (new(inverse=Watched(first=first)) for first in (lambda: time.sleep(0.1), int))
    for k in range(1, 18):
        for optimizer in (slow, fast):
            step(optimizer, k)
        assert slow.report.gamma == fast.report.gamma
    for a, b in zip(slow.model.parameters(), fast.model.parameters(), strict=True):
        assert torch.equal(a, b)


def test_all_candidates_for_gamma_are_compared_when_it_comes_into_use():
    optimizer = new()
    moved = []
    gamma = None
    for k in range(1, 24):
        step(optimizer, k)
        if k > 3 and optimizer.report.gamma != gamma:
            moved.append(k)
        gamma = optimizer.report.gamma
    assert moved  # or this shows nothing
    assert all(k % INTERVAL == LAG for k in moved)


def test_a_save_waits_for_it_and_a_loaded_run_makes_the_same_steps():
    begun, go = threading.Event(), threading.Event()

    def wait() -> None:
        if threading.current_thread() is not threading.main_thread():
            begun.set()
            assert go.wait(30)

    optimizer = new(inverse=Watched(first=wait))
    for k in range(1, INTERVAL + 1):
        step(optimizer, k)
    assert begun.wait(30)
    threading.Timer(0.2, go.set).start()
    started = time.monotonic()
    saved = optimizer.state_dict()
    assert time.monotonic() - started > 0.1
    # γ as it was, and the paper's two neighbours.
    assert len(saved["kfac"]["refresh"]["inverses"]) == 3

    other = new(inverse=Watched(first=wait))
    other.model.load_state_dict(optimizer.model.state_dict())
    other.load_state_dict(saved)
    for k in range(INTERVAL + 1, 3 * INTERVAL):
        for run in (optimizer, other):
            step(run, k)
    assert same(optimizer.state_dict(), other.state_dict())


def test_a_refresh_that_failed_is_told_of_when_it_was_to_be_used_and_tried_again():
    def fail() -> None:
        if threading.current_thread() is not threading.main_thread():
            raise NotPositiveDefiniteError("as told")

    optimizer = new(inverse=Watched(first=fail), gamma=FixedGamma(0.3))
    kinds: dict[int, list[str]] = {}
    for k in range(1, 2 * INTERVAL + LAG + 1):
        step(optimizer, k)
        kinds[k] = [event.kind for event in optimizer.report.events]
    for k in (INTERVAL + LAG, 2 * INTERVAL + LAG):
        assert kinds.pop(k) == ["candidate_failed", "refresh_failed"]
    assert not any(kinds.values())
    assert optimizer._state.inverse_iteration == 3
    assert "as told" in optimizer.report.events[0].message


def test_a_failed_refresh_is_saved_as_such():
    def fail() -> None:
        if threading.current_thread() is not threading.main_thread():
            raise NotPositiveDefiniteError("as told")

    optimizer = new(inverse=Watched(first=fail), gamma=FixedGamma(0.3))
    for k in range(1, INTERVAL + 1):
        step(optimizer, k)
    other = new(inverse=Watched(first=fail), gamma=FixedGamma(0.3))
    other.load_state_dict(optimizer.state_dict())
    for k in range(INTERVAL + 1, INTERVAL + LAG + 1):
        step(other, k)
    assert "as told" in other.report.events[-1].message


def test_a_step_that_is_refused_leaves_it_under_way():
    optimizer = new()
    for k in range(1, INTERVAL + 1):
        step(optimizer, k)
    under_way = optimizer._state.refresh
    assert under_way is not None
    step(optimizer, INTERVAL + 1, x_scale=float("nan"))
    assert optimizer.report.refused
    assert optimizer._state.refresh is under_way


def test_where_lambda_has_moved_far_it_is_given_up_for_one_at_once():
    optimizer = KFAC(
        mlp([6, 9, 9, 3], seed=3), nn.MSELoss(), inverse_interval=INTERVAL, inverse_lag=LAG
    )
    for k in range(1, INTERVAL + 1):
        step(optimizer, k)
    assert optimizer._state.refresh is not None
    moved = optimizer.state_dict()
    moved["kfac"]["lambda_"] *= 1000
    optimizer.load_state_dict(moved)
    step(optimizer, INTERVAL + 1)
    assert optimizer._state.refresh is None
    assert optimizer._state.inverse_iteration == INTERVAL + 1


def test_with_the_interval_left_open_only_where_refreshes_are_far_apart():
    optimizer = KFAC(mlp([6, 9, 9, 3], seed=3), nn.MSELoss(), inverse_lag=LAG)
    seen = set()
    for k in range(1, 60):
        step(optimizer, k)
        if optimizer._state.refresh is not None:
            seen.add(optimizer._state.refresh.iteration)
    assert seen
    assert min(seen) >= 2 * LAG / (1 / 4)


@pytest.mark.parametrize("lag", [0, LAG])
def test_without_a_lag_nothing_is_left_under_way(lag):
    optimizer = new(inverse_lag=lag)
    found = False
    for k in range(1, 12):
        step(optimizer, k)
        found |= optimizer._state.refresh is not None
    assert found == bool(lag)
