"""Refreshes beside the training: used at a fixed iteration, whatever the machine does in the meantime."""

import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
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
    linalg,
)
from kronfac.curvature import ApproximateInverse, Curvature, KroneckerMoments, Link
from kronfac.errors import NotPositiveDefiniteError
from kronfac.extend import (
    BlockDiagonalInverse,
    BlockTridiagonalInverse,
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


def watched(
    first: Callable[[Curvature], object], kind: type[BlockDiagonalInverse] = BlockDiagonalInverse
) -> ApproximateInverse:
    """An inverse that does something before it is prepared."""

    @dataclass(frozen=True)
    class Watched(kind):  # type: ignore[misc, valid-type]
        def prepare(self, curvature: Curvature) -> Any:
            first(curvature)
            return super().prepare(curvature)

    return Watched()


def in_background() -> bool:
    return threading.current_thread() is not threading.main_thread()


def wait_for_the_background() -> None:
    done = linalg.in_background(int)  # which does one thing after the other
    assert done is not None
    done.result()


def failing(error: Exception) -> ApproximateInverse:
    def fail(_: Curvature) -> None:
        if in_background():
            raise error

    return watched(fail)


def advance(optimizer: KFAC, steps: range) -> KFAC:
    for k in steps:
        step(optimizer, k)
    return optimizer


def state(optimizer: KFAC) -> dict[str, Any]:
    """What is saved."""
    return optimizer.state_dict()["kfac"]


def under_way(optimizer: KFAC) -> int | None:
    """The iteration that began it."""
    refresh = state(optimizer)["refresh"]
    return None if refresh is None else refresh["iteration"]


@pytest.mark.parametrize("kind", [BlockDiagonalInverse, BlockTridiagonalInverse])
def test_the_inverse_is_that_of_the_curvature_of_the_iteration_that_began_it(kind):
    gamma, given = 0.3, []
    optimizer = new(
        inverse=watched(given.append, kind), damping=FixedDamping(0.1), gamma=FixedGamma(gamma)
    )
    for k in range(1, 15):
        step(optimizer, k)
        wait_for_the_background()
        saved = state(optimizer)
        # 1, 2 and 3 at once; 5 in use from 8 on, 10 from 13 on.
        begun = k if k <= 3 else 3 if k < 5 + LAG else 5 if k < 10 + LAG else 10
        assert saved["current"]["iteration"] == begun
        if k in (1, 2, 3, 5, 10):
            assert same(pack(given[-1]), saved["curvature"])
        used = given[(1, 2, 3, 5, 10).index(begun)]
        assert same(saved["current"]["inverse"], pack(kind().prepare(used).damped(gamma))), k
    assert len(given) == 5


def test_between_start_and_use_steps_are_made_while_the_refresh_is_under_way():
    used = threading.Event()
    names = []

    def wait(_: Curvature) -> None:
        names.append(threading.current_thread().name)
        if in_background():
            assert used.wait(60)

    optimizer = new(inverse=watched(wait))
    try:
        advance(optimizer, range(1, INTERVAL + LAG))  # would not return if it waited
    finally:
        used.set()
    assert state(optimizer)["current"]["iteration"] == 3
    step(optimizer, INTERVAL + LAG)
    assert state(optimizer)["current"]["iteration"] == INTERVAL
    assert names[:3] == ["MainThread"] * 3
    assert names[3].startswith("kronfac-background")
    assert len(names) == 4


@pytest.mark.parametrize("kind", [BlockDiagonalInverse, EigenvalueCorrectedInverse])
def test_a_slow_machine_makes_the_same_steps(kind):
    """One run in which every refresh is late, one in which every refresh is done long before."""
    slow, fast = (new(inverse=watched(wait, kind)) for wait in (lambda _: time.sleep(0.05), id))
    for k in range(1, 18):
        step(slow, k)
        step(fast, k)
        wait_for_the_background()
    assert state(fast)["current"]["iteration"] == 10, "that of 15 comes into use at 18"
    assert same(state(slow)["current"], state(fast)["current"])
    for a, b in zip(slow.model.parameters(), fast.model.parameters(), strict=True):
        assert torch.equal(a, b)


def test_a_step_that_has_to_wait_counts_it_as_time_for_the_inverse():
    go = threading.Event()
    optimizer = new(inverse=watched(lambda _: go.wait(60) if in_background() else None))
    advance(optimizer, range(1, INTERVAL + LAG))
    before = optimizer.report.seconds.get("inverse", 0.0)
    timers = []

    def begin_anew(*_: object) -> None:
        """Count from the last forward pass before the wait, however busy the machine is."""
        for timer in timers:
            timer.cancel()
        timers.append(threading.Timer(0.3, go.set))
        timers[-1].start()

    optimizer.model.register_forward_hook(begin_anew)
    step(optimizer, INTERVAL + LAG)
    assert optimizer.report.seconds["inverse"] > before + 0.1


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


def test_a_save_does_not_wait_for_it_and_a_loaded_run_makes_the_same_steps():
    begun, go = threading.Event(), threading.Event()

    def wait(_: Curvature) -> None:
        if in_background():
            begun.set()
            assert go.wait(60)

    optimizer, other = (new(inverse=watched(wait)) for _ in range(2))
    try:
        advance(optimizer, range(1, INTERVAL + 1))
        assert begun.wait(60)
        saved = optimizer.state_dict()
    finally:
        go.set()
    # γ as it was, and the paper's two neighbours.
    assert len(saved["kfac"]["refresh"]["candidates"]) == 3
    other.model.load_state_dict(optimizer.model.state_dict())
    other.load_state_dict(saved)
    for run in (optimizer, other):
        advance(run, range(INTERVAL + 1, 3 * INTERVAL))
    assert same(optimizer.state_dict(), other.state_dict())


@pytest.mark.parametrize("saved_on_the_way", [False, True])
def test_a_refresh_that_failed_is_told_of_when_it_was_to_be_used_and_tried_again(saved_on_the_way):
    error = NotPositiveDefiniteError("as told")
    optimizer, other = (new(inverse=failing(error), gamma=FixedGamma(0.3)) for _ in range(2))
    kinds: dict[int, list[str]] = {}
    for k in range(1, 2 * INTERVAL + LAG + 1):
        step(optimizer, k)
        kinds[k] = [event.kind for event in optimizer.report.events]
        if saved_on_the_way and k == INTERVAL:
            other.load_state_dict(optimizer.state_dict())
            optimizer = other
    for k in (INTERVAL + LAG, 2 * INTERVAL + LAG):
        assert kinds.pop(k) == ["candidate_failed", "refresh_failed"]
    assert not any(kinds.values())
    assert state(optimizer)["current"]["iteration"] == 3
    assert all("as told" in event.message for event in optimizer.report.events)


def test_a_step_that_is_refused_begins_none_and_leaves_one_that_is_under_way():
    begun = []
    optimizer = advance(new(inverse=watched(begun.append)), range(1, INTERVAL))
    for k in range(INTERVAL, INTERVAL + LAG + 1):
        for _ in range(2):  # at the start, on the way, and when it was to be used
            step(optimizer, k, x_scale=float("nan"))
            assert optimizer.report.refused
            assert under_way(optimizer) == (None if k == INTERVAL else INTERVAL)
        step(optimizer, k)
    assert state(optimizer)["current"]["iteration"] == INTERVAL
    assert len(begun) == 3 + 1


def test_an_error_in_the_background_is_not_kept_forever():
    """Where memory is short, the inverse is computed at once."""
    optimizer, other = new(inverse=failing(MemoryError())), new()
    for k in range(1, 2 * INTERVAL):
        for run in (optimizer, other):
            step(run, k)
        assert not optimizer.report.events
    assert same(state(optimizer)["current"]["inverse"], state(other)["current"]["inverse"])


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_process_computes_it_for_itself():
    go = threading.Event()
    optimizer = new(inverse=watched(lambda _: go.wait(60) if in_background() else None))
    try:
        advance(optimizer, range(1, INTERVAL + 1))
        steps = range(INTERVAL + 1, INTERVAL + LAG + 1)
        outcome = forked(lambda: state(advance(optimizer, steps))["current"]["iteration"])
    finally:
        go.set()
    assert outcome == INTERVAL


@pytest.mark.parametrize("since_it_began", [True, False])
def test_where_lambda_has_moved_far_since_it_began_it_is_given_up_for_one_at_once(since_it_began):
    """Since the inverse in use does not count."""
    optimizer = new(damping=AdaptiveDamping(), gamma=AdaptiveGamma())
    saved = advance(optimizer, range(1, INTERVAL + 1)).state_dict()
    assert saved["kfac"]["refresh"]["iteration"] == INTERVAL
    saved["kfac"]["damping"]["lambda_"] *= 1000
    if not since_it_began:
        saved["kfac"]["refresh"]["lambda_"] *= 1000
    optimizer.load_state_dict(saved)
    step(optimizer, INTERVAL + 1)
    assert under_way(optimizer) == (None if since_it_began else INTERVAL)
    assert (state(optimizer)["current"]["iteration"] == INTERVAL + 1) == since_it_began


@pytest.mark.parametrize(
    "inverse",
    [
        BlockDiagonalInverse(),
        BlockDiagonalInverse(tikhonov=ExactTikhonov()),
        BlockTridiagonalInverse(),
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
    optimizer = new(intervals=Intervals(inverse_lag=LAG), damping=None, gamma=None)
    seen = set()
    for k in range(1, 60):
        step(optimizer, k)
        seen.add(under_way(optimizer))
    assert min(seen - {None}) >= 2 * LAG / (1 / 4)


def test_without_a_lag_nothing_is_left_under_way():
    optimizer = new(intervals=Intervals(inverse_interval=INTERVAL))
    for k in range(1, 12):
        step(optimizer, k)
        assert under_way(optimizer) is None
