"""How often a step calls the closure: a contract, with exact counts.

Once; twice if the step before is rejected; once more for every ρ, λ₀ trial or comparison of the averaged
iterate whose loss K-FAC cannot compute by itself.
"""

import math

import pytest
import torch
from torch import Tensor, nn

import kronfac
from kronfac import KFAC, AdaptiveDamping, FixedDamping, LevenbergMarquardtRule
from kronfac.extend import Acceptance
from tests.conftest import mlp, normal
from tests.optimizer.runs import mean_square, too_long_step

LOSS = nn.MSELoss()


class Counted:
    """A closure of the user's own, whose loss K-FAC sees or not."""

    def __init__(self, optimizer: KFAC, x: Tensor, y: Tensor, seen: bool = True) -> None:
        self.calls = 0
        self._optimizer, self._x, self._y = optimizer, x, y
        self._loss = LOSS if seen else mean_square

    def __call__(self) -> Tensor:
        self.calls += 1
        self._optimizer.zero_grad()
        loss = self._loss(self._optimizer.model(self._x), self._y)
        loss.backward()
        return loss


def data(seed: int) -> tuple[Tensor, Tensor]:
    x = normal(80, 4, seed=seed)
    return x, x[:, :3].sin() + 0.1 * normal(80, 3, seed=100 + seed)


def calls(optimizer: KFAC, seed: int, seen: bool = True) -> int:
    closure = Counted(optimizer, *data(seed), seen=seen)
    optimizer.step(closure)
    return closure.calls


@pytest.mark.parametrize(
    "settings",
    [{}, {"inverse": "block_tridiagonal"}, {"damping": FixedDamping(0.1)}, kronfac.presets.paper()],
    ids=["default", "block_tridiagonal", "fixed", "paper"],
)
def test_once_with_all_trials_and_validations_if_the_loss_is_seen(settings):
    optimizer = KFAC(mlp([4, 6, 3], seed=3), LOSS, **settings)
    for k in range(25):
        assert calls(optimizer, k) == 1, k
        assert not optimizer.report.events


@pytest.mark.filterwarnings("ignore:KFAC.step.. has not seen a loss in the closure")
def test_once_more_for_every_trial_and_every_rho_if_it_is_not_seen():
    damping = AdaptiveDamping(settling=3, interval=4)
    optimizer = KFAC(mlp([4, 6, 3], seed=3), LOSS, damping=damping)
    first = calls(optimizer, 0, seen=False)
    assert optimizer.report.trials > 1
    assert first == 1 + optimizer.report.trials
    for k in range(2, 13):
        count = calls(optimizer, k - 1, seen=False)
        assert not optimizer.report.rejected
        assert count == (2 if k in (2, 3, 4, 8, 12) else 1), k


@pytest.mark.filterwarnings("ignore:KFAC.step.. has not seen a loss in the closure")
def test_the_papers_rho_is_one_more():
    damping = LevenbergMarquardtRule(0.5, interval=3)
    optimizer = KFAC(mlp([4, 6, 3], seed=3), LOSS, damping=damping)
    assert [calls(optimizer, k, seen=False) for k in range(7)] == [1, 1, 2, 1, 1, 2, 1]


@pytest.mark.parametrize("in_turn", [False, True])
def test_twice_after_a_rejection_in_turn_or_not(in_turn):
    """On a mini-batch that is always the same, so that noise explains nothing."""
    damping = AdaptiveDamping(settling=20 if in_turn else 3, interval=100)
    optimizer = KFAC(mlp([4, 6, 3], seed=3), LOSS, damping=damping)
    for _ in range(4):
        assert calls(optimizer, 0) == 1
    x, y = data(0)
    start = float(LOSS(optimizer.model(x), y).detach())
    closure = Counted(optimizer, x, y)
    too_long_step(optimizer, closure)
    assert closure.calls == 1
    assert (optimizer.report.next_rho is not None) == in_turn
    lambda_ = optimizer.report.lambda_
    assert calls(optimizer, 0) == 2
    assert [event.kind for event in optimizer.report.events] == [kronfac.EventKind.REJECTED]
    assert optimizer.report.loss == pytest.approx(start)
    assert optimizer.report.lambda_ == pytest.approx(10 * lambda_)
    assert calls(optimizer, 0) == 1


def validated_out_of_turn(jump: float, suspicion: float | None = 4.0) -> tuple[KFAC, int]:
    """A run whose 17th mini-batch is `jump` off, and how often the closure was called for it."""
    reject = Acceptance(suspicion=suspicion)
    damping = AdaptiveDamping(settling=15, interval=100, reject=reject)
    optimizer = KFAC(mlp([4, 6, 3], seed=3), LOSS, damping=damping)
    for k in range(16):
        calls(optimizer, k)
    x, y = data(16)
    closure = Counted(optimizer, x, y + jump)
    optimizer.step(closure)
    return optimizer, closure.calls


def test_once_if_it_was_the_mini_batch_and_not_the_step():
    """Validated out of turn and accepted: the gradient that is there is used."""
    optimizer, count = validated_out_of_turn(30.0)
    assert count == 1
    assert optimizer.report.next_rho is not None
    assert not optimizer.report.rejected
    assert calls(optimizer, 17) == 2, "the step from such a mini-batch is validated, and rejected"


def test_without_suspicion_no_step_is_validated_out_of_turn():
    optimizer, count = validated_out_of_turn(30.0, suspicion=None)
    assert count == 1
    assert optimizer.report.next_rho is None


def test_a_loss_that_is_not_finite_is_not_seen():
    """It costs the call that says whether it was finite before the step."""
    optimizer, count = validated_out_of_turn(math.nan)
    assert count == 2
    assert optimizer.report.refused
    assert not optimizer.report.rejected


@pytest.mark.filterwarnings("ignore:KFAC.step.. has not seen a loss in the closure")
def test_once_for_a_comparison_with_the_averaged_iterate_that_is_not_seen():
    optimizer = KFAC(mlp([3, 8, 2], seed=1), LOSS, damping=AdaptiveDamping(settling=59, interval=7))
    for k in range(1, 60):
        x = normal(16, 3, seed=2 * k)
        y = x[:, :2].sin() + normal(16, 2, seed=2 * k + 1)
        optimizer.step(optimizer.closure(x, y))
    assert optimizer.state_dict()["kfac"]["step"]["memory"]["average"] is not None
    closure = Counted(optimizer, x, y, seen=False)
    optimizer.step(closure)
    assert optimizer.report.next_rho is None
    assert closure.calls == 2
    assert torch.isfinite(torch.tensor(optimizer.report.loss))
