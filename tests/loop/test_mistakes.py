"""Mistakes in a loop without a closure get a message that says what is missing."""

import copy

import pytest
import torch

from kronfac import KFAC
from kronfac.errors import LoopError
from tests.loop.loops import PROBLEMS, step_without_closure

PROBLEM = PROBLEMS["perceptron"]


def test_no_forward_pass() -> None:
    optimizer = KFAC(PROBLEM.model(), PROBLEM.loss_fn)
    with pytest.raises(LoopError, match="needs a forward and a backward pass since the last step"):
        optimizer.step()


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_a_forward_pass_without_gradients(context: type) -> None:
    model = PROBLEM.model()
    optimizer = KFAC(model, PROBLEM.loss_fn)
    with context():
        model(PROBLEM.inputs())
    with pytest.raises(LoopError, match="it was called 1 times without gradients"):
        optimizer.step()


def test_no_backward_pass() -> None:
    model = PROBLEM.model()
    optimizer = KFAC(model, PROBLEM.loss_fn)
    ((x, y),) = PROBLEM.batches(1)
    PROBLEM.loss(model, x, y)
    with pytest.raises(LoopError, match=r"Call loss\.backward\(\) before step\(\)"):
        optimizer.step()


@pytest.mark.parametrize("by_model", [True, False])
@pytest.mark.parametrize("to_none", [True, False])
def test_zeroing_between_the_backward_pass_and_the_step(to_none: bool, by_model: bool) -> None:
    model = PROBLEM.model()
    optimizer = KFAC(model, PROBLEM.loss_fn)
    for x, y in PROBLEM.batches(2):
        PROBLEM.loss(model, x, y).backward()
        (model if by_model else optimizer).zero_grad(set_to_none=to_none)
        with pytest.raises(
            LoopError, match=r"zero_grad\(\) is called between backward\(\) and step\(\)"
        ):
            optimizer.step()
    step_without_closure(optimizer, lambda: PROBLEM.loss(model, x, y))  # as the message says
    assert optimizer.report is not None
    assert optimizer.report.iteration == 1


def test_gradients_that_are_zero_by_themselves_are_no_mistake() -> None:
    model = PROBLEM.model()
    optimizer = KFAC(model, PROBLEM.loss_fn)
    ((x, y),) = PROBLEM.batches(1)
    step_without_closure(optimizer, lambda: 0 * PROBLEM.loss(model, x, y))
    assert optimizer.report is not None
    assert not optimizer.report.events


def test_a_second_step_by_the_same_gradients() -> None:
    model = PROBLEM.model()
    optimizer = KFAC(model, PROBLEM.loss_fn)
    ((x, y),) = PROBLEM.batches(1)
    step_without_closure(optimizer, lambda: PROBLEM.loss(model, x, y))
    before = [p.detach().clone() for p in model.parameters()]
    message = r"has not seen the call of the model.*since the last step.*step\(\) once after each"
    with pytest.raises(LoopError, match=message):
        optimizer.step()
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))


def test_another_model() -> None:
    model = PROBLEM.model()
    optimizer = KFAC(model, PROBLEM.loss_fn)
    other = copy.deepcopy(model)
    ((x, y),) = PROBLEM.batches(1)
    PROBLEM.loss(other, x, y).backward()
    with pytest.raises(LoopError, match=r"the model \(Sequential\) has not been called"):
        optimizer.step()


def test_inputs_that_were_changed_before_the_step() -> None:
    model = PROBLEM.model()
    optimizer = KFAC(model, PROBLEM.loss_fn)
    ((x, y),) = PROBLEM.batches(1)
    PROBLEM.loss(model, x, y).backward()
    x.zero_()
    with pytest.raises(LoopError, match="were changed in place"):
        optimizer.step()


def test_zero_gradients_that_nobody_computed_initialise_and_change_nothing() -> None:
    """As torch's distributed checkpoints make an optimizer fill its state."""
    model = PROBLEM.model()
    optimizer = KFAC(model, PROBLEM.loss_fn)
    before = [p.detach().clone() for p in model.parameters()]
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))


def test_an_exception_in_the_model_leaves_no_mode() -> None:
    model = PROBLEM.model()
    optimizer = KFAC(model, PROBLEM.loss_fn)
    ((x, y),) = PROBLEM.batches(1)
    with pytest.raises(RuntimeError):
        model(x[:, :3])
    assert not torch.overrides._get_current_function_mode_stack()
    step_without_closure(optimizer, lambda: PROBLEM.loss(model, x, y))
