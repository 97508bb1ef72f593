"""Every loss at the front door: closures of K-FAC's own and of the user, heads, passes, residuals."""

import copy
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


def called(loss: nn.Module, outputs: Any, y: Tensor) -> Tensor:
    return loss(outputs[0], y, outputs[1]) if isinstance(outputs, tuple) else loss(outputs, y)


def own(optimizer: KFAC, loss: nn.Module, y: Tensor):
    def closure() -> Tensor:
        optimizer.zero_grad()
        value = called(loss, optimizer.model(X), y)
        value.backward()
        return value

    return closure


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


@each_loss
def test_the_empirical_fisher_has_the_targets(name):
    make, loss, y = LOSSES[name]
    optimizer = KFAC(make(), loss, fisher="empirical")
    optimizer.step(optimizer.closure(X, y))
    assert not optimizer.report.refused


@pytest.mark.parametrize(
    ("one", "other", "y"),
    [
        (nn.NLLLoss(WEIGHT), nn.CrossEntropyLoss(WEIGHT), PADDED),
        (nn.BCELoss(), nn.BCEWithLogitsLoss(), GREY),
    ],
)
def test_a_loss_behind_its_own_link_takes_the_step_of_both_in_one(one, other, y):
    """The Fisher does not depend on how the predictive distribution is parametrised."""
    link = nn.LogSoftmax(dim=1) if isinstance(one, nn.NLLLoss) else nn.Sigmoid()
    linked, plain = network(link), network()
    for model, loss in ((linked, one), (plain, other)):
        optimizer = KFAC(model, loss, fisher="exact")
        for _ in range(3):
            optimizer.step(optimizer.closure(X, y))
    same(linked, plain, rtol=1e-6, atol=1e-8)


# ------------------------------------------------------------------------------------ mean and variance


class Inside(nn.Module):
    """A model that computes its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.pair = Pair()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        mean, variance = self.pair(x)
        return functional.gaussian_nll_loss(mean, y, variance)


def test_mean_and_variance_inside_the_model():
    inside, outside = Inside(), Pair()
    optimizers = [KFAC(model, nn.GaussianNLLLoss(), fisher="exact") for model in (inside, outside)]

    def closure() -> Tensor:
        inside.zero_grad()
        loss = inside(X, REAL)
        loss.backward()
        return loss

    for _ in range(3):
        optimizers[0].step(closure)
        optimizers[1].step(optimizers[1].closure(X, REAL))
        assert not optimizers[0].report.events
    same(inside, outside)


def test_known_variances_inside_the_model():
    """As many as the means, or a number; they are no part of what is learned."""
    known = normal(N, 3, seed=6).exp()

    class Known(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mean = network()

        def forward(self, x: Tensor, y: Tensor, variance: Tensor) -> Tensor:
            return functional.gaussian_nll_loss(self.mean(x), y, variance)

    inside, outside = Known(), network()
    optimizers = [KFAC(model, nn.MSELoss(), fisher="exact") for model in (inside, outside)]

    def closure(loss: Any) -> Tensor:
        value = loss()
        value.backward()
        return value

    for _ in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        optimizers[0].step(lambda: closure(lambda: inside(X, REAL, known)))
        optimizers[1].step(
            lambda: closure(lambda: functional.gaussian_nll_loss(outside(X), REAL, known))
        )
        assert not any(optimizer.report.events for optimizer in optimizers)
    same(inside, outside)


def test_a_model_that_returns_no_pair_is_refused():
    optimizer = KFAC(network(), nn.GaussianNLLLoss())
    with pytest.raises(UnsupportedModelError, match=r"returns a tuple \(mean, variance\)"):
        optimizer.step(optimizer.closure(X, REAL))


def test_a_pair_whose_loss_is_not_called_is_refused():
    optimizer = KFAC(Pair(), nn.GaussianNLLLoss())

    def closure() -> Tensor:
        mean, variance = optimizer.model(X)
        loss = (variance.log() + (mean - REAL).square() / variance).mean() / 2
        loss.backward()
        return loss

    with pytest.raises(ClosureError, match="did not call GaussianNLLLoss where KFAC sees it"):
        optimizer.step(closure)


def test_targets_of_a_pair_that_torch_would_broadcast_are_refused():
    optimizer = KFAC(Pair(), nn.GaussianNLLLoss())
    with pytest.raises(TargetError, match="of the means' shape"):
        optimizer.step(optimizer.closure(X, REAL[:, :1]))


# -------------------------------------------------------------------------------- several losses a step


def test_a_mask_by_hand_is_the_same_as_ignored_targets():
    by_hand, ignored = network(), network()
    optimizers = [KFAC(model, nn.CrossEntropyLoss()) for model in (by_hand, ignored)]
    kept = PADDED >= 0

    def masked(z: Tensor, y: Tensor) -> Tensor:
        each = functional.cross_entropy(z, CLASSES, reduction="none")
        return (each * kept).sum() / kept.sum()

    for _ in range(4):
        optimizers[0].step(own(optimizers[0], masked, PADDED))
        optimizers[1].step(own(optimizers[1], nn.CrossEntropyLoss(), PADDED))
        assert not optimizers[0].report.events
    same(by_hand, ignored)


def test_a_loss_without_a_reduction_that_is_maximised_is_refused():
    optimizer = KFAC(network(), nn.MSELoss())

    def maximised(z: Tensor, y: Tensor) -> Tensor:
        each = functional.mse_loss(z, y, reduction="none")
        return each[:, 0].mean() - each[:, 1].mean()

    with pytest.raises(UnsupportedLossError, match="losses that are minimised"):
        optimizer.step(own(optimizer, maximised, REAL))


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

    def closure() -> Tensor:
        optimizer.zero_grad()
        value = loss()
        value.backward()
        return value

    before = float(loss().detach())
    for _ in range(8):
        value = optimizer.step(closure)
        assert not optimizer.report.events
    assert float(value.detach()) < 0.7 * before


def test_residuals_are_least_squares_with_their_targets():
    """The same steps as with `mse_loss`, and the loss is seen: the closure is called once a step."""
    calls = 0
    plain, residual = network(), network()
    optimizers = [KFAC(model, nn.MSELoss(), fisher="exact") for model in (plain, residual)]

    def closure() -> Tensor:
        nonlocal calls
        calls += 1
        residual.zero_grad()
        loss = kronfac.least_squares(residual(X) - REAL)
        loss.backward()
        return loss

    for _ in range(4):
        optimizers[0].step(own(optimizers[0], nn.MSELoss(), REAL))
        optimizers[1].step(closure)
        assert not optimizers[1].report.events
    assert calls == 4
    same(plain, residual)


class Equation(nn.Module):
    """u' = −u and u(0) = 1: what is left of both, the derivative by a difference."""

    def __init__(self) -> None:
        super().__init__()
        self.u = mlp([1, 10, 1], seed=4)

    def forward(self, t: Tensor) -> tuple[Tensor, Tensor]:
        h = 1e-3
        slope = (self.u(t + h) - self.u(t - h)) / (2 * h)
        return slope + self.u(t), self.u(torch.zeros_like(t[:1])) - 1


def test_a_differential_equation_with_a_boundary_value():
    model = Equation()
    optimizer = KFAC(model, nn.MSELoss())
    t = torch.linspace(0, 2, 30, dtype=torch.float64)[:, None]

    def closure() -> Tensor:
        optimizer.zero_grad()
        inside, boundary = model(t)
        loss = kronfac.least_squares(inside) + kronfac.least_squares(boundary, weight=10.0)
        loss.backward()
        return loss

    for _ in range(40):
        optimizer.step(closure)
        assert not [e for e in optimizer.report.events if e.kind == "loss_not_seen"]
    assert float((model.u(t).detach() - (-t).exp()).abs().max()) < 0.02


@pytest.mark.parametrize("weight", [-1.0, float("nan")])
def test_weights_of_residuals_that_are_none_are_refused(weight):
    with pytest.raises(ValueError, match="a weight of at least 0"):
        kronfac.least_squares(REAL, weight)


def test_weights_of_residuals_that_do_not_fit_are_refused():
    with pytest.raises(TargetError, match=r"one weight, or \(40,\)"):
        kronfac.least_squares(REAL, torch.ones(3))


def test_a_loss_can_be_copied_and_saved():
    loss = kronfac.GaussNewton(nn.HuberLoss())
    optimizer = KFAC(network(), loss)
    optimizer.step(optimizer.closure(X, REAL))
    assert repr(copy.deepcopy(loss)) == repr(loss)
    assert loss._targets is None
