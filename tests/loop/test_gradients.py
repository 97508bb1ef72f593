"""Gradients other than that of the recorded losses: clipped, scaled, not zeroed, or of an unseen loss."""

import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kronfac import (
    KFAC,
    FixedDamping,
    FixedGamma,
    Intervals,
    LevenbergMarquardtRule,
    QuadraticModel,
)
from kronfac.step.state import CheckState
from tests.conftest import mlp, normal
from tests.failures.steps import flat
from tests.loop.loops import PROBLEMS, same_parameters, step_without_closure

PROBLEM = PROBLEMS["perceptron"]
X, Y = normal(32, 4), normal(32, 2, seed=1)
STEPS = 25
LOSS = nn.MSELoss()
Objective = Callable[[nn.Module], Tensor]
either = pytest.mark.parametrize("closure", [True, False], ids=["closure", "loop"])


@contextmanager
def warns(*matches: str) -> Iterator[None]:
    """Exactly these warnings, but for rejected steps."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warnings.filterwarnings("ignore", "KFAC rejected")
        yield
    messages = [str(w.message) for w in caught]
    assert len(messages) == len(matches), messages
    for match, message in zip(matches, messages, strict=True):
        assert re.search(match, message), message


def new_run(model: nn.Module | None = None) -> KFAC:
    return KFAC(mlp([4, 6, 6, 2]) if model is None else model, LOSS)


def train(
    optimizer: KFAC,
    objective: Objective,
    scale: float = 1.0,
    to_none: bool = True,
    zeroes: bool = True,
    kinds: set[str] | None = None,
) -> Tensor:
    """The parameters after some steps with a closure."""

    def closure() -> Tensor:
        if zeroes:
            optimizer.zero_grad(set_to_none=to_none)
        value = objective(optimizer.model)
        (scale * value).backward()
        return value

    for _ in range(STEPS):
        optimizer.step(closure)
        assert optimizer.report is not None
        if kinds is not None:
            kinds.update(event.kind for event in optimizer.report.events)
    return flat(optimizer.model)


def seen(model: nn.Module) -> Tensor:
    return LOSS(model(X), Y)


def with_function(model: nn.Module) -> Tensor:
    return F.mse_loss(model(X), Y)


# --------------------------------------------------------------------------- other than that of the loss


@pytest.mark.parametrize("to_none", [True, False])
@pytest.mark.parametrize("scale", [10.0, 0.125])
def test_a_scale_that_the_returned_loss_has_not_is_named_once(scale, to_none):
    with warns(rf"\b{scale:g}\b"):
        train(new_run(), seen, scale, to_none)


def test_the_loss_of_the_last_micro_batch():
    def halves(model: nn.Module) -> Tensor:
        (LOSS(model(X[:16]), Y[:16]) / 2).backward()
        return LOSS(model(X[16:]), Y[16:])

    with warns("return|micro-batch"):
        train(new_run(), halves, scale=0.5)


def penalty(model: nn.Module) -> Tensor:
    return 0.3 * model[0].weight.square().sum()


def second_output(model: nn.Module) -> Tensor:
    return 0.3 * model[:3](X).square().sum()


@pytest.mark.parametrize("to_none", [True, False])
@pytest.mark.parametrize("term", [penalty, second_output])
def test_a_term_of_the_loss_that_is_not_seen_is_named_once(term, to_none):
    with warns(r"0\.weight.* a penalty or another loss is in it"):
        train(new_run(), lambda model: seen(model) + term(model), to_none=to_none)


def test_a_penalty_in_a_loop_is_named():
    optimizer = new_run()
    with warns(r"0\.weight.* a penalty or another loss is in it"):
        step_without_closure(optimizer, lambda: seen(optimizer.model) + penalty(optimizer.model))


def test_a_layer_that_was_added_later():
    optimizer = new_run()
    optimizer.model.append(nn.Linear(2, 2, dtype=torch.float64))
    with warns(r"5\.weight"):
        train(optimizer, seen)


@pytest.mark.parametrize("own", [False, True])
def test_a_layer_that_was_unfrozen_later(own):
    model = mlp([4, 6, 6, 2])
    model[2].requires_grad_(False)
    optimizer = new_run(model)
    model[2].requires_grad_(True)
    with warns(r"2\.weight"):
        if own:
            optimizer.step(optimizer.closure(X, Y))
        else:
            train(optimizer, seen)


def halve(gradient: Tensor) -> Tensor:
    return 0.5 * gradient


def halve_in_place(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad *= 0.5


def test_hooks_of_some_parameters_leave_the_others_to_be_compared():
    optimizer = new_run()
    optimizer.model[4].weight.register_hook(halve)
    with warns(r"\b10\b"):
        train(optimizer, seen, scale=10.0)
    optimizer = new_run()
    optimizer.model[4].weight.register_post_accumulate_grad_hook(halve_in_place)
    with warns(r"0\.weight"):
        train(optimizer, lambda model: seen(model) + penalty(model))


# ----------------------------------------------------------------------------------- nothing is wrong


@pytest.mark.parametrize("to_none", [True, False])
@pytest.mark.parametrize("objective", [seen, with_function])
def test_no_alarm_if_the_values_agree(objective, to_none):
    kinds: set[str] = set()
    with warns():
        end = train(new_run(), objective, to_none=to_none, kinds=kinds)
    assert not kinds
    assert torch.equal(end, train(new_run(), seen))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_no_warning_in_an_ordinary_run(dtype):
    optimizer = KFAC(mlp([4, 6, 6, 2], dtype=dtype), LOSS, weight_decay=1e-3)
    x, y = X.to(dtype), Y.to(dtype)
    with warns():
        train(optimizer, lambda model: LOSS(model(x), y))
        for _ in range(STEPS):
            optimizer.step(optimizer.closure(x, y, chunk=7))


@pytest.mark.parametrize("layers", [(4,), (0, 2, 4)])
def test_hooks_are_no_alarm(layers):
    optimizer = new_run()
    for layer in layers:
        optimizer.model[layer].weight.register_hook(lambda grad: grad.clamp(-0.01, 0.01))
    with warns():
        train(optimizer, seen)


def test_gradients_before_a_closure_do_not_count():
    """A closure that does not drop them takes the steps of one that does, and no warning is needed."""
    with warns():
        ends = [train(new_run(), seen, zeroes=zeroes) for zeroes in (True, False)]
    assert torch.equal(*ends)


def test_gradients_before_a_closure_that_fails_are_there_again():
    optimizer = new_run()
    before = [torch.ones_like(p) for p in optimizer.model.parameters()]
    for p, grad in zip(optimizer.model.parameters(), before, strict=True):
        p.grad = grad
    with pytest.raises(ZeroDivisionError):
        optimizer.step(lambda: 1 / 0)
    assert all(p.grad is g for p, g in zip(optimizer.model.parameters(), before, strict=True))


def test_a_gradient_of_the_inputs_alone_is_no_part_of_the_step():
    """As adversarial examples are made."""
    one, other = PROBLEM.model(), PROBLEM.model()
    optimizers = [KFAC(model, PROBLEM.loss_fn) for model in (one, other)]
    for x, y in PROBLEM.batches(3):
        step_without_closure(optimizers[0], partial(PROBLEM.loss, one, x, y))
        moved = x.clone().requires_grad_()
        torch.autograd.grad(PROBLEM.loss(other, moved, y), moved)
        step_without_closure(optimizers[1], partial(PROBLEM.loss, other, x, y))
    assert same_parameters(one, other)


# ------------------------------------------------------------------------ not zeroed in a loop


@pytest.mark.parametrize("to_none", [True, False])
def test_zeroing_after_the_step_or_through_the_model_is_no_mistake(to_none):
    model = PROBLEM.model()
    optimizer = KFAC(model, PROBLEM.loss_fn)
    for k, (x, y) in enumerate(PROBLEM.batches(4)):
        PROBLEM.loss(model, x, y).backward()
        optimizer.step()
        (model if k % 2 else optimizer).zero_grad(set_to_none=to_none)
        assert optimizer.report is not None
        assert optimizer.report.examples == len(x)


def test_gradients_that_are_never_zeroed_are_named_once_and_with_every_rejection():
    model = PROBLEM.model()
    optimizer = KFAC(model, PROBLEM.loss_fn)
    ((x, y),) = PROBLEM.batches(1)
    advice = []
    with warns("has added to the gradients that the last KFAC.step.. used"):
        for _ in range(10):
            PROBLEM.loss(model, x, y).backward()
            optimizer.step()
            assert optimizer.report is not None
            rejected = [e for e in optimizer.report.events if e.kind == "rejected"]
            advice += [event.advice for event in rejected]
    assert advice
    for text in advice:
        assert "Gradients of earlier steps were added" in text
        assert "call optimizer.zero_grad() before each backward()" in text


# ------------------------------------------------------------------------- clipped, or always scaled


def step_with(
    optimizer: KFAC, loss: Callable[[], Tensor], change: Callable[[], object], closure: bool
) -> None:
    """One step by gradients that are changed behind the backward pass."""

    def passes() -> Tensor:
        optimizer.zero_grad()
        value = loss()
        value.backward()
        change()
        return value

    if closure:
        optimizer.step(passes)
    else:
        passes()
        optimizer.step()


def changed_steps(
    change: Callable[[nn.Module], object], closure: bool, factor: float = 1.0
) -> nn.Module:
    """A model after a few steps with changed gradients."""
    model = PROBLEM.model().double()
    optimizer = KFAC(model, PROBLEM.loss_fn)
    for x, y in PROBLEM.batches(5):
        step_with(
            optimizer,
            lambda x=x, y=y: factor * PROBLEM.loss(model, x.double(), y),
            lambda: change(model),
            closure,
        )
    return model


def knows_of_clipping(optimizer: KFAC) -> KFAC:
    """An optimizer that has seen two comparisons with different factors."""
    optimizer._state = replace(optimizer._state, gradients=CheckState(scales=(0.3, 0.7)))
    return optimizer


@either
def test_a_clipped_gradient_is_no_scale_to_warn_of(closure):
    with warns():
        changed_steps(lambda model: nn.utils.clip_grad_norm_(model.parameters(), 0.05), closure)


@either
def test_a_constant_factor_belongs_to_the_loss(closure):
    def halve_all(model: nn.Module) -> None:
        for p in model.parameters():
            halve_in_place(p)

    name = "closure" if closure else "loop"
    returned = ["The closure returned a loss of"] if closure else []
    with warns(rf"The {name}'s gradient is 0\.5 times .* in every step", *returned):
        halved = changed_steps(halve_all, closure)
    expected = changed_steps(lambda model: None, closure=False, factor=0.5)
    assert closure or same_parameters(halved, expected)


def test_the_clipped_gradient_is_what_is_preconditioned():
    """With λ and γ fixed the step is the clipped share of the one that is not clipped."""
    steps = []
    ((x, y),) = PROBLEM.batches(1)
    for most in (1e9, 0.01):
        model = PROBLEM.model().double()
        optimizer = knows_of_clipping(
            KFAC(
                model,
                PROBLEM.loss_fn,
                damping=FixedDamping(0.1),
                gamma=FixedGamma(0.3),
                step_rule=QuadraticModel(momentum=False),
            )
        )
        before, sizes = flat(model), []

        def clip(model: nn.Module = model, most: float = most, sizes: list[float] = sizes) -> None:
            sizes.append(float(nn.utils.clip_grad_norm_(model.parameters(), most)))

        loss = partial(PROBLEM.loss, model, x.double(), y)
        step_with(optimizer, loss, clip, closure=False)
        steps.append((flat(model) - before) / min(1.0, most / (sizes[0] + 1e-6)))
    torch.testing.assert_close(*steps, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@either
def test_rho_of_a_clipped_step_is_that_of_the_whole_gradient(closure, weight_decay):
    """A linear model with squared errors and hardly any λ: M is the objective itself, and ρ is 1."""
    torch.manual_seed(0)
    model = nn.Linear(4, 2).double()
    x = torch.randn(40, 4, dtype=torch.float64)
    y = 10 * x[:, :2] + torch.randn(40, 2, dtype=torch.float64)
    optimizer = knows_of_clipping(
        KFAC(
            model,
            LOSS,
            weight_decay=weight_decay,
            damping=LevenbergMarquardtRule(1e-12, interval=1),
            intervals=Intervals(fisher_fraction=1.0),
        )
    )
    for _ in range(4):
        sizes = []

        def clip(sizes: list[float] = sizes) -> None:
            sizes.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.5)))

        step_with(optimizer, lambda: LOSS(model(x), y), clip, closure)
        assert min(sizes) > 0.5
        assert optimizer.report is not None
        assert optimizer.report.rho == pytest.approx(1.0, abs=1e-6)


def test_rho_on_the_next_mini_batch_is_no_larger_for_gradients_that_are_clipped():
    """A shorter step does more of what is predicted for it, but not many times more."""
    model = PROBLEM.model().double()
    optimizer = KFAC(model, PROBLEM.loss_fn)
    ratios = []
    (x, y), *_ = PROBLEM.batches(1)
    loss = partial(PROBLEM.loss, model, x.double(), y)
    for _ in range(15):
        step_with(
            optimizer, loss, lambda: nn.utils.clip_grad_norm_(model.parameters(), 0.02), False
        )
        assert optimizer.report is not None
        if optimizer.report.next_rho is not None:
            ratios.append(optimizer.report.next_rho)
    assert len(ratios) >= 10
    assert max(ratios[2:]) < 2


def test_a_clipped_gradient_predicts_nothing_for_a_step_that_moves_nothing():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    optimizer = KFAC(model, LOSS)
    for k in range(14):
        optimizer.param_groups[0]["lr"] = 1.0 if k < 8 else 0.0
        x = torch.randn(32, 4).double()
        step_with(
            optimizer,
            lambda x=x: LOSS(model(x), x[:, :3].sin()),
            lambda: nn.utils.clip_grad_norm_(model.parameters(), 0.02),
            closure=False,
        )
        if k >= 8:
            assert optimizer.report is not None
            assert optimizer.report.predicted_change == 0
