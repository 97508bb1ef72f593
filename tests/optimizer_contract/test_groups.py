"""Learning rates and weight decay by group, against the dense definition in float64."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from kronfac import (
    KFAC,
    FixedDamping,
    FixedGamma,
    Intervals,
    LevenbergMarquardtRule,
    QuadraticModel,
)
from tests.conftest import mlp, normal
from tests.optimizer.pseudocode import fisher, moments, output_curvature
from tests.reference import dense

LOSS = nn.MSELoss()
LAMBDA, GAMMA = 0.3, 0.6
EXACT: dict[str, Any] = {
    "fisher": "exact",
    "damping": FixedDamping(LAMBDA, reject=None),
    "gamma": FixedGamma(GAMMA),
    "step_rule": QuadraticModel(bounded=False, memory=None),
    "intervals": Intervals(1.0, 1.0),
}


def data(step: int = 0) -> tuple[Tensor, Tensor]:
    return normal(15, 4, seed=step), normal(15, 3, seed=100 + step)


def theta(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def filled(model: nn.Module, value: Callable[[str, nn.Parameter], Any]) -> Tensor:
    """The dense vector, each layer's [W b] with columns stacked, of a model with other numbers in it."""
    other = copy.deepcopy(model)
    for (name, p), own in zip(model.named_parameters(), other.parameters(), strict=True):
        own.data[:] = value(name, p)
    return dense.theta(other)


def by_name(model: nn.Module, key: str, values: dict[str, float]) -> list[dict[str, Any]]:
    return [{"params": [p], key: values[name]} for name, p in model.named_parameters()]


RATES = {
    "one for all": {"0.weight": 0.5, "0.bias": 0.5, "2.weight": 0.5, "2.bias": 0.5},
    "by layer": {"0.weight": 0.5, "0.bias": 0.5, "2.weight": 1.0, "2.bias": 1.0},
    "one is still": {"0.weight": 0.0, "0.bias": 0.7, "2.weight": 1.0, "2.bias": 1.3},
}


@pytest.mark.parametrize("momentum", [True, False])
@pytest.mark.parametrize("rates", RATES.values(), ids=RATES)
def test_the_applied_step_is_that_of_rate_one_times_the_rates(rates, momentum):
    settings = EXACT | {"step_rule": QuadraticModel(momentum=momentum, bounded=False, memory=None)}
    settings["damping"] = LevenbergMarquardtRule(LAMBDA, interval=1, reject=None)
    model = mlp([4, 5, 3], seed=3)
    optimizer = KFAC(model, LOSS, params=by_name(model, "lr", rates), weight_decay=0.1, **settings)
    L = filled(model, lambda name, _: rates[name])
    for step in range(4):
        x, y = data(step)
        twin = copy.deepcopy(optimizer)
        for group in twin.param_groups:
            group["lr"] = 1.0
        before, lambda_ = dense.theta(model), optimizer.state_dict()["kfac"]["damping"]["lambda_"]
        g = dense.gradient(model, LOSS, x, y) + 0.1 * before
        F = fisher(model, x, output_curvature(model, LOSS, x, y))
        H = F + (lambda_ + 0.1) * torch.eye(len(g), dtype=g.dtype)
        h = float(LOSS(model(x), y).detach()) + 0.05 * float(before @ before)
        twin.step(twin.closure(x, y))
        optimizer.step(optimizer.closure(x, y))
        after = dense.theta(model)
        applied = L * (dense.theta(twin.model) - before)
        assert_close(after - before, applied, rtol=1e-10, atol=1e-12)
        predicted = float(g @ applied + applied @ H @ applied / 2)
        assert optimizer.report.predicted_change == pytest.approx(predicted, rel=1e-9)
        change = float(LOSS(model(x), y).detach()) + 0.05 * float(after @ after) - h
        assert optimizer.report.rho == pytest.approx(change / predicted, rel=1e-7)
        buffer = filled(model, lambda _, p: optimizer.state[p]["momentum_buffer"])
        assert_close(buffer * max(rates.values()), after - before, rtol=1e-9, atol=1e-12)


DECAYS = {
    "biases left out": {"0.weight": 0.2, "0.bias": 0.0, "2.weight": 0.2, "2.bias": 0.0},
    "by layer": {"0.weight": 0.5, "0.bias": 0.5, "2.weight": 0.0, "2.bias": 0.0},
    "all different": {"0.weight": 0.4, "0.bias": 0.1, "2.weight": 0.2, "2.bias": 0.3},
}


@pytest.mark.parametrize("decays", DECAYS.values(), ids=DECAYS)
def test_each_parameter_has_its_own_weight_decay(decays):
    model = mlp([4, 5, 3], seed=3)
    groups = by_name(model, "weight_decay", decays)
    optimizer = KFAC(model, LOSS, params=groups, **EXACT)
    x, y = data()
    before, eta = dense.theta(model), filled(model, lambda name, _: decays[name])
    g = dense.gradient(model, LOSS, x, y) + eta * before
    K = output_curvature(model, LOSS, x, y)
    A, G = dense.factored_tikhonov(*moments(model, x, K), GAMMA)
    Delta = -torch.linalg.solve(dense.block_diagonal_fisher(A, G), g)
    H = fisher(model, x, K) + LAMBDA * torch.eye(len(g), dtype=g.dtype) + eta.diag()
    alpha = float(-g @ Delta / (Delta @ H @ Delta))
    optimizer.step(optimizer.closure(x, y))
    assert optimizer.report.alpha == pytest.approx(alpha, rel=1e-8)
    assert_close(dense.theta(model) - before, alpha * Delta, rtol=1e-8, atol=1e-11)
    predicted = alpha * float(g @ Delta) / 2
    assert optimizer.report.predicted_change == pytest.approx(predicted, rel=1e-8)
    penalty = optimizer.state_dict()["kfac"]["acceptance"]["pending"]["penalty"]
    assert penalty == pytest.approx(float(eta @ before.square()) / 2, rel=1e-10)


@pytest.mark.parametrize("inverse", ["block_diagonal", "block_tridiagonal", "ekfac"])
def test_groups_with_the_same_options_are_as_one(inverse):
    runs = []
    for split in (False, True):
        model = mlp([4, 5, 5, 3], seed=3)
        params = None
        if split:
            first, *rest = model.parameters()
            params = [{"params": [first]}, {"params": rest, "weight_decay": 0.1, "lr": 0.5}]
        optimizer = KFAC(model, LOSS, params=params, lr=0.5, weight_decay=0.1, inverse=inverse)
        for step in range(6):
            optimizer.step(optimizer.closure(*data(step)))
        runs.append(theta(model))
    assert all(torch.equal(runs[0][name], runs[1][name]) for name in runs[0])


@pytest.mark.parametrize("inverse", ["block_diagonal", "block_tridiagonal", "ekfac"])
def test_biases_without_weight_decay_train(inverse):
    model = mlp([4, 5, 5, 3], seed=3)
    named = dict(model.named_parameters())
    weights = [p for name, p in named.items() if "weight" in name]
    biases = [p for name, p in named.items() if "bias" in name]
    params = [{"params": weights, "weight_decay": 1e-3}, {"params": biases, "lr": 0.5}]
    optimizer = KFAC(model, LOSS, params=params, inverse=inverse)
    x, y = data()
    losses = [float(optimizer.step(optimizer.closure(x, y))) for _ in range(25)]
    assert losses[-1] < 0.2 * losses[0]


def test_a_rate_of_zero_updates_statistics_and_moves_nothing():
    model = mlp([4, 5, 3], seed=3)
    optimizer = KFAC(model, LOSS, lr=0.0, weight_decay=0.1)
    before = theta(model)
    for step in range(3):
        optimizer.step(optimizer.closure(*data(step)))
        assert optimizer.report.predicted_change == 0
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    state = optimizer.state_dict()["kfac"]
    assert state["iteration"] == 3
    assert state["curvature"] is not None
    first = float(LOSS(model(data()[0]), data()[1]).detach())
    for group in optimizer.param_groups:
        group["lr"] = 1.0
    for _ in range(10):
        optimizer.step(optimizer.closure(*data()))
    assert optimizer.report.loss < 0.5 * first


@pytest.mark.parametrize("lr", [-0.1, float("nan"), float("inf"), "1", None, torch.ones(2)])
def test_what_is_no_learning_rate_is_refused(lr):
    model = mlp([4, 5, 3])
    with pytest.raises(ValueError, match=r"lr.*not negative"):
        KFAC(model, LOSS, lr=lr)
    optimizer = KFAC(model, LOSS)
    optimizer.param_groups[0]["lr"] = lr
    with pytest.raises(ValueError, match=r"group 0.*lr"):
        optimizer.step(optimizer.closure(*data()))


def test_adams_learning_rate_is_warned_of_once():
    model = mlp([4, 5, 3])
    with pytest.warns(UserWarning, match="likely another optimizer's"):
        optimizer = KFAC(model, LOSS, lr=1e-3)
    optimizer.step(optimizer.closure(*data()))  # warnings are errors here
    optimizer = KFAC(model, LOSS)
    optimizer.param_groups[0]["lr"] = 1e-3
    with pytest.warns(UserWarning, match=r"lr=0\.001"):
        optimizer.step(optimizer.closure(*data()))


def test_parameters_in_no_group_stay():
    model = mlp([4, 5, 3], seed=3)
    optimizer = KFAC(model, LOSS, params=model[2].parameters())
    kept = theta(model)
    optimizer.step(optimizer.closure(*data()))
    assert torch.equal(model[0].weight, kept["0.weight"])
    assert not torch.equal(model[2].weight, kept["2.weight"])
    assert model[0].weight.requires_grad


@pytest.mark.parametrize(
    ("params", "error", "message"),
    [
        (lambda model: [], ValueError, "no parameter that is trained"),
        (lambda model: model[0].weight, TypeError, "list of parameters"),
        (lambda model: [nn.Parameter(torch.zeros(2))], ValueError, "none of them"),
        (lambda model: [{"params": set(model.parameters())}], TypeError, "list, not a set"),
        (lambda model: ["0.weight"], TypeError, "must hold parameters of the model; got a str"),
        (lambda model: [{"params": list(model.parameters())}] * 2, ValueError, "more than one"),
        (
            lambda model: [{"params": model.parameters(), "weight_decay": -1.0}],
            ValueError,
            "weight_decay",
        ),
    ],
)
def test_groups_that_can_not_be_are_refused(params, error, message):
    model = mlp([4, 5, 3])
    with pytest.raises(error, match=message):
        KFAC(model, LOSS, params=params(model))


def test_a_layer_is_unfrozen_in_the_middle_of_training():
    model = mlp([4, 5, 3], seed=3)
    model[0].requires_grad_(False)
    optimizer = KFAC(model, LOSS)
    for step in range(4):
        optimizer.step(optimizer.closure(*data(step)))
    frozen, buffer = theta(model), optimizer.state[model[2].weight]["momentum_buffer"].clone()
    model[0].requires_grad_(True)
    optimizer.add_param_group({"params": model[0].parameters(), "weight_decay": 0.01, "lr": 0.5})
    assert torch.equal(optimizer.state[model[2].weight]["momentum_buffer"], buffer)
    assert not optimizer.state[model[0].weight]["momentum_buffer"].any()
    other = copy.deepcopy(optimizer)
    for run in (optimizer, other):
        for step in range(4, 10):
            run.step(run.closure(*data(step)))
    assert not torch.equal(model[0].weight, frozen["0.weight"])
    assert all(
        torch.equal(p, q) for p, q in zip(model.parameters(), other.model.parameters(), strict=True)
    )
    with pytest.raises(ValueError, match="more than one"):
        optimizer.add_param_group({"params": model[0].parameters()})
    with pytest.raises(ValueError, match="parameters of the model"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})
    assert len(optimizer.param_groups) == 2
