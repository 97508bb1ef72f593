"""Every loss at the front door: closures of K-FAC's own and of the user, heads, passes, residuals."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.testing import assert_close

import kronfac
from kronfac import KFAC, Intervals
from kronfac.errors import (
    ClosureError,
    TargetError,
    UnsupportedLossError,
    UnsupportedModelError,
)
from tests.conftest import mlp, normal, seeded
from tests.optimizer.runs import closure_of

N = 40
X = normal(N, 4)
REAL = mlp([4, 3], seed=9, gain=2.0)(X).detach() + 0.1 * normal(N, 3, seed=2)
GREY = REAL.sigmoid()
CLASSES = REAL.argmax(dim=1)
PADDED = torch.where(torch.arange(N) % 5 == 0, -100, CLASSES)
COUNTS = torch.poisson(REAL.exp().clamp(max=20), generator=seeded(3))
WEIGHT = torch.tensor([0.5, 2.0, 1.25], dtype=torch.float64)


class Pair(nn.Module):
    """Mean and variance from one body."""

    def __init__(self, outputs: int = 3) -> None:
        super().__init__()
        self.body = mlp([4, 8, 2 * outputs], seed=1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        mean, spread = self.body(x).chunk(2, dim=1)
        return mean, functional.softplus(spread) + 1e-3


def network(*ends: nn.Module) -> nn.Module:
    return nn.Sequential(*mlp([4, 8, 3], seed=1), *ends)


LOSSES: dict[str, tuple[Any, nn.Module, Tensor]] = {
    "huber": (network, nn.HuberLoss(delta=0.5), REAL),
    "huber, sum": (network, nn.HuberLoss(reduction="sum"), REAL),
    "smooth l1": (network, nn.SmoothL1Loss(beta=0.3), REAL),
    "poisson": (network, nn.PoissonNLLLoss(), COUNTS),
    "poisson of rates": (
        lambda: network(nn.Softplus()),
        nn.PoissonNLLLoss(log_input=False),
        COUNTS,
    ),
    "bce": (lambda: network(nn.Sigmoid()), nn.BCELoss(), GREY),
    "nll": (lambda: network(nn.LogSoftmax(dim=1)), nn.NLLLoss(WEIGHT), PADDED),
    "ce": (network, nn.CrossEntropyLoss(WEIGHT), PADDED),
    "gaussian nll": (Pair, nn.GaussianNLLLoss(), REAL),
    "gaussian nll, sum": (Pair, nn.GaussianNLLLoss(reduction="sum", full=True), REAL),
    "gauss-newton": (network, kronfac.GaussNewton(nn.SoftMarginLoss()), REAL.sign()),
    "gauss-newton, sum": (
        network,
        kronfac.GaussNewton(nn.MultiLabelSoftMarginLoss(reduction="sum")),
        GREY,
    ),
    "gauss-newton, outputs that meet": (
        network,
        kronfac.GaussNewton(lambda z, y: (z - y).square().sum(dim=1).add(1).sqrt().mean()),
        REAL,
    ),
    "mean and variance in one tensor": (
        lambda: Joined(Pair()),
        kronfac.HeteroscedasticGaussian(),
        REAL,
    ),
    "kronfac.Poisson": (network, kronfac.Poisson(), COUNTS),
    "kronfac.Huber": (network, kronfac.Huber(0.5), REAL),
}
each_loss = pytest.mark.parametrize("name", LOSSES)


class Joined(nn.Module):
    def __init__(self, pair: nn.Module) -> None:
        super().__init__()
        self.pair = pair

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat(self.pair(x), dim=1)


def called(loss: Any, outputs: Any, y: Tensor) -> Tensor:
    return loss(outputs[0], y, outputs[1]) if isinstance(outputs, tuple) else loss(outputs, y)


def own(optimizer: KFAC, loss: Any, y: Tensor):
    return closure_of(optimizer, partial(called, loss), X, y)


def step_with(optimizer: KFAC, objective: Callable[[], Tensor]) -> Tensor:
    """A step on a loss that takes neither inputs nor targets; without an event."""

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = objective()
        loss.backward()
        return loss

    value = optimizer.step(closure)
    assert not optimizer.report.events
    return value


def same(one: nn.Module, other: nn.Module, **tolerance: float) -> None:
    for p, q in zip(one.parameters(), other.parameters(), strict=True):
        assert_close(p, q, **(tolerance or {"rtol": 1e-7, "atol": 1e-9}))


@each_loss
def test_it_trains_and_every_loss_is_seen(name):
    make, loss, y = LOSSES[name]
    model = make()
    optimizer = KFAC(model, loss)
    before = float(called(loss, model(X), y).detach())
    for _ in range(12):
        value = optimizer.step(optimizer.closure(X, y))
        assert not [e for e in optimizer.report.events if e.kind != "rejected"]
    assert float(value) < before - 0.1 * abs(before)


@each_loss
def test_the_empirical_fisher_has_the_targets(name):
    make, loss, y = LOSSES[name]
    optimizer = KFAC(make(), loss, fisher="empirical")
    optimizer.step(optimizer.closure(X, y))
    assert not optimizer.report.refused


@each_loss
@pytest.mark.parametrize("fisher", ["sampled", "exact"])
def test_closures_of_both_kinds_and_micro_batches_take_the_same_step(name, fisher):
    make, loss, y = LOSSES[name]
    models = [make() for _ in range(3)]
    optimizers = [
        KFAC(model, loss, fisher=fisher, intervals=Intervals(statistics_fraction=1.0))
        for model in models
    ]
    for _ in range(2):
        optimizers[0].step(optimizers[0].closure(X, y))
        optimizers[1].step(own(optimizers[1], loss, y))
        optimizers[2].step(optimizers[2].closure(X, y, chunk=15))
    same(models[0], models[1])
    same(models[0], models[2])


class Inside(nn.Module):
    """A model that computes its loss, with a variance of its own or a given one."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: Tensor, y: Tensor, variance: Tensor | None = None) -> Tensor:
        outputs = self.body(x)
        mean, variance = outputs if variance is None else (outputs, variance)
        return functional.gaussian_nll_loss(mean, y, variance)


def masked(z: Tensor, y: Tensor) -> Tensor:
    each = functional.cross_entropy(z, CLASSES, reduction="none")
    kept = y >= 0
    return (each * kept).sum() / kept.sum()


VARIANCE = normal(N, 3, seed=6).exp()
# Two ways to compute a loss that take the same steps: model, loss module, objective.
Way = tuple[nn.Module, nn.Module, Callable[[nn.Module], Tensor]]


def by_module(model: nn.Module, loss: nn.Module, y: Tensor) -> Way:
    return model, loss, lambda m: called(loss, m(X), y)


EQUAL: dict[str, Callable[[], tuple[Way, Way]]] = {
    # The Fisher does not depend on how the predictive distribution is parametrised.
    "nll behind its link": lambda: (
        by_module(network(nn.LogSoftmax(dim=1)), nn.NLLLoss(WEIGHT), PADDED),
        by_module(network(), nn.CrossEntropyLoss(WEIGHT), PADDED),
    ),
    "bce behind its link": lambda: (
        by_module(network(nn.Sigmoid()), nn.BCELoss(), GREY),
        by_module(network(), nn.BCEWithLogitsLoss(), GREY),
    ),
    "mean and variance inside the model": lambda: (
        (Inside(Pair()), nn.GaussianNLLLoss(), lambda m: m(X, REAL)),
        by_module(Pair(), nn.GaussianNLLLoss(), REAL),
    ),
    # As many as the means; they are no part of what is learned.
    "known variances inside the model": lambda: (
        (Inside(network()), nn.MSELoss(), lambda m: m(X, REAL, VARIANCE)),
        (
            network(),
            nn.MSELoss(),
            lambda m: functional.gaussian_nll_loss(m(X), REAL, VARIANCE),
        ),
    ),
    "a mask by hand": lambda: (
        (network(), nn.CrossEntropyLoss(), lambda m: masked(m(X), PADDED)),
        by_module(network(), nn.CrossEntropyLoss(), PADDED),
    ),
    "residuals": lambda: (
        (network(), nn.MSELoss(), lambda m: kronfac.least_squares(m(X) - REAL)),
        by_module(network(), nn.MSELoss(), REAL),
    ),
}


@pytest.mark.parametrize("name", EQUAL)
def test_two_ways_to_compute_a_loss_take_the_same_steps(name):
    ways = EQUAL[name]()
    for model, loss, objective in ways:
        optimizer = KFAC(model, loss, fisher="exact")
        for _ in range(4):
            step_with(optimizer, partial(objective, model))
    same(ways[0][0], ways[1][0], rtol=1e-6, atol=1e-8)


# ----------------------------------------------------------------------------------------- refusals


def by_hand(optimizer: KFAC) -> Tensor:
    mean, variance = optimizer.model(X)
    return (variance.log() + (mean - REAL).square() / variance).mean() / 2


def maximised(optimizer: KFAC) -> Tensor:
    each = functional.mse_loss(optimizer.model(X), REAL, reduction="none")
    return each[:, 0].mean() - each[:, 1].mean()


def test_a_model_that_returns_no_pair_is_refused():
    optimizer = KFAC(network(), nn.GaussianNLLLoss())
    with pytest.raises(UnsupportedModelError, match=r"returns a tuple \(mean, variance\)"):
        optimizer.step(optimizer.closure(X, REAL))


def test_targets_of_a_pair_that_torch_would_broadcast_are_refused():
    optimizer = KFAC(Pair(), nn.GaussianNLLLoss())
    with pytest.raises(TargetError, match="of the means' shape"):
        optimizer.step(optimizer.closure(X, REAL[:, :1]))


@pytest.mark.parametrize(
    ("make", "loss", "objective", "error", "message"),
    [
        (Pair, nn.GaussianNLLLoss(), by_hand, ClosureError, "saw no call of GaussianNLLLoss"),
        (network, nn.MSELoss(), maximised, UnsupportedLossError, "losses that are minimised"),
    ],
)
def test_a_loss_that_is_not_seen_or_maximised_is_refused(make, loss, objective, error, message):
    optimizer = KFAC(make(), loss)
    with pytest.raises(error, match=message):
        step_with(optimizer, partial(objective, optimizer))


@pytest.mark.parametrize(
    ("weight", "error", "message"),
    [
        (-1.0, ValueError, "a weight of at least 0"),
        (float("nan"), ValueError, "a weight of at least 0"),
        (torch.ones(3), TargetError, r"one weight, or \(40,\)"),
    ],
)
def test_weights_of_residuals_that_do_not_fit_are_refused(weight, error, message):
    with pytest.raises(error, match=message):
        kronfac.least_squares(REAL, weight)


# -------------------------------------------------------------------------------- several losses a step


@pytest.mark.parametrize("name", ["huber", "poisson", "nll", "gaussian nll", "gauss-newton"])
def test_it_trains_inside_autocast(name):
    make, loss, y = LOSSES[name]
    model = make().float()
    x, y = X.float(), y.float() if y.is_floating_point() else y
    loss = copy.deepcopy(loss).float()
    optimizer = KFAC(model, loss)
    before = float(called(loss, model(x), y).detach())

    def closure() -> Tensor:
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            outputs = model(x)
            value = called(loss, outputs, y)
        value.backward()
        return value

    for _ in range(10):
        optimizer.step(closure)
        assert not optimizer.report.refused
    assert float(called(loss, model(x), y).detach()) < before


def test_passes_may_have_losses_of_different_kinds():
    """Two calls of the model, of other lengths, with other losses: each draws targets of its own."""
    model = network()
    optimizer = KFAC(model, nn.MSELoss())

    def loss() -> Tensor:
        return functional.cross_entropy(model(X[:25]), CLASSES[:25]) + kronfac.least_squares(
            model(X[25:])[:, :2] - REAL[25:, :2], 0.5
        )

    before = float(loss().detach())
    for _ in range(8):
        value = step_with(optimizer, loss)
    assert float(value.detach()) < 0.7 * before


def test_a_loss_can_be_copied_and_saved():
    loss = kronfac.GaussNewton(nn.HuberLoss())
    optimizer = KFAC(network(), loss)
    optimizer.step(optimizer.closure(X, REAL))
    assert repr(copy.deepcopy(loss)) == repr(loss)
    assert loss._targets is None
