"""Closures that do something of their own with the loss: ρ is about what they return."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.testing import assert_close

from kronfac import KFAC, GammaSearch, Intervals, LevenbergMarquardtRule
from tests.conftest import mlp, normal, passes_either_way
from tests.optimizer.pseudocode import Pseudocode
from tests.optimizer.runs import agree, close, closure_of, mean_square, targets_for

passes = passes_either_way()

OURS = {
    "weight_decay": 1e-2,
    "fisher": "exact",
    "damping": LevenbergMarquardtRule(lambda_=0.5, interval=1),
    "gamma": GammaSearch(interval=4),
    "intervals": Intervals(inverse_interval=2),
}
THEIRS = {"eta": 1e-2, "lambda_": 0.5, "T1": 1, "T2": 4, "T3": 2, "gamma_min": 0.1}
LOSS = nn.MSELoss()


def data(loss: nn.Module, outputs: int = 3, step: int = 0) -> tuple[Tensor, Tensor]:
    x = normal(15, 4, seed=step)
    return x, targets_for(loss, mlp([4, outputs], seed=9, gain=2.0)(x).detach(), seed=step)


def kinds(optimizer: KFAC) -> list[str]:
    return [event.kind for event in optimizer.report.events]


# ------------------------------------------------------------------------- against the pseudocode


def by_hand(z: Tensor, y: Tensor) -> Tensor:
    """The cross-entropy without a loss function that K-FAC knows."""
    return -z.log_softmax(dim=1).gather(1, y[:, None]).mean()


def squeezed(z: Tensor, y: Tensor) -> Tensor:
    return functional.mse_loss(z.squeeze(1), y.squeeze(1))


# Loss module, what the closure computes, outputs, whether that is seen.
CLOSURES: dict[str, tuple[nn.Module, Callable[[Tensor, Tensor], Tensor], int, bool]] = {
    "functional": (nn.CrossEntropyLoss(), functional.cross_entropy, 3, True),
    "squeezed": (nn.MSELoss(), squeezed, 1, True),
    "by hand": (nn.CrossEntropyLoss(), by_hand, 3, False),
}


@pytest.mark.parametrize("number", [False, True], ids=["tensor", "number"])
@pytest.mark.parametrize("by_objective", [False, True])
@pytest.mark.parametrize("name", CLOSURES)
@pytest.mark.filterwarnings("ignore:KFAC.step.. has not seen a loss in the closure")
def test_a_closure_that_does_not_call_the_loss_module(name, by_objective, number):
    """What is not seen has only the returned numbers to go by, as tensors or as floats."""
    loss, own, outputs, seen = CLOSURES[name]
    model = mlp([4, 5, outputs], seed=3)
    gamma = GammaSearch(interval=4, criterion="objective" if by_objective else "model")
    optimizer = KFAC(model, loss, **OURS | {"gamma": gamma})
    expected = Pseudocode(model, loss, by_objective=by_objective, **THEIRS)
    for step in range(9):
        x, y = data(loss, outputs, step)
        value = float(own(model(x), y).detach())
        user = closure_of(optimizer, own, x, y)
        agree(
            optimizer,
            expected,
            x,
            y,
            (lambda user=user: float(user().detach())) if number else user,
        )
        assert optimizer.report.loss == pytest.approx(value, rel=1e-12)
        assert kinds(optimizer) == ([] if seen else ["loss_not_seen"])


@pytest.mark.filterwarnings("ignore:The gradient of:UserWarning")  # it has the penalty in it
@pytest.mark.parametrize("strength", [1e-1, 1e-2, 1e-4, 1e-5])
def test_a_closure_that_adds_a_penalty(strength):
    # The last ones add less than a thousandth to the loss, but more to how it changes.
    model = mlp([4, 5, 3], seed=3)

    def penalised(z: Tensor, y: Tensor) -> Tensor:
        return LOSS(z, y) + strength * sum(p.abs().sum() for p in model.parameters())

    optimizer = KFAC(model, LOSS, **OURS)
    expected = Pseudocode(model, LOSS, penalty=lambda t: strength * t.abs().sum(), **THEIRS)
    for step in range(9):
        x, y = data(LOSS, step=step)
        agree(optimizer, expected, x, y, closure_of(optimizer, penalised, x, y))
        assert kinds(optimizer) == ["loss_not_seen"]


# -------------------------------------------------------------- against what the closure itself says


def two_targets(z: Tensor, y: Tensor) -> Tensor:
    return LOSS(z, y) + LOSS(z, y.flip(0))


def transposed_rows(z: Tensor, y: Tensor) -> Tensor:
    return 0.3 * LOSS(2 * z[:9].mT, y[:9].mT)


OWN_LOSSES: list[Callable[[Tensor, Tensor], Tensor]] = [
    two_targets,
    transposed_rows,
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


@pytest.mark.parametrize(
    "loss", [LOSS, mean_square, None], ids=["seen", "not seen", "KFAC.closure"]
)
@pytest.mark.filterwarnings("ignore:KFAC.step.. has not seen a loss in the closure")
def test_gradients_are_left_as_the_closure_left_them(loss):
    """Without the weight decay's part, and in the same tensors: hooks may hold on to them."""
    optimizer = KFAC(mlp([4, 5, 3], seed=3), LOSS, **OURS)
    x, y = data(LOSS)
    parameters = list(optimizer.model.parameters())
    user = optimizer.closure(x, y) if loss is None else closure_of(optimizer, loss, x, y)
    left: list[list[Any]] = []

    def closure() -> Tensor:
        value = user()
        left.append([p.grad for p in parameters])
        return value

    for _ in range(4):
        expected = torch.autograd.grad(LOSS(optimizer.model(x), y), parameters)
        left.clear()
        optimizer.step(user if loss is None else closure)
        assert optimizer.report.rho is not None
        assert len(left) == {LOSS: 1, mean_square: 2, None: 0}[loss], "once more for ρ"
        for number, (p, gradient) in enumerate(zip(parameters, expected, strict=True)):
            assert_close(p.grad, gradient, rtol=1e-10, atol=1e-12)
            assert not left or p.grad is left[0][number]
