"""Gradients that a loop changes between backward() and step(): clipped, scaled, or not zeroed."""

import warnings
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from kronfac import (
    KFAC,
    FixedDamping,
    FixedGamma,
    Intervals,
    LevenbergMarquardtRule,
    QuadraticModel,
)
from kronfac.step.state import CheckState
from tests.loop.loops import PROBLEMS, same_parameters, step_without_closure

PROBLEM = PROBLEMS["perceptron"]


def trained(
    change: Callable[[nn.Module], object], closure: bool, count: int = 5, factor: float = 1.0
) -> nn.Module:
    """A model after a few steps with changed gradients."""
    model = PROBLEM.model().double()
    optimizer = KFAC(model, PROBLEM.loss_fn)
    for x, y in PROBLEM.batches(count):

        def passes(x: Tensor = x, y: Tensor = y) -> Tensor:
            optimizer.zero_grad()
            loss = factor * PROBLEM.loss(model, x.double(), y)
            loss.backward()
            change(model)
            return loss

        if closure:
            optimizer.step(passes)
        else:
            passes()
            optimizer.step()
    return model


@pytest.mark.parametrize("closure", [True, False], ids=["closure", "loop"])
def test_a_clipped_gradient_is_no_scale_to_warn_of(closure: bool) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "KFAC rejected")
        trained(lambda model: nn.utils.clip_grad_norm_(model.parameters(), 0.05), closure)


def test_the_clipped_gradient_is_what_is_preconditioned() -> None:
    """With λ and γ fixed the step is the clipped share of the one that is not clipped."""
    steps = []
    ((x, y),) = PROBLEM.batches(1)
    for most in (1e9, 0.01):
        model = PROBLEM.model().double()
        optimizer = KFAC(
            model,
            PROBLEM.loss_fn,
            damping=FixedDamping(0.1, reject=None),
            gamma=FixedGamma(0.3),
            step_rule=QuadraticModel(momentum=False, bounded=False, memory=None),
        )
        # Two comparisons that differ have told that gradients are clipped.
        optimizer._state = replace(optimizer._state, gradients=CheckState(scales=(0.3, 0.7)))
        optimizer.zero_grad()
        PROBLEM.loss(model, x.double(), y).backward()
        before = [p.detach().clone() for p in model.parameters()]
        size = float(nn.utils.clip_grad_norm_(model.parameters(), most))
        optimizer.step()
        moved = zip(model.parameters(), before, strict=True)
        steps.append([(p.detach() - old) / min(1.0, most / (size + 1e-6)) for p, old in moved])
    for a, b in zip(*steps, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


def test_a_constant_factor_belongs_to_the_loss() -> None:
    def halve(model: nn.Module) -> None:
        for p in model.parameters():
            assert p.grad is not None
            p.grad.mul_(0.5)

    with pytest.warns(UserWarning, match=r"The loop's gradient is 0\.5 times .* in every step"):
        halved = trained(halve, closure=False)
    expected = trained(lambda model: None, closure=False, factor=0.5)
    assert same_parameters(halved, expected)


def test_gradients_that_are_never_zeroed_are_told_of_once() -> None:
    model = PROBLEM.model()
    optimizer = KFAC(model, PROBLEM.loss_fn)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for x, y in PROBLEM.batches(4):
            PROBLEM.loss(model, x, y).backward()
            optimizer.step()
    (warning,) = caught
    assert "has added to the gradients that the last KFAC.step() went by" in str(warning.message)


@pytest.mark.filterwarnings("ignore:.*gradient")
def test_a_rejected_step_of_gradients_that_are_never_zeroed_is_told_with_the_reason() -> None:
    model = PROBLEM.model()
    optimizer = KFAC(model, PROBLEM.loss_fn)
    ((x, y),) = PROBLEM.batches(1)

    advice = []
    for _ in range(10):
        PROBLEM.loss(model, x, y).backward()
        optimizer.step()
        assert optimizer.report is not None
        advice += [event.advice for event in optimizer.report.events if event.kind == "rejected"]
    assert advice
    for text in advice:
        assert "Gradients of earlier steps were added" in text
        assert "call optimizer.zero_grad() before each backward()" in text


@pytest.mark.parametrize("to_none", [True, False])
def test_zeroing_after_the_step_or_through_the_model_is_no_mistake(to_none: bool) -> None:
    model = PROBLEM.model()
    optimizer = KFAC(model, PROBLEM.loss_fn)
    for k, (x, y) in enumerate(PROBLEM.batches(4)):
        PROBLEM.loss(model, x, y).backward()
        optimizer.step()
        (model if k % 2 else optimizer).zero_grad(set_to_none=to_none)
        assert optimizer.report is not None
        assert optimizer.report.examples == len(x)


def test_a_penalty_that_is_added_to_the_loss_is_told_of() -> None:
    model = PROBLEM.model()
    optimizer = KFAC(model, PROBLEM.loss_fn)
    ((x, y),) = PROBLEM.batches(1)

    def penalised() -> Tensor:
        squares = sum(p.square().sum() for p in model.parameters())
        return PROBLEM.loss(model, x, y) + 0.1 * squares

    with pytest.warns(UserWarning, match="a penalty or another loss is in it"):
        step_without_closure(optimizer, penalised)


def test_a_gradient_of_the_inputs_alone_is_no_part_of_the_step() -> None:
    """As adversarial examples are made."""
    one, other = PROBLEM.model(), PROBLEM.model()
    optimizers = [KFAC(model, PROBLEM.loss_fn) for model in (one, other)]
    for x, y in PROBLEM.batches(3):
        step_without_closure(optimizers[0], lambda x=x, y=y: PROBLEM.loss(one, x, y))
        moved = x.clone().requires_grad_()
        torch.autograd.grad(PROBLEM.loss(other, moved, y), moved)
        step_without_closure(optimizers[1], lambda x=x, y=y: PROBLEM.loss(other, x, y))
    assert same_parameters(one, other)


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("closure", [True, False], ids=["closure", "loop"])
def test_rho_of_a_clipped_step_is_that_of_the_whole_gradient(
    closure: bool, weight_decay: float
) -> None:
    """A linear model with squared errors and hardly any λ: M is the objective itself, and ρ is 1."""
    torch.manual_seed(0)
    model, loss_fn = nn.Linear(4, 2).double(), nn.MSELoss()
    x = torch.randn(40, 4, dtype=torch.float64)
    y = 10 * x[:, :2] + torch.randn(40, 2, dtype=torch.float64)
    optimizer = KFAC(
        model,
        loss_fn,
        weight_decay=weight_decay,
        damping=LevenbergMarquardtRule(1e-12, interval=1),
        intervals=Intervals(fisher_fraction=1.0),
    )
    # Two comparisons that differ have told that gradients are clipped.
    optimizer._state = replace(optimizer._state, gradients=CheckState(scales=(0.3, 0.7)))
    ratios, clipped = [], []
    for _ in range(4):

        def passes() -> Tensor:
            optimizer.zero_grad()
            loss: Tensor = loss_fn(model(x), y)
            loss.backward()
            clipped.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.5)) > 0.5)
            return loss

        if closure:
            optimizer.step(passes)
        else:
            passes()
            optimizer.step()
        assert optimizer.report is not None
        assert optimizer.report.rho is not None
        ratios.append(optimizer.report.rho)
    assert all(clipped)
    assert ratios == pytest.approx([1.0] * 4, abs=1e-6)


def test_rho_on_the_next_mini_batch_is_no_larger_for_gradients_that_are_clipped() -> None:
    """A shorter step does more of what is predicted for it, but not many times more."""
    model = PROBLEM.model().double()
    optimizer = KFAC(model, PROBLEM.loss_fn)
    ratios = []
    (x, y), *_ = PROBLEM.batches(1)
    for _ in range(15):
        optimizer.zero_grad()
        PROBLEM.loss(model, x.double(), y).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.02)
        optimizer.step()
        assert optimizer.report is not None
        if optimizer.report.next_rho is not None:
            ratios.append(optimizer.report.next_rho)
    assert len(ratios) >= 10
    assert max(ratios[2:]) < 2


def test_a_clipped_gradient_predicts_nothing_for_a_step_that_moves_nothing():
    torch.manual_seed(0)
    model, loss_fn = (
        nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double(),
        nn.MSELoss(),
    )
    optimizer = KFAC(model, loss_fn)
    for k in range(14):
        for group in optimizer.param_groups:
            group["lr"] = 1.0 if k < 8 else 0.0
        x = torch.randn(32, 4).double()
        optimizer.zero_grad()
        loss_fn(model(x), x[:, :3].sin()).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.02)
        optimizer.step()
        if k >= 8:
            assert optimizer.report.predicted_change == 0
