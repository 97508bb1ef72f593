"""Closures that do something of their own with the loss: ρ is about what they return."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.testing import assert_close

from kronfac import KFAC, GammaSearch, LevenbergMarquardtRule
from kronfac.errors import ClosureError
from tests.conftest import mlp, normal, passes_either_way
from tests.optimizer.pseudocode import Pseudocode
from tests.optimizer.runs import agree, close, closure_of, mean_square, targets_for

passes = passes_either_way()

OURS = {
    "weight_decay": 1e-2,
    "fisher": "exact",
    "damping": LevenbergMarquardtRule(lambda_=0.5, interval=1),
    "gamma": GammaSearch(interval=4),
    "inverse_interval": 2,
}
THEIRS = {"eta": 1e-2, "lambda_": 0.5, "T1": 1, "T2": 4, "T3": 2, "gamma_min": 0.1}


def data(loss: nn.Module, outputs: int = 3, step: int = 0) -> tuple[Tensor, Tensor]:
    x = normal(15, 4, seed=step)
    return x, targets_for(loss, mlp([4, outputs], seed=9, gain=2.0)(x).detach(), seed=step)


def kinds(optimizer: KFAC) -> list[str]:
    return [event.kind for event in optimizer.report.events]


# ------------------------------------------------------------------------- against the pseudocode


def by_hand(z: Tensor, y: Tensor) -> Tensor:
    """The cross-entropy without a loss function that K-FAC knows."""
    return -z.log_softmax(dim=1).gather(1, y[:, None]).mean()


@pytest.mark.parametrize("own", [functional.cross_entropy, by_hand])
@pytest.mark.parametrize("by_objective", [False, True])
@pytest.mark.filterwarnings("ignore:KFAC.step.. has not seen a loss in the closure")
def test_a_closure_that_does_not_call_the_loss_module(by_objective, own):
    """The functional form is seen as well as the module; what is computed by hand is not."""
    loss = nn.CrossEntropyLoss()
    model = mlp([4, 5, 3], seed=3)
    gamma = GammaSearch(interval=4, criterion="objective" if by_objective else "model")
    optimizer = KFAC(model, loss, **OURS | {"gamma": gamma})
    expected = Pseudocode(model, loss, by_objective=by_objective, **THEIRS)
    for step in range(9):
        x, y = data(loss, step=step)
        agree(optimizer, expected, x, y, closure_of(optimizer, own, x, y))
        assert kinds(optimizer) == (["loss_not_seen"] if own is by_hand else [])


@pytest.mark.filterwarnings("ignore:The gradient of:UserWarning")  # it has the penalty in it
@pytest.mark.parametrize("strength", [1e-1, 1e-2, 1e-4, 1e-5])
def test_a_closure_that_adds_a_penalty(strength):
    # The last ones add less than a thousandth to the loss, but more to how it changes.
    loss = nn.MSELoss()
    model = mlp([4, 5, 3], seed=3)

    def penalised(z: Tensor, y: Tensor) -> Tensor:
        return loss(z, y) + strength * sum(p.abs().sum() for p in model.parameters())

    optimizer = KFAC(model, loss, **OURS)
    expected = Pseudocode(model, loss, penalty=lambda t: strength * t.abs().sum(), **THEIRS)
    for step in range(9):
        x, y = data(loss, step=step)
        agree(optimizer, expected, x, y, closure_of(optimizer, penalised, x, y))
        assert kinds(optimizer) == ["loss_not_seen"]


def test_a_closure_that_squeezes_the_output():
    loss = nn.MSELoss()
    model = mlp([4, 5, 1], seed=3)
    optimizer = KFAC(model, loss, **OURS)
    expected = Pseudocode(model, loss, **THEIRS)
    for step in range(9):
        x, y = data(loss, outputs=1, step=step)
        closure = closure_of(optimizer, lambda z, t: loss(z.squeeze(1), t.squeeze(1)), x, y)
        agree(optimizer, expected, x, y, closure)
        assert kinds(optimizer) == []


@pytest.mark.filterwarnings("ignore:KFAC.step.. has not seen a loss in the closure")
def test_a_closure_that_returns_a_number():
    loss = nn.MSELoss()
    model = mlp([4, 5, 3], seed=3)
    optimizer = KFAC(model, loss, **OURS)
    expected = Pseudocode(model, loss, **THEIRS)
    for step in range(9):
        x, y = data(loss, step=step)
        # Not seen, so that ρ has only the returned numbers to go by.
        closure = closure_of(optimizer, mean_square, x, y)
        value = float(mean_square(model(x), y).detach())
        agree(optimizer, expected, x, y, lambda closure=closure: float(closure().detach()))
        assert optimizer.report.loss == value


# -------------------------------------------------------------- against what the closure itself says


LOSS = nn.MSELoss()


def scaled(z: Tensor, y: Tensor) -> Tensor:
    return LOSS(2 * z, y)


def some_outputs(z: Tensor, y: Tensor) -> Tensor:
    return LOSS(z[:, :2], y[:, :2])


def some_rows(z: Tensor, y: Tensor) -> Tensor:
    return LOSS(z[:9], y[:9])


def transposed(z: Tensor, y: Tensor) -> Tensor:
    return LOSS(z.mT, y.mT)


def weighted(z: Tensor, y: Tensor) -> Tensor:
    return 0.3 * LOSS(z, y)


def two_targets(z: Tensor, y: Tensor) -> Tensor:
    return LOSS(z, y) + LOSS(z, y.flip(0))


OWN_LOSSES: list[Callable[[Tensor, Tensor], Tensor]] = [
    scaled,
    some_outputs,
    some_rows,
    transposed,
    weighted,
    two_targets,
    mean_square,
    LOSS,
]


@pytest.mark.parametrize("own", OWN_LOSSES, ids=lambda own: getattr(own, "__name__", "module"))
@pytest.mark.filterwarnings("ignore:KFAC.step.. has not seen a loss in the closure")
def test_rho_is_the_ratio_of_what_the_closure_returns(own):
    # Other than with the loss module itself, the curvature is not that of the closure's loss: ρ is
    # what finds out. Fifteen rows and three outputs, so that no transposition goes unnoticed.
    optimizer = KFAC(mlp([4, 5, 3], seed=3), LOSS, **OURS)
    for step in range(5):
        x, y = data(LOSS, step=step)

        def objective() -> float:
            theta = nn.utils.parameters_to_vector(optimizer.model.parameters()).detach()
            loss = own(optimizer.model(x), y).detach()  # noqa: B023 called at once
            return float(loss + 1e-2 / 2 * theta @ theta)

        before = objective()
        optimizer.step(closure_of(optimizer, own, x, y))
        ratio = (objective() - before) / optimizer.report.predicted_change
        close(optimizer.report.rho, ratio, f"rho at step {step + 1}", tolerance=1e-6)


# --------------------------------------------------------------------------------------- gradients


@pytest.mark.parametrize("seen", [True, False])
@pytest.mark.filterwarnings("ignore:KFAC.step.. has not seen a loss in the closure")
def test_the_gradients_that_are_left_are_those_before_the_step(seen):
    optimizer = KFAC(mlp([4, 5, 3], seed=3), LOSS, **OURS)
    x, y = data(LOSS)
    parameters = list(optimizer.model.parameters())
    for _ in range(4):
        expected = torch.autograd.grad(LOSS(optimizer.model(x), y), parameters)
        optimizer.step(closure_of(optimizer, LOSS if seen else mean_square, x, y))
        assert optimizer.report.rho is not None
        for p, gradient in zip(parameters, expected, strict=True):
            assert_close(p.grad, gradient, rtol=1e-10, atol=1e-12)


@pytest.mark.filterwarnings("ignore:KFAC.step.. has not seen a loss in the closure")
def test_the_gradients_are_the_same_tensors_as_the_closure_left():
    # So that what a user's hook or scheduler holds on to stays valid.
    optimizer = KFAC(mlp([4, 5, 3], seed=3), LOSS, **OURS)
    x, y = data(LOSS)
    parameters = list(optimizer.model.parameters())
    left: list[Any] = []
    user = closure_of(optimizer, mean_square, x, y)

    def closure() -> Tensor:
        loss = user()
        left.append([p.grad for p in parameters])
        return loss

    optimizer.step(closure)
    assert len(left) == 2  # once more, for ρ
    for p, gradient in zip(parameters, left[0], strict=True):
        assert p.grad is gradient


# ------------------------------------------------------------------------------------ what is recorded


def test_a_buffer_that_is_used_for_every_micro_batch():
    # The rows that K-FAC goes through again are no longer in it: it has to say so, or to have kept them.
    plain, buffered = (KFAC(mlp([4, 5, 3], seed=3), LOSS, **OURS) for _ in range(2))
    x, y = data(LOSS)
    x, y = x[:12], y[:12]
    plain.step(plain.closure(x, y, chunk=4))
    inputs, targets = torch.empty_like(x[:4]), torch.empty_like(y[:4])

    def closure() -> Tensor:
        buffered.zero_grad()
        total = torch.zeros((), dtype=torch.float64)
        for rows, t in zip(x.split(4), y.split(4), strict=True):
            inputs.copy_(rows)
            targets.copy_(t)
            loss = LOSS(buffered.model(inputs), targets) / 3
            loss.backward()
            total += loss.detach()
        return total

    try:
        buffered.step(closure)
    except ClosureError:
        assert buffered.report is None
    else:
        for p, q in zip(buffered.model.parameters(), plain.model.parameters(), strict=True):
            assert_close(p, q, rtol=1e-9, atol=1e-10)


def test_an_evaluation_on_the_side_is_not_part_of_the_mini_batch():
    plain, watched = (KFAC(mlp([4, 5, 3], seed=3), LOSS, **OURS) for _ in range(2))
    for step in range(4):
        x, y = data(LOSS, step=step)
        plain.step(closure_of(plain, LOSS, x, y))
        user = closure_of(watched, LOSS, x, y)

        def closure(x: Tensor = x, y: Tensor = y, user: Any = user) -> Tensor:
            with torch.no_grad():
                LOSS(watched.model(x[:3]), y[:3])
            loss = user()
            with torch.no_grad():
                LOSS(watched.model(x[3:]), y[3:])
            return loss

        watched.step(closure)
        assert kinds(watched) == []
        assert watched.report.examples == 15
    for p, q in zip(plain.model.parameters(), watched.model.parameters(), strict=True):
        assert torch.equal(p, q)
