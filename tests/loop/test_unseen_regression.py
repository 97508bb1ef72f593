"""Regression losses that K-FAC does not see, in a loop: no units of the targets make training diverge."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import kronfac
from kronfac import KFAC
from tests.loop.loops import step_without_closure

pytestmark = [
    pytest.mark.filterwarnings("ignore:KFAC.step.. has not seen the loss"),
    pytest.mark.filterwarnings("ignore:KFAC rejected a step"),
]

Loss = Callable[[Tensor, Tensor], Tensor]


def perceptron(seed: int, outputs: int = 2) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(4, 20), nn.Tanh(), nn.Linear(20, 20), nn.Tanh(), nn.Linear(20, outputs)
    )


def examples(seed: int, scale: float) -> tuple[Tensor, Tensor]:
    x = torch.randn(128, 4, generator=torch.Generator().manual_seed(seed))
    y = torch.stack([(2 * x[:, 0]).sin() * x[:, 1], x[:, 2] ** 2 - x[:, 3]], 1)
    return x, scale * y


def train(model: nn.Module, loss: Callable[[], Tensor], steps: int) -> tuple[list[float], KFAC]:
    """The losses before each step and after the last, without those of steps that were rejected."""
    optimizer = KFAC(model, nn.MSELoss())
    losses: list[float] = []

    def value() -> Tensor:
        now = loss()
        losses.append(float(now.detach()))
        return now

    for _ in range(steps):
        step_without_closure(optimizer, value)
        assert optimizer.report is not None
        if optimizer.report.rejected:
            losses.pop()
    # A gradient is what validates the last step.
    step_without_closure(optimizer, value)
    if optimizer.report is not None and optimizer.report.rejected:
        losses.pop()
    return losses, optimizer


def by_hand(z: Tensor, y: Tensor) -> Tensor:
    return ((z - y) ** 2).mean()


def summed(z: Tensor, y: Tensor) -> Tensor:
    """Its curvature is 256 times that of the module which KFAC was given."""
    return ((z - y) ** 2).sum()


def cubed(z: Tensor, y: Tensor) -> Tensor:
    """Whose curvature in the outputs is anything."""
    return functional.mse_loss(z**3, y)


def quartic(z: Tensor, y: Tensor) -> Tensor:
    return ((z - y) ** 4).mean()


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("scale", "share"), [(1e-3, 1e-4), (1.0, 0.02), (1e3, 0.9)])
def test_a_loss_by_hand_trains(scale: float, share: float, seed: int) -> None:
    """Targets of a thousand take long, as the weights have to become that large: so with a loss seen."""
    model = perceptron(seed)
    x, y = examples(seed, scale)
    losses, _ = train(model, lambda: by_hand(model(x), y), 60)
    assert losses[-1] < share * losses[0]
    assert max(losses) < 1.1 * losses[0]


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
@pytest.mark.parametrize("loss", [summed, cubed, quartic])
def test_a_loss_of_another_curvature_does_not_diverge(loss: Loss, scale: float, seed: int) -> None:
    model = perceptron(seed)
    x, y = examples(seed, scale)
    losses, _ = train(model, lambda: loss(model(x), y), 60)
    assert losses[-1] < 0.9 * losses[0]
    assert (
        max(losses) < 256 * losses[0]
    )  # two steps after which the gradient is four times as large


@pytest.mark.parametrize("seed", range(2))
def test_mini_batches_that_differ_do_not_diverge(seed: int) -> None:
    torch.manual_seed(seed)
    layers = [nn.Linear(4, 20), nn.ReLU(), nn.Linear(20, 20), nn.ReLU(), nn.Linear(20, 2)]
    model = nn.Sequential(*layers)
    x, y = examples(seed, 1e3)
    start = float(by_hand(model(x), y).detach())
    order = torch.Generator().manual_seed(seed)

    def loss() -> Tensor:
        some = torch.randperm(len(x), generator=order)[:16]
        return functional.mse_loss(model(x[some]), y[some])

    train(model, loss, 100)
    assert float(by_hand(model(x), y).detach()) < 0.9 * start


@pytest.mark.parametrize("seed", range(3))
def test_a_residual_of_a_differential_equation_does_not_diverge(seed: int) -> None:
    """-u'' = π² sin πx with u = 0 at both ends, by torch.autograd.grad, which K-FAC can't repeat."""
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Linear(1, 20), nn.Tanh(), nn.Linear(20, 20), nn.Tanh(), nn.Linear(20, 1)
    ).double()
    x = torch.linspace(0, 1, 64, dtype=torch.float64)[:, None].requires_grad_()
    f = math.pi**2 * (math.pi * x).sin().detach()
    ends = torch.tensor([[0.0], [1.0]], dtype=torch.float64)

    def loss() -> Tensor:
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        (bend,) = torch.autograd.grad(slope.sum(), x, create_graph=True)
        return ((bend + f) ** 2).mean() + 100 * (model(ends) ** 2).mean()

    losses, _ = train(model, loss, 80)
    assert losses[-1] < 0.7 * losses[0]
    assert max(losses) < 256 * losses[0]


def test_lambda_follows_gradients() -> None:
    model = perceptron(0)
    x, y = examples(0, 1.0)
    optimizer = KFAC(model, nn.MSELoss())
    lambdas = []
    for _ in range(10):
        step_without_closure(optimizer, lambda: by_hand(model(x), y))
        assert optimizer.report is not None
        lambdas.append(optimizer.report.lambda_)
    assert lambdas[-1] < 0.9 * lambdas[0]
    assert optimizer.report is not None
    assert optimizer.report.next_rho is not None


def test_a_step_that_is_rejected_is_rolled_back_to_the_bit() -> None:
    model = perceptron(0)
    x, y = examples(0, 1.0)
    optimizer = KFAC(model, nn.MSELoss())
    before = [p.detach().clone() for p in model.parameters()]
    step_without_closure(optimizer, lambda: summed(model(x), y))
    step_without_closure(optimizer, lambda: summed(model(x), y))
    assert optimizer.report is not None
    assert optimizer.report.rejected
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))


def test_a_run_goes_on_from_its_state_to_the_bit() -> None:
    x, y = examples(0, 1.0)
    ends = []
    for interrupted in (False, True):
        model = perceptron(0)
        optimizer = KFAC(model, nn.MSELoss())
        for step in range(8):
            if interrupted and step == 4:
                saved = optimizer.state_dict()
                optimizer = KFAC(model, nn.MSELoss())
                optimizer.load_state_dict(saved)
            step_without_closure(optimizer, lambda m=model: cubed(m(x), y))  # type: ignore[misc]
        ends.append(nn.utils.parameters_to_vector(model.parameters()).detach())
    assert torch.equal(*ends)


def test_a_learning_rate_of_zero_is_no_step_to_be_validated() -> None:
    model = perceptron(0)
    x, y = examples(0, 1.0)
    optimizer = KFAC(model, nn.MSELoss(), lr=0.0)
    for _ in range(3):
        step_without_closure(optimizer, lambda: by_hand(model(x), y))
        assert optimizer.report is not None
        assert not optimizer.report.rejected


def test_a_declared_likelihood_in_the_loop_does_not_diverge_either() -> None:
    model = perceptron(0)
    x, y = examples(0, 1e3)
    optimizer = KFAC(model, kronfac.Gaussian())
    first = float(summed(model(x), y).detach())
    for _ in range(40):
        step_without_closure(optimizer, lambda: summed(model(x), y) / 2)
    assert float(summed(model(x), y).detach()) < first
