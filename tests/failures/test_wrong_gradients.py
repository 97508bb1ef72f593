"""Closures whose gradient is not that of the loss K-FAC sees: one warning, with the ratio or the name."""

import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kronfac import KFAC
from tests.conftest import mlp, normal
from tests.failures.steps import closure_of, flat, train

X, Y = normal(32, 4), normal(32, 2, seed=1)
STEPS = 25


@contextmanager
def one_warning(match: str) -> Iterator[None]:
    """Exactly one UserWarning, which says this."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warnings.filterwarnings("ignore", "KFAC rejected")
        yield
    messages = [str(w.message) for w in caught if issubclass(w.category, UserWarning)]
    assert len(messages) == 1, messages
    assert re.search(match, messages[0]), messages


def new_run(model: nn.Module | None = None) -> tuple[KFAC, nn.Module]:
    loss = nn.MSELoss()
    return KFAC(mlp([4, 6, 6, 2]) if model is None else model, loss), loss


def test_gradients_before_a_closure_do_not_count():
    """A closure that does not drop them takes the steps of one that does, and no warning is needed."""
    ends = []
    for zeroes in (True, False):
        optimizer, loss = new_run()

        def closure(optimizer=optimizer, loss=loss, zeroes=zeroes) -> Tensor:
            if zeroes:
                optimizer.zero_grad()
            value = loss(optimizer.model(X), Y)
            value.backward()
            return value

        with warnings.catch_warnings():
            warnings.simplefilter("error")
            warnings.filterwarnings("ignore", "KFAC rejected")
            train(optimizer, closure, STEPS)
        ends.append(flat(optimizer.model))
    assert torch.equal(*ends)


def test_gradients_before_a_closure_that_fails_are_there_again():
    optimizer, _ = new_run()
    before = [torch.ones_like(p) for p in optimizer.model.parameters()]
    for p, grad in zip(optimizer.model.parameters(), before, strict=True):
        p.grad = grad

    def closure() -> Tensor:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        optimizer.step(closure)
    assert all(p.grad is g for p, g in zip(optimizer.model.parameters(), before, strict=True))


@pytest.mark.parametrize("scale", [10.0, 0.125])
def test_a_gradient_of_another_scale(scale):
    optimizer, loss = new_run()

    def closure() -> Tensor:
        optimizer.zero_grad()
        value = loss(optimizer.model(X), Y)
        (scale * value).backward()
        return value

    with one_warning(rf"\b{scale:g}\b"):
        train(optimizer, closure, STEPS)


def test_the_loss_of_the_last_micro_batch():
    optimizer, loss = new_run()

    def closure() -> Tensor:
        optimizer.zero_grad()
        for rows in (slice(0, 16), slice(16, 32)):
            value = loss(optimizer.model(X[rows]), Y[rows])
            (value / 2).backward()
        return value

    with one_warning("return|micro-batch"):
        train(optimizer, closure, STEPS)


def test_a_layer_that_was_added_later():
    optimizer, loss = new_run()
    optimizer.model.append(nn.Linear(2, 2, dtype=torch.float64))
    with one_warning(r"5\.weight"):
        train(optimizer, closure_of(optimizer, lambda model: loss(model(X), Y)), STEPS)


@pytest.mark.parametrize("own", [False, True])
def test_a_layer_that_was_unfrozen_later(own):
    model = mlp([4, 6, 6, 2])
    model[2].requires_grad_(False)
    optimizer, loss = new_run(model)
    model[2].requires_grad_(True)
    users = closure_of(optimizer, lambda model: loss(model(X), Y))
    with one_warning(r"2\.weight"):
        train(optimizer, optimizer.closure(X, Y) if own else users, STEPS)


def penalty(model: nn.Module) -> Tensor:
    return 0.3 * model[0].weight.square().sum()


def second_output(model: nn.Module) -> Tensor:
    return 0.3 * model[:3](X).square().sum()


@pytest.mark.parametrize("term", [penalty, second_output])
def test_a_term_of_the_loss_that_is_not_seen(term):
    optimizer, loss = new_run()
    objective = closure_of(optimizer, lambda model: loss(model(X), Y) + term(model))
    with one_warning(r"0\.weight"):
        train(optimizer, objective, STEPS)


# ----------------------------------------------------------------------------------- nothing is wrong


def with_module(model: nn.Module, loss: nn.Module) -> Tensor:
    return loss(model(X), Y)


def with_function(model: nn.Module, loss: nn.Module) -> Tensor:
    return F.mse_loss(model(X), Y)


@pytest.mark.parametrize("objective", [with_module, with_function])
def test_no_alarm_if_the_values_agree(objective: Callable[[nn.Module, nn.Module], Tensor]):
    optimizer, loss = new_run()
    closure = closure_of(optimizer, lambda model: objective(model, loss))
    kinds: set[str] = set()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "KFAC rejected")
        for _ in range(STEPS):
            optimizer.step(closure)
            kinds.update(event.kind for event in optimizer.report.events)
    assert not kinds


def test_a_loss_by_hand_is_named_once_although_the_values_agree():
    """Nobody sees its targets: ρ calls the closure again."""
    optimizer, _ = new_run()
    closure = closure_of(optimizer, lambda model: (model(X) - Y).square().mean())
    kinds: set[str] = set()
    with one_warning("has not seen a loss in the closure"):
        for _ in range(STEPS):
            optimizer.step(closure)
            kinds.update(event.kind for event in optimizer.report.events)
    assert kinds == {"loss_not_seen"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_no_warning_in_an_ordinary_run(dtype):
    loss = nn.MSELoss()
    optimizer = KFAC(mlp([4, 6, 6, 2], dtype=dtype), loss, weight_decay=1e-3)
    x, y = X.to(dtype), Y.to(dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "KFAC rejected")
        train(optimizer, closure_of(optimizer, lambda model: loss(model(x), y)), STEPS)
        train(optimizer, optimizer.closure(x, y, chunk=7), STEPS)


# ---------------------------------------------------------------- gradients that are zeroed in place


def in_place(optimizer: KFAC, objective: Callable[[nn.Module], Tensor]) -> Callable[[], Tensor]:
    def closure() -> Tensor:
        optimizer.zero_grad(set_to_none=False)
        value = objective(optimizer.model)
        value.backward()
        return value

    return closure


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("objective", [with_module, with_function])
def test_no_alarm_if_gradients_are_zeroed_in_place(objective, before):
    optimizer, loss = new_run()
    closure = in_place(optimizer, lambda model: objective(model, loss))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "KFAC rejected")
        if before:
            closure()
        train(optimizer, closure, STEPS)


def test_zeroed_in_place_the_steps_are_those_of_fresh_gradients():
    ends = []
    for closure_for in (in_place, closure_of):
        optimizer, loss = new_run()
        train(optimizer, closure_for(optimizer, lambda model, f=loss: f(model(X), Y)), STEPS)
        ends.append(flat(optimizer.model))
    assert torch.equal(*ends)


@pytest.mark.parametrize("term", [penalty, second_output])
def test_zeroed_in_place_a_term_that_is_not_seen_is_named_once(term):
    optimizer, loss = new_run()
    closure = in_place(optimizer, lambda model: loss(model(X), Y) + term(model))
    with one_warning(r"0\.weight"):
        train(optimizer, closure, STEPS)


@pytest.mark.parametrize("scale", [10.0, 0.125])
def test_zeroed_in_place_a_gradient_of_another_scale_is_told_once(scale):
    optimizer, loss = new_run()

    def closure() -> Tensor:
        optimizer.zero_grad(set_to_none=False)
        value = loss(optimizer.model(X), Y)
        (scale * value).backward()
        return value

    with one_warning(rf"\b{scale:g}\b"):
        train(optimizer, closure, STEPS)


# ------------------------------------------------------------------------------------ parameter hooks


def test_hooks_of_some_parameters_leave_the_others_to_be_compared():
    optimizer, loss = new_run()
    optimizer.model[4].weight.register_hook(lambda grad: 0.5 * grad)

    def closure() -> Tensor:
        optimizer.zero_grad()
        value = loss(optimizer.model(X), Y)
        (10 * value).backward()
        return value

    with one_warning(r"\b10\b"):
        train(optimizer, closure, STEPS)


def test_hooks_of_some_parameters_leave_others_to_be_named():
    optimizer, loss = new_run()

    def halve(parameter: Tensor) -> None:
        parameter.grad *= 0.5

    optimizer.model[4].weight.register_post_accumulate_grad_hook(halve)
    closure = closure_of(optimizer, lambda model: loss(model(X), Y) + penalty(model))
    with one_warning(r"0\.weight"):
        train(optimizer, closure, STEPS)


@pytest.mark.parametrize("layers", [(4,), (0, 2, 4)])
def test_hooks_are_no_alarm(layers):
    optimizer, loss = new_run()
    for layer in layers:
        optimizer.model[layer].weight.register_hook(lambda grad: grad.clamp(-0.01, 0.01))
    closure = closure_of(optimizer, lambda model: loss(model(X), Y))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "KFAC rejected")
        train(optimizer, closure, STEPS)
