"""Steps inside `torch.autocast`: the closure in half precision, K-FAC in the parameters' own."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from kronfac import KFAC, LevenbergMarquardtRule
from kronfac.curvature import ApproximateInverse
from kronfac.extend import BlockDiagonalInverse, SampledFisher
from kronfac.model.side_effects import mixed
from kronfac.storage import tensors_in
from tests.conftest import mlp, normal


def half() -> torch.autocast:
    return torch.autocast("cpu", dtype=torch.bfloat16)


def problem() -> tuple[nn.Sequential, Tensor, Tensor]:
    x = normal(64, 5, dtype=torch.float32)
    y = torch.stack([x[:, 0] * x[:, 1], x[:, 2].sin()], dim=1)
    return mlp([5, 16, 8, 2], dtype=torch.float32), x, y


def plain(optimizer: KFAC, x: Tensor, y: Tensor, *, upcast: bool) -> Callable[[], Tensor]:
    """What people write."""

    def closure() -> Tensor:
        optimizer.zero_grad()
        outputs = optimizer.model(x)
        loss: Tensor = optimizer.objective.module(outputs.float() if upcast else outputs, y)
        loss.backward()
        return loss.detach()

    return closure


def around(optimizer: KFAC, x: Tensor, y: Tensor) -> None:
    with half():
        optimizer.step(optimizer.closure(x, y))


def inside(optimizer: KFAC, x: Tensor, y: Tensor, *, upcast: bool = False) -> None:
    closure = plain(optimizer, x, y, upcast=upcast)

    def mixed() -> Tensor:
        with half():
            return closure()

    optimizer.step(mixed)


WAYS: dict[str, Callable[[KFAC, Tensor, Tensor], None]] = {
    "around the step": around,
    "inside the closure": inside,
    "the loss in full": partial(inside, upcast=True),
}


def full_loss(model: nn.Module, x: Tensor, y: Tensor) -> float:
    with torch.no_grad():
        return float(nn.functional.mse_loss(model(x), y))


INVERSES: dict[str, str | ApproximateInverse] = {
    "block-diagonal": "block_diagonal",
    "block-tridiagonal": "block_tridiagonal",
    "low rank": BlockDiagonalInverse(low_rank=True),
}


def flat(model: nn.Module) -> Tensor:
    return nn.utils.parameters_to_vector(model.parameters()).detach().clone()


@pytest.mark.parametrize("chunk", [None, 24])
@pytest.mark.parametrize("inverse", INVERSES)
def test_training_in_half_precision(inverse: str, chunk: int | None) -> None:
    model, x, y = problem()
    optimizer = KFAC(model, nn.MSELoss(), inverse=INVERSES[inverse], fisher=SampledFisher(seed=0))
    losses, ratios = [], []
    with half():
        for _ in range(40):
            losses.append(float(optimizer.step(optimizer.closure(x, y, chunk=chunk))))
            assert optimizer.report is not None
            ratios.append(optimizer.report.next_rho)
    assert losses[-1] < 0.1 * losses[0]
    # The same rows at other parameters have another loss, also for the closure.
    judged = [rho for rho in ratios if rho is not None]
    assert any(0.5 < rho < 1.5 for rho in judged), judged
    found = {t.dtype for t in tensors_in(optimizer.state_dict())}
    assert found == {torch.float32, torch.uint8}, "K-FAC's own state is in full precision"
    assert {p.grad.dtype for p in model.parameters() if p.grad is not None} == {torch.float32}


def run(ways: Sequence[Callable[[KFAC, Tensor, Tensor], None]]) -> Tensor:
    model, x, y = problem()
    optimizer = KFAC(model, nn.MSELoss(), fisher=SampledFisher(seed=0))
    for way in ways:
        way(optimizer, x, y)
    return flat(model)


def in_full(optimizer: KFAC, x: Tensor, y: Tensor) -> None:
    optimizer.step(optimizer.closure(x, y))


def switched_off(optimizer: KFAC, x: Tensor, y: Tensor) -> None:
    with torch.autocast("cpu", enabled=False):
        in_full(optimizer, x, y)


def test_around_the_step_or_inside_the_closure_is_the_same() -> None:
    expected = run([around] * 8)
    for way in WAYS.values():
        assert torch.equal(run([way] * 8), expected)
    assert not torch.equal(run([in_full] * 8), expected)
    assert torch.equal(run([switched_off] * 8), run([in_full] * 8))


@pytest.mark.parametrize("way", WAYS)
def test_changes_of_the_loss_are_measured_in_full_precision(way: str) -> None:
    model, x, y = problem()
    optimizer = KFAC(model, nn.MSELoss(), damping=LevenbergMarquardtRule(interval=1))
    for _ in range(20):
        before = full_loss(model, x, y)
        WAYS[way](optimizer, x, y)
        report = optimizer.report
        assert report is not None
        assert report.rho is not None
        assert report.predicted_change is not None
        change = full_loss(model, x, y) - before
        assert report.rho * report.predicted_change == pytest.approx(change, rel=1e-2, abs=1e-6)
        assert report.loss != before, "it is the closure's"
        assert report.loss == pytest.approx(before, rel=0.05, abs=1e-3)
        assert not report.events


@pytest.mark.parametrize("way", WAYS)
def test_what_half_precision_makes_of_the_loss_is_noise_and_no_fault_of_the_steps(way: str) -> None:
    """With the same rows in every step: where the gradient is rounding error, λ does not answer for it."""
    model, x, y = problem()
    optimizer = KFAC(model, nn.MSELoss(), fisher=SampledFisher(seed=0))
    rejected = 0
    for _ in range(200):
        WAYS[way](optimizer, x, y)
        assert optimizer.report is not None
        rejected += sum(event.kind == "rejected" for event in optimizer.report.events)
    assert full_loss(model, x, y) < 5e-4
    assert optimizer.report is not None
    assert optimizer.report.lambda_ < 1
    # Noise has 2.4 % of good steps rejected at the most (tests/control/test_acceptance.py).
    assert rejected <= 0.024 * 200


@pytest.mark.parametrize("around", [True, False])
@pytest.mark.filterwarnings("ignore:KFAC.step.. has not seen a loss in the closure")
def test_a_loss_that_is_not_seen_is_asked_for_where_the_parameters_are(around: bool) -> None:
    """Autocast's cache of weights lasts as long as the outermost context."""
    model, x, y = problem()
    optimizer = KFAC(model, nn.MSELoss(), damping=LevenbergMarquardtRule(interval=1))
    outer, inner = (half(), nullcontext()) if around else (nullcontext(), half())
    losses = []

    def closure() -> Tensor:
        optimizer.zero_grad()
        with inner:
            loss = (model(x) - y).square().mean()
        loss.backward()
        losses.append(float(loss.detach()))
        return loss.detach()

    with outer:
        optimizer.step(closure)
    assert len(losses) == 2, "one more for ρ"
    assert losses[-1] < 0.9 * losses[0]


@pytest.mark.parametrize("loss", [nn.MSELoss, nn.BCEWithLogitsLoss, nn.CrossEntropyLoss])
def test_inputs_and_targets_in_half_precision(loss: type[nn.Module]) -> None:
    model, x, y = problem()
    y = y.softmax(dim=1)
    optimizer = KFAC(model, loss(), fisher=SampledFisher(seed=0))
    losses = []
    with half():
        for _ in range(10):
            losses.append(float(optimizer.step(optimizer.closure(x.bfloat16(), y.bfloat16()))))
    assert losses[-1] < losses[0]


# Autocast keeps weights in half precision until its outermost context ends.


def test_evaluations_between_steps_see_the_parameters_that_there_are() -> None:
    """Those of the last step, or after one that failed those before it; closures do so too."""
    model, x, y = problem()
    optimizer = KFAC(model, nn.MSELoss())
    plain_closure = plain(optimizer, x, y, upcast=False)

    def failing() -> Tensor:
        with torch.no_grad():
            model[0].weight.add_(1.0)
        model(x)
        raise ZeroDivisionError

    def check() -> None:
        """What there is in the cache is what the parameters are."""
        cached = model(x).detach()
        torch.clear_autocast_cache()
        assert torch.equal(cached, model(x).detach())

    with half():
        with torch.no_grad():
            model(x)  # leaves weights without a graph in the cache
        for closure in (optimizer.closure(x, y), plain_closure):
            before, expected = model(x).detach(), full_loss(model, x, y)
            returned = optimizer.step(closure)
            assert float(returned) == pytest.approx(expected, rel=0.02)
            assert all(p.grad is not None for p in model.parameters())
            assert not torch.equal(before, model(x).detach())
            check()
        before = model(x).detach()
        with pytest.raises(ZeroDivisionError):
            optimizer.step(failing)
        assert torch.equal(model(x).detach(), before)
        check()


def test_the_callers_setting_is_there_again() -> None:
    model, x, y = problem()
    optimizer = KFAC(model, nn.MSELoss())
    with half():
        optimizer.step(optimizer.closure(x, y))
        assert torch.is_autocast_enabled("cpu")
        assert model(x).dtype == torch.bfloat16
        with pytest.raises(ZeroDivisionError):
            optimizer.step(lambda: 1 / 0)
        assert torch.is_autocast_enabled("cpu")
    assert not torch.is_autocast_enabled("cpu")


def test_devices_that_know_no_autocast() -> None:
    assert not mixed(torch.device("meta"))
    with half():
        assert mixed(torch.device("cpu"))
        assert not mixed(torch.device("cuda"))
