"""Large mini-batches, gone through in parts: the step is that of one pass."""

import copy
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import kronfac
from kronfac import KFAC, GammaSearch, Intervals, LevenbergMarquardtRule
from kronfac.extend import BlockDiagonalInverse, SampledFisher
from kronfac.storage import tensors_in
from tests.conftest import mlp, normal, passes_either_way
from tests.optimizer.runs import INVERSES, NUMBERS, close, targets_for
from tests.reference import dense

passes = passes_either_way()

M = 23
SAME = {"rtol": 1e-9, "atol": 1e-9}
LOSSES = {
    "mse_mean": nn.MSELoss(),
    "mse_sum": nn.MSELoss(reduction="sum"),
    "bce_mean": nn.BCEWithLogitsLoss(),
    "bce_sum": nn.BCEWithLogitsLoss(reduction="sum"),
    "cross_entropy_mean": nn.CrossEntropyLoss(),
    "cross_entropy_sum": nn.CrossEntropyLoss(reduction="sum", label_smoothing=0.1),
    "gaussian": kronfac.Gaussian(variance=0.3),
    "bernoulli": kronfac.Bernoulli(),
    "categorical": kronfac.Categorical(),
}


def data(loss: nn.Module, step: int = 0) -> tuple[Tensor, Tensor]:
    x = normal(M, 4, seed=10 + step)
    return x, targets_for(loss, mlp([4, 3], seed=9, gain=2.0)(x).detach(), seed=step)


def new_optimizer(loss: nn.Module, model: nn.Module | None = None, **settings) -> KFAC:
    return KFAC(
        mlp([4, 6, 5, 3], seed=3) if model is None else model,
        loss,
        **{
            "weight_decay": 1e-2,
            "damping": LevenbergMarquardtRule(lambda_=0.5, interval=2),
            "gamma": GammaSearch(interval=4),
            "intervals": Intervals(0.5, 0.7, 2),
        }
        | settings,
    )


def accumulating(optimizer: KFAC, loss: nn.Module, x: Tensor, y: Tensor, sizes: Sequence[int]):
    """A closure of the user's own over parts of these sizes."""
    mean = getattr(loss, "reduction", "mean") == "mean"

    def closure() -> float:
        optimizer.zero_grad()
        total = 0.0
        for rows, targets in zip(x.split(sizes), y.split(sizes), strict=True):
            part = loss(optimizer.model(rows), targets)
            if mean:
                part = part * len(rows) / len(x)
            part.backward()
            total = total + part.detach()
        return total

    return closure


def assert_same_run(a: KFAC, b: KFAC) -> None:
    """Parameters, numbers and statistics after the same steps."""
    assert_close(dense.theta(a.model), dense.theta(b.model), **SAME)
    for name in ("loss", *NUMBERS):
        close(getattr(a.report, name), getattr(b.report, name), name, tolerance=1e-9)
    assert a.report.examples == b.report.examples
    states = [optimizer.state_dict()["kfac"] for optimizer in (a, b)]
    assert torch.equal(states[0]["generator"], states[1]["generator"])
    ours, truth = (state["curvature"] for state in states)
    assert ours["examples"] == truth["examples"]
    assert len(tensors_in(ours)) >= 2 * len(a.network.units)
    for M, expected in zip(tensors_in(ours), tensors_in(truth), strict=True):
        assert_close(M, expected, **SAME)


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("inverse", INVERSES)
def test_the_step_does_not_depend_on_the_chunk_size(loss, inverse):
    loss = LOSSES[loss]
    chunks = (None, 1, 4, 22, 100)
    optimizers = [new_optimizer(loss, inverse=inverse) for _ in chunks]
    for step in range(4):
        x, y = data(loss, step)
        for optimizer, chunk in zip(optimizers, chunks, strict=True):
            optimizer.step(optimizer.closure(x, y, chunk=chunk))
    for optimizer in optimizers[1:]:
        assert_same_run(optimizer, optimizers[0])


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("sizes", [(8, 8, 7), (5, 1, 16, 1)], ids=str)
def test_a_closure_that_accumulates_gives_the_step_of_one_pass(loss, sizes):
    loss = LOSSES[loss]
    whole, parts = new_optimizer(loss), new_optimizer(loss)
    for step in range(4):
        x, y = data(loss, step)
        whole.step(whole.closure(x, y))
        parts.step(accumulating(parts, loss, x, y, sizes))
        assert parts.report.events == ()
        assert parts.report.examples == M
    assert_same_run(parts, whole)


SETTINGS = {
    "exact": ([4, 6, 5, 3], M, {"fisher": "exact"}),
    "empirical": ([4, 6, 5, 3], M, {"fisher": "empirical"}),
    "three samples": ([4, 6, 5, 3], M, {"fisher": SampledFisher(samples=3, seed=4)}),
    # Few enough for the middle layer to take the low-rank route.
    "low rank": ([4, 30, 30, 3], 8, {"inverse": BlockDiagonalInverse(low_rank=True)}),
}


@pytest.mark.parametrize("settings", SETTINGS)
def test_nor_with_other_settings(settings):
    widths, examples, given = SETTINGS[settings]
    loss = nn.MSELoss() if settings == "low rank" else nn.CrossEntropyLoss()
    whole, parts = (new_optimizer(loss, mlp(widths, seed=3), **given) for _ in range(2))
    for step in range(5):
        x, y = (rows[:examples] for rows in data(loss, step))
        whole.step(whole.closure(x, y))
        parts.step(parts.closure(x, y, chunk=3))
    assert_same_run(parts, whole)


class Gauge(nn.Module):
    """Passes its input on and remembers the largest number of rows that it saw.

    Apart for passes that build a graph, and so keep every layer's activations, and for those that
    do not, such as forward mode, which makes one pass for each direction.
    """

    def __init__(self) -> None:
        super().__init__()
        self.rows = {True: 0, False: 0}

    def forward(self, x: Tensor) -> Tensor:
        with_graph = torch.is_grad_enabled()
        self.rows[with_graph] = max(self.rows[with_graph], len(x))
        return x


@pytest.mark.parametrize("inverse", INVERSES)
def test_no_pass_is_over_more_rows_than_a_chunk(inverse):
    loss, gauge = nn.MSELoss(), Gauge()
    optimizer = new_optimizer(
        loss,
        nn.Sequential(gauge, *mlp([4, 6, 5, 3], seed=3)),
        inverse=inverse,
        intervals=Intervals(1.0, 1.0, 2),
        gamma=GammaSearch(interval=2),
    )
    for step in range(4):
        optimizer.step(optimizer.closure(*data(loss, step), chunk=6))
    assert gauge.rows == {True: 6, False: 6}


class TwoInputs(nn.Module):
    """W₂ tanh(W₁x + s), s an input as well."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = mlp([4, 5, 3], seed=3)[::2]

    def forward(self, x: Tensor, shift: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x) + shift))


def test_a_model_of_several_inputs():
    loss = nn.MSELoss()
    whole = new_optimizer(loss, TwoInputs())
    parts = new_optimizer(loss, copy.deepcopy(whole.model))
    x, y = data(loss)
    shift = normal(M, 5, seed=8)
    for _ in range(4):
        whole.step(whole.closure((x, shift), y))
        parts.step(parts.closure((x, shift), y, chunk=5))
        close(parts.report.rho, whole.report.rho, "rho", 1e-9)
    for p, q in zip(parts.model.parameters(), whole.model.parameters(), strict=True):
        assert_close(p, q, **SAME)
