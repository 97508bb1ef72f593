"""Refreshes beside the training: used at a fixed iteration, whatever the machine does in the meantime."""

import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from kronfac import (
    KFAC,
    AdaptiveDamping,
    AdaptiveGamma,
    FixedDamping,
    FixedGamma,
    GammaSearch,
    Intervals,
    LevenbergMarquardtRule,
)
from kronfac.curvature import Curvature, KroneckerMoments, Link
from kronfac.errors import NotPositiveDefiniteError, StateError
from kronfac.extend import (
    BlockDiagonalInverse,
    BlockTridiagonalInverse,
    DampingState,
    EigenvalueCorrectedInverse,
    ExactTikhonov,
)
from kronfac.linalg.parallel import LARGE
from kronfac.storage import pack
from tests.conftest import forked, mlp, normal, spd
from tests.optimizer.runs import same

INTERVAL, LAG = 5, 3
PERIODS = {
    "damping": LevenbergMarquardtRule(lambda_=0.5, interval=2),
    "gamma": GammaSearch(interval=INTERVAL),
    "intervals": Intervals(inverse_interval=INTERVAL, inverse_lag=LAG),
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

    def prepare(self, curvature: Curvature) -> Any:
        self.first()
        return super().prepare(curvature)


@pytest.mark.parametrize("kind", [BlockDiagonalInverse, BlockTridiagonalInverse])
def test_the_inverse_is_that_of_the_curvature_of_the_iteration_that_began_it(kind):
    gamma = 0.3
    optimizer = new(inverse=kind(), damping=FixedDamping(0.1), gamma=FixedGamma(gamma))
    curvature = {}
    for k in range(1, 15):
        step(optimizer, k)
        curvature[k] = optimizer._state.curvature
        # 1, 2 and 3 at once; 5 in use from 8 on, 10 from 13 on.
        begun = k if k <= 3 else 3 if k < 5 + LAG else 5 if k < 10 + LAG else 10
        expected = kind().prepare(curvature[begun]).damped(gamma)
        assert same(pack(optimizer._state.current.inverse), pack(expected)), k
        assert optimizer._state.current.iteration == begun


def test_between_start_and_use_steps_are_made_while_the_refresh_is_under_way():
    used = threading.Event()
    names = []

    def wait() -> None:
        names.append(threading.current_thread().name)
        if threading.current_thread() is not threading.main_thread():
            assert used.wait(30)

    optimizer = new(inverse=Watched(first=wait))
    try:
        for k in range(1, INTERVAL + LAG):
            step(optimizer, k)  # would not return if it waited
        assert optimizer._state.current.iteration == 3
    finally:
        used.set()
    step(optimizer, INTERVAL + LAG)
    assert optimizer._state.current.iteration == INTERVAL
    assert names[:3] == ["MainThread"] * 3
    assert names[3].startswith("kronfac-background")
    assert len(names) == 4


def test_a_slow_machine_makes_the_same_steps():
    """One run in which every refresh is late, one in which every refresh is done long before."""
    slow, fast = new(inverse=Watched(first=lambda: time.sleep(0.05))), new(inverse=Watched())
    for k in range(1, 18):
        step(slow, k)
    for k in range(1, 18):
        step(fast, k)
        if fast._state.refresh is not None:
            list(fast._state.refresh.outcomes)  # waits
    for a, b in zip(slow.model.parameters(), fast.model.parameters(), strict=True):
        assert torch.equal(a, b)


def test_a_step_that_has_to_wait_counts_it_as_time_for_the_inverse():
    pause = 0.3
    optimizer = new(inverse=Watched(first=lambda: time.sleep(pause)))
    for k in range(1, INTERVAL + LAG):
        step(optimizer, k)
    assert optimizer.report.seconds.get("inverse", 0.0) < pause / 2
    step(optimizer, INTERVAL + LAG)
    assert optimizer.report.seconds["inverse"] > pause / 2


def test_all_candidates_for_gamma_are_compared_when_it_comes_into_use():
    optimizer = new()
    moved = []
    gamma = None
    for k in range(1, 24):
        step(optimizer, k)
        if k > 3 and optimizer.report.gamma != gamma:
            moved.append(k)
        gamma = optimizer.report.gamma
    assert moved == [begun + LAG for begun in (5, 10, 15, 20)]


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
    timer = threading.Timer(0.2, go.set)
    timer.start()
    saved = optimizer.state_dict()
    assert go.is_set()
    timer.join()
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
    assert optimizer._state.current.iteration == 3
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
    for k in range(INTERVAL + 1, INTERVAL + LAG):
        step(optimizer, k)
    assert optimizer._state.refresh is under_way
    step(optimizer, INTERVAL + LAG, x_scale=float("nan"))  # which was to use it
    assert optimizer._state.refresh is under_way
    step(optimizer, INTERVAL + LAG)
    assert optimizer._state.current.iteration == INTERVAL


def test_a_step_that_is_refused_begins_none():
    begun = []
    optimizer = new(inverse=Watched(first=lambda: begun.append(threading.current_thread())))
    for k in range(1, INTERVAL):
        step(optimizer, k)
    at_once = len(begun)
    for _ in range(3):
        step(optimizer, INTERVAL, x_scale=float("nan"))
        assert optimizer.report.refused
        assert optimizer._state.refresh is None
    step(optimizer, INTERVAL)
    assert optimizer._state.refresh is not None
    list(optimizer._state.refresh.outcomes)
    assert len(begun) == at_once + 1


def test_an_error_in_the_background_is_not_kept_forever():
    def fail() -> None:
        if threading.current_thread() is not threading.main_thread():
            raise MemoryError

    optimizer, other = new(inverse=Watched(first=fail)), new()
    for k in range(1, 2 * INTERVAL):
        for run in (optimizer, other):
            step(run, k)
        assert not optimizer.report.events
    assert same(
        optimizer.state_dict()["kfac"]["current"]["inverse"],
        other.state_dict()["kfac"]["current"]["inverse"],
    )


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_process_computes_it_for_itself():
    go = threading.Event()

    def wait() -> None:
        if threading.current_thread() is not threading.main_thread():
            assert go.wait(60)

    optimizer = new(inverse=Watched(first=wait))
    try:
        for k in range(1, INTERVAL + 1):
            step(optimizer, k)
        outcome = forked(lambda: len(optimizer.state_dict()["kfac"]["refresh"]["inverses"]))
    finally:
        go.set()
    assert outcome == 3


def test_where_lambda_has_moved_far_it_is_given_up_for_one_at_once():
    optimizer = new(damping=AdaptiveDamping(), gamma=AdaptiveGamma())
    for k in range(1, INTERVAL + 1):
        step(optimizer, k)
    assert optimizer._state.refresh is not None
    far = DampingState(1000 * optimizer._state.damping.lambda_)
    optimizer._state = replace(optimizer._state, damping=far)
    step(optimizer, INTERVAL + 1)
    assert optimizer._state.refresh is None
    assert optimizer._state.current.iteration == INTERVAL + 1


def test_where_lambda_has_moved_since_the_inverse_in_use_but_not_since_it_began_it_goes_on():
    optimizer = new(damping=AdaptiveDamping(), gamma=AdaptiveGamma())
    for k in range(1, INTERVAL + 1):
        step(optimizer, k)
    under_way = optimizer._state.refresh
    assert under_way is not None
    far = 1000 * optimizer._state.damping.lambda_
    optimizer._state = replace(
        optimizer._state, damping=DampingState(far), refresh=replace(under_way, lambda_=far)
    )
    step(optimizer, INTERVAL + 1)
    assert optimizer._state.refresh is not None
    assert optimizer._state.refresh.iteration == INTERVAL


def test_a_saved_refresh_with_something_missing_is_refused():
    optimizer = new()
    for k in range(1, INTERVAL + 1):
        step(optimizer, k)
    saved = optimizer.state_dict()
    del saved["kfac"]["refresh"]["adoption"]
    with pytest.raises(StateError, match=r"refresh is incomplete.*adoption"):
        new().load_state_dict(saved)


@pytest.mark.parametrize(
    "inverse",
    [
        BlockDiagonalInverse(),
        BlockDiagonalInverse(tikhonov=ExactTikhonov()),
        BlockTridiagonalInverse(),
        BlockTridiagonalInverse(solver="smith"),
        EigenvalueCorrectedInverse(),
    ],
    ids=repr,
)
def test_layers_in_parallel_give_what_one_after_the_other_does(inverse):
    widths = [LARGE, LARGE + 8, LARGE + 16, 3]
    A_next = [0.01 * normal(a + 1, b + 1, seed=a) for a, b in pairwise(widths[:-1])]
    G_next = [0.01 * normal(a, b, seed=b) for a, b in pairwise(widths[1:])]
    curvature = Curvature(
        tuple(KroneckerMoments(spd(a + 1, seed=a), spd(b, seed=b)) for a, b in pairwise(widths)),
        tuple(map(Link, A_next, G_next)),
    )
    vectors = [normal(b, a + 1, seed=a) for a, b in pairwise(widths)]
    before = torch.get_num_threads()
    products = []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            products.append(inverse.prepare(curvature).damped(0.5).mv(vectors))
    finally:
        torch.set_num_threads(before)
    for alone, parallel in zip(*products, strict=True):
        assert_close(parallel, alone, rtol=1e-9, atol=1e-12)


def test_with_the_interval_left_open_only_where_refreshes_are_far_apart():
    optimizer = KFAC(mlp([6, 9, 9, 3], seed=3), nn.MSELoss(), intervals=Intervals(inverse_lag=LAG))
    seen = set()
    for k in range(1, 60):
        step(optimizer, k)
        if optimizer._state.refresh is not None:
            seen.add(optimizer._state.refresh.iteration)
    assert seen
    assert min(seen) >= 2 * LAG / (1 / 4)


@pytest.mark.parametrize("lag", [0, LAG])
def test_without_a_lag_nothing_is_left_under_way(lag):
    optimizer = new(intervals=Intervals(inverse_interval=INTERVAL, inverse_lag=lag))
    found = False
    for k in range(1, 12):
        step(optimizer, k)
        found |= optimizer._state.refresh is not None
    assert found == bool(lag)
