"""Nothing is left on a model or in memory: of passes that no step goes by, and after `close()`."""

import copy
import gc
import weakref

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from kronfac import KFAC
from tests.loop.loops import PROBLEMS, step_without_closure

PROBLEM = PROBLEMS["perceptron"]


def made() -> tuple[nn.Module, nn.Module, KFAC, Tensor, Tensor]:
    model, loss_fn = PROBLEM.model(), nn.CrossEntropyLoss()
    ((x, y),) = PROBLEM.batches(1)
    return model, loss_fn, KFAC(model, loss_fn), x, y


def hooks(*modules: nn.Module) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in modules)


def alive(reference: weakref.ref[Tensor]) -> bool:
    gc.collect()
    return reference() is not None


def test_a_forward_pass_without_a_backward_pass_leaves_nothing() -> None:
    model, loss_fn, optimizer, x, y = made()
    step_without_closure(optimizer, lambda: loss_fn(model(x), y))
    for context in (torch.no_grad, torch.inference_mode, torch.enable_grad):
        inputs = x.clone()
        seen = weakref.ref(inputs)
        with context():
            loss = loss_fn(model(inputs), y)
        del inputs, loss
        assert not alive(seen)
    assert not optimizer._recorder.since.losses


def test_a_step_leaves_nothing() -> None:
    model, loss_fn, optimizer, x, y = made()
    seen = []

    def loss() -> Tensor:
        inputs, targets = x.clone(), y.clone()
        seen.extend((weakref.ref(inputs), weakref.ref(targets)))
        value: Tensor = loss_fn(model(inputs), targets)
        return value

    step_without_closure(optimizer, loss)
    assert len(seen) == 2
    assert not any(map(alive, seen))


def test_dropped_gradients_take_their_record_with_them() -> None:
    model, loss_fn, optimizer, x, y = made()
    inputs = x.clone()
    seen = weakref.ref(inputs)
    loss_fn(model(inputs), y).backward()
    del inputs
    assert alive(seen)
    optimizer.zero_grad()
    assert not alive(seen)
    inputs = x.clone()
    seen = weakref.ref(inputs)
    loss_fn(model(inputs), y).backward()
    del inputs
    model.zero_grad()  # which K-FAC is not told of, but the next backward pass shows it
    loss_fn(model(x), y).backward()
    assert not alive(seen)
    optimizer.step()
    assert optimizer.report is not None
    assert optimizer.report.examples == len(x)


def test_close_removes_every_hook() -> None:
    model, loss_fn, optimizer, x, y = made()
    assert hooks(model, loss_fn) == 4
    loss_fn(model(x), y).backward()
    optimizer.close()
    assert hooks(model, loss_fn) == 0
    assert not optimizer._recorder.since.losses
    optimizer.close()  # twice is no mistake
    optimizer.step(optimizer.closure(x, y))
    assert hooks(*model.modules(), loss_fn) == 0


def test_an_optimizer_that_is_gone_has_removed_its_hooks() -> None:
    model, loss_fn, optimizer, x, y = made()
    step_without_closure(optimizer, lambda: loss_fn(model(x), y))
    gone = weakref.ref(optimizer)
    del optimizer
    gc.collect()
    assert gone() is None
    assert hooks(*model.modules(), loss_fn) == 0


def test_copies_of_the_model_have_no_hooks_that_do_anything() -> None:
    model, loss_fn, optimizer, x, y = made()
    for hook in model._forward_hooks.values():
        assert copy.copy(hook)._method is None  # as a pickled one would be
    for other in (copy.deepcopy(model), AveragedModel(model).module):
        loss_fn(other(x), y).backward()
        assert hooks(other) == 0
    assert not optimizer._recorder.since.losses
    step_without_closure(optimizer, lambda: loss_fn(model(x), y))


def test_hooks_may_be_removed_while_the_model_is_called():
    """As a garbage collection does, of an optimizer that is no longer used."""
    model, loss = nn.Linear(3, 2), nn.MSELoss()
    optimizer = KFAC(model, loss)
    model.register_forward_pre_hook(lambda module, args: optimizer.close(), prepend=True)
    loss(model(torch.randn(4, 3)), torch.randn(4, 2)).backward()
