"""A step happens as a whole or not at all."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kronfac import KFAC, GammaSearch, Intervals, LevenbergMarquardtRule
from tests.conftest import mlp, normal, passes_either_way
from tests.optimizer.resume import Backwards
from tests.optimizer.runs import INVERSES, Snapshot, closure_of, mean_square, same

passes = passes_either_way()

LOSS = nn.MSELoss()
# Step 1 finds the chain; step 6 refreshes, searches γ and measures ρ; step 5 does none of it.
STEPS_BEFORE = (0, 4, 5)


class BlownError(Exception):
    pass


class Fuse(nn.Module):
    """Passes its input on until it has been called `left` times."""

    def __init__(self) -> None:
        super().__init__()
        self.left = math.inf
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.left -= 1
        self.calls += 1
        if self.left == 0:
            raise BlownError
        return x


def data(step: int) -> tuple[Tensor, Tensor]:
    return normal(12, 4, seed=step), normal(12, 3, seed=100 + step)


def new_optimizer(model: nn.Module | None = None, **settings) -> KFAC:
    return KFAC(
        mlp([4, 6, 5, 3], seed=3) if model is None else model,
        LOSS,
        **{
            "weight_decay": 1e-2,
            "damping": LevenbergMarquardtRule(lambda_=0.5, interval=2),
            "gamma": GammaSearch(interval=6),
            "intervals": Intervals(inverse_interval=3),
        }
        | settings,
    )


def advance(optimizer: KFAC, steps: int) -> None:
    for step in range(steps):
        optimizer.step(optimizer.closure(*data(step)))


# ------------------------------------------------------------------------------------- exceptions


def test_an_exception_before_the_order_of_the_chain_is_committed():
    # The layers of this model are defined last first, which the first step finds out.
    model = nn.Sequential(Backwards(), fuse := Fuse())
    optimizer = new_optimizer(model, inverse="block_tridiagonal")
    before = Snapshot.of(optimizer)
    fuse.left = 3  # the closure, the chain, the statistics
    with pytest.raises(BlownError):
        optimizer.step(optimizer.closure(normal(12, 8), normal(12, 3)))
    before.assert_untouched(optimizer)


@pytest.mark.filterwarnings("ignore:KFAC.step.. has not seen a loss in the closure")
def test_an_exception_when_the_closure_is_called_again_for_rho():
    optimizer = new_optimizer()
    advance(optimizer, 5)
    before = Snapshot.of(optimizer)
    x, y = data(5)
    calls = 0

    def closure() -> Tensor:
        nonlocal calls
        calls += 1
        optimizer.zero_grad()
        loss = mean_square(optimizer.model(x), y)  # K-FAC cannot see it
        loss.backward()
        if calls == 2:
            raise BlownError
        return loss

    with pytest.raises(BlownError):
        optimizer.step(closure)
    assert calls == 2
    before.assert_untouched(optimizer)
    expected = torch.autograd.grad(LOSS(optimizer.model(x), y), list(optimizer.model.parameters()))
    for p, gradient in zip(optimizer.model.parameters(), expected, strict=True):
        torch.testing.assert_close(p.grad, gradient, rtol=1e-12, atol=1e-14)


# ------------------------------------------------------------------------------- numbers not finite


def filled(value: Tensor, row: int, bad: float) -> Tensor:
    return value.index_fill(0, torch.tensor([row]), bad)


def returning(by: Callable[[Tensor], Any]) -> Callable[..., Any]:
    def make(optimizer: KFAC, x: Tensor, y: Tensor) -> Callable[[], Any]:
        closure = optimizer.closure(x, y)
        return lambda: by(closure())

    return make


def with_gradient(bad: float) -> Callable[..., Any]:
    def make(optimizer: KFAC, x: Tensor, y: Tensor) -> Callable[[], Tensor]:
        closure = optimizer.closure(x, y)

        def spoiled() -> Tensor:
            loss = closure()
            optimizer.model[2].bias.grad[1] = bad
            return loss

        return spoiled

    return make


BAD: dict[str, tuple[Callable[..., Any], str]] = {
    "inputs": (lambda o, x, y: o.closure(filled(x, 0, math.nan), y), "The loss is nan"),
    "targets": (lambda o, x, y: o.closure(x, filled(y, 0, math.nan)), "The loss is nan"),
    "infinite targets": (lambda o, x, y: o.closure(x, filled(y, 0, math.inf)), "The loss is inf"),
    "one chunk": (
        lambda o, x, y: o.closure(x, filled(y, 11, math.nan), chunk=5),
        "The loss is nan",
    ),
    "returned": (returning(lambda loss: loss * math.nan), "The loss is nan"),
    "returned as a number": (returning(lambda loss: float(loss) + math.inf), "The loss is inf"),
    "gradient": (with_gradient(math.nan), "The gradient of '2' is not finite"),
    "infinite gradient": (with_gradient(-math.inf), "The gradient of '2' is not finite"),
    # tanh saturates, so that loss and gradient are finite, but x² is not.
    "statistics": (
        lambda o, x, y: o.closure(1e200 * x.sign(), y),
        "The statistics of '0' are not finite",
    ),
}


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("inverse", [*INVERSES, "ekfac"])
@pytest.mark.parametrize("steps_before", STEPS_BEFORE)
def test_a_bad_mini_batch_is_refused_and_leaves_no_trace(steps_before, inverse, bad):
    optimizer, untroubled = new_optimizer(inverse=inverse), new_optimizer(inverse=inverse)
    advance(optimizer, steps_before)
    advance(untroubled, steps_before + 1)
    before = Snapshot.of(optimizer)
    x, y = data(steps_before)

    make, message = BAD[bad]
    returned = optimizer.step(make(optimizer, x, y))

    before.assert_untouched(optimizer, report=False)
    report = optimizer.report
    assert report.refused
    cause = "nonfinite_" + message.split()[1]
    assert [event.kind for event in report.events] == [cause, "refused"]
    assert all(message in event.message for event in report.events)
    assert report.iteration == steps_before + 1
    assert report.examples == 12
    assert report.loss == float(returned) or (math.isnan(report.loss) and math.isnan(returned))
    assert (report.lambda_, report.gamma) == (
        before.state["kfac"]["damping"]["lambda_"],
        before.state["kfac"]["gamma"]["gamma"],
    )
    assert (report.alpha, report.mu, report.rho, report.predicted_change) == (None,) * 4

    # The run goes on as if the bad mini-batch had not been there, generator included.
    optimizer.step(optimizer.closure(x, y))
    assert not optimizer.report.refused
    assert same(optimizer.state_dict(), untroubled.state_dict())
    assert same(dict(optimizer.model.state_dict()), dict(untroubled.model.state_dict()))


@pytest.mark.parametrize("after", [math.nan, math.inf])
@pytest.mark.filterwarnings("ignore:KFAC.step.. has not seen a loss in the closure")
def test_where_the_loss_is_not_finite_after_the_step_lambda_grows(after):
    # The step is taken all the same, as in the authors' program.
    optimizer = new_optimizer(damping=LevenbergMarquardtRule(lambda_=0.5, interval=1))
    x, y = data(0)
    user = closure_of(optimizer, mean_square, x, y)
    returned = []

    def closure() -> Tensor:
        returned.append(user() if not returned else user() + after)
        return returned[-1]

    optimizer.step(closure)
    assert len(returned) == 2
    assert not optimizer.report.refused
    assert not optimizer.report.rho > -math.inf
    assert optimizer.report.lambda_ == pytest.approx(0.5 / 0.95, rel=1e-14)
