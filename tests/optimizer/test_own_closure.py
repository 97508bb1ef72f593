"""`KFAC.closure`: what a step with it leaves behind is what torch would have left."""

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_full_backward_hook
from torch.testing import assert_close

from kronfac import KFAC, AdaptiveGamma, Bernoulli, Categorical, Gaussian, Intervals
from kronfac.errors import ClosureError
from kronfac.extend import BlockDiagonalInverse
from tests.conftest import AUTODIFF, mlp, normal, passes_either_way
from tests.optimizer.runs import Snapshot, closure_of, targets_for

passes = passes_either_way()

LOSSES = {
    "Gaussian": Gaussian(),
    "Bernoulli": Bernoulli(),
    "Categorical": Categorical(),
    "MSELoss": nn.MSELoss(),
    "MSELoss, sum": nn.MSELoss(reduction="sum"),
    "BCEWithLogitsLoss": nn.BCEWithLogitsLoss(),
    "CrossEntropyLoss, smoothed": nn.CrossEntropyLoss(label_smoothing=0.1),
    "CrossEntropyLoss, weighted": nn.CrossEntropyLoss(torch.tensor([0.2, 1, 4]).double()),
}


SETTINGS: list[dict[str, Any]] = [
    {},
    {"weight_decay": 0.1},
    {"inverse": BlockDiagonalInverse(low_rank=True)},
]


@pytest.mark.parametrize("chunk", [None, 4, 9])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("settings", SETTINGS, ids=repr)
@pytest.mark.parametrize("name", LOSSES)
def test_loss_and_gradients(
    name: str, settings: dict[str, Any], bias: bool, chunk: int | None
) -> None:
    """Of the loss alone: without the weight decay, and without what was in the gradients before."""
    loss, model, x = LOSSES[name], mlp([4, 6, 5, 3], bias=bias), normal(9, 4)
    y = targets_for(loss, model(x).detach())
    optimizer = KFAC(model, loss, **settings)
    for _ in range(2):
        expected = loss(model(x), y)
        grads = torch.autograd.grad(expected, list(model.parameters()))
        returned = optimizer.step(optimizer.closure(x, y, chunk=chunk))
        assert_close(returned, expected.detach(), **AUTODIFF)
        assert returned.dtype == torch.float64
        assert not returned.requires_grad
        assert optimizer.report.loss == float(returned)
        assert optimizer.report.examples == 9
        for p, grad in zip(model.parameters(), grads, strict=True):
            assert_close(p.grad, grad, **AUTODIFF)
            assert p.grad.shape == p.shape
            assert p.grad.stride() == grad.stride(), "who flattens gradients does it by view(-1)"
            p.grad = torch.full_like(p, 7.0)


@pytest.mark.parametrize("chunk", [None, 4])
def test_gradients_from_before_are_not_held_while_the_step_is_computed(chunk: int | None) -> None:
    before: list[weakref.ref[Tensor]] = []
    held: list[bool] = []

    class Watched(AdaptiveGamma):
        def candidates(self, state: Any, m: Any) -> tuple[float, ...]:
            held.append(any(grad() is not None for grad in before))
            return super().candidates(state, m)

    model, x, y = mlp([4, 6, 3]), normal(9, 4), normal(9, 3, seed=1)
    settings = {"gamma": Watched(), "intervals": Intervals(inverse_interval=1)}
    optimizer = KFAC(model, Gaussian(), **settings)
    optimizer.step(optimizer.closure(x, y, chunk=chunk))
    before += [weakref.ref(p.grad) for p in model.parameters() if p.grad is not None]
    held.clear()
    optimizer.step(optimizer.closure(x, y, chunk=chunk))
    assert len(before) == 4
    assert held
    assert not any(held)


def test_a_closure_of_another_model_is_refused() -> None:
    one, other = (KFAC(mlp([4, 6, 3], seed=seed), Gaussian()) for seed in (0, 1))
    before = Snapshot.of(other)
    with pytest.raises(ClosureError, match="never called the model"):
        other.step(one.closure(normal(9, 4), normal(9, 3, seed=1)))
    before.assert_untouched(other)


def test_in_the_closure_of_another_optimizer_of_the_model_the_loss_is_what_it_calls() -> None:
    models = [mlp([4, 6, 3]) for _ in range(2)]
    x, y = normal(9, 4), normal(9, 3, seed=1)
    one, other = KFAC(models[0], nn.MSELoss()), KFAC(models[1], Gaussian(variance=0.01))
    for _ in range(3):
        one.step(one.closure(x, y))
        other.step(KFAC(models[1], nn.MSELoss()).closure(x, y))
        assert other.report is not None
        assert not other.report.events
    for p, q in zip(*(model.parameters() for model in models), strict=True):
        assert_close(p, q, **AUTODIFF)


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
def test_what_waits_for_torchs_backward_pass_gets_it() -> None:
    model, x, y = mlp([4, 6, 3]), normal(9, 4), normal(9, 3, seed=1)
    optimizer = KFAC(model, Gaussian())
    for wants_grad in (x, y):
        wants_grad.requires_grad_()
        optimizer.step(optimizer.closure(x, y))
        assert wants_grad.grad is not None
        wants_grad.requires_grad_(False)

    def fill(parameter: Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad.fill_(2.0)

    handles = [
        model[0].weight.register_hook(lambda grad: 0 * grad),
        model[2].bias.register_post_accumulate_grad_hook(fill),
    ]
    optimizer.step(optimizer.closure(x, y))
    assert bool((model[0].weight.grad == 0).all())
    assert bool((model[2].bias.grad == 2).all())
    for handle in handles:
        handle.remove()
    seen: list[nn.Module] = []
    handle = register_module_full_backward_hook(lambda module, *_: seen.append(module))
    try:
        optimizer.step(optimizer.closure(x, y))
    finally:
        handle.remove()
    assert model[0] in seen


def test_hooks_of_the_model_and_the_loss_fire_in_a_step_and_stay() -> None:
    model, loss, x, y = mlp([4, 6, 3]), nn.MSELoss(), normal(9, 4), normal(9, 3, seed=1)
    shapes: list[torch.Size] = []
    values: list[float] = []
    model[0].register_forward_hook(lambda module, args, out: shapes.append(out.shape))
    handle = loss.register_forward_hook(
        lambda module, args, out: values.append(float(out.detach()))
    )
    optimizer = KFAC(model, loss)
    returned = optimizer.step(optimizer.closure(x, y))
    assert torch.Size((9, 6)) in shapes
    assert float(returned) in values
    assert len(model[0]._forward_hooks) == 1
    assert handle.id in loss._forward_hooks


def test_a_hook_that_changes_what_a_layer_returns_does_so_once() -> None:
    losses = []
    for own in (True, False):
        model, x, y = mlp([3, 5, 1]), normal(64, 3), normal(64, 1, seed=1)
        model[0].register_forward_hook(lambda module, args, outputs: 2 * outputs)
        optimizer = KFAC(model, nn.MSELoss(), fisher="exact")
        closure = closure_of(optimizer, optimizer.objective.module, x, y)
        for _ in range(5):
            loss = optimizer.step(optimizer.closure(x, y) if own else closure)
        losses.append(loss.detach())
    assert_close(losses[0], losses[1], **AUTODIFF)


def test_a_bias_that_was_registered_before_its_weight() -> None:
    ends = []
    for swapped in (False, True):
        model, x, y = mlp([3, 4, 2]), normal(16, 3), normal(16, 2, seed=1)
        layers = model[0], model[2]
        if swapped:
            for layer in layers:
                # As removing weight normalisation leaves it.
                layer.weight = layer._parameters.pop("weight")
                assert list(layer._parameters) == ["bias", "weight"]
        optimizer = KFAC(model, nn.MSELoss())
        for _ in range(3):
            optimizer.step(optimizer.closure(x, y))
        ends.append([p for layer in layers for p in (layer.weight, layer.bias)])
    assert all(map(torch.equal, *ends))
