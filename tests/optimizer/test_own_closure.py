"""The pass of `KFAC.closure` by hand: what it leaves behind is what torch would have left."""

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_full_backward_hook
from torch.testing import assert_close

from kronfac import KFAC, Bernoulli, Categorical, Gaussian
from kronfac.errors import ClosureError
from kronfac.linearize.by_hand import PassByHand, pass_by_hand
from kronfac.step.take import Transition, compute_step
from tests.conftest import AUTODIFF, mlp, normal, random_targets
from tests.optimizer.runs import Snapshot, closure_of

LOSSES: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "Gaussian": (Gaussian, "gaussian"),
    "Bernoulli": (Bernoulli, "bernoulli"),
    "Categorical": (Categorical, "categorical"),
    "MSELoss": (nn.MSELoss, "gaussian"),
    "MSELoss, sum": (lambda: nn.MSELoss(reduction="sum"), "gaussian"),
    "BCEWithLogitsLoss": (nn.BCEWithLogitsLoss, "bernoulli"),
    "CrossEntropyLoss, smoothed": (
        lambda: nn.CrossEntropyLoss(label_smoothing=0.1),
        "categorical",
    ),
}


def by_hand(
    optimizer: KFAC, x: Tensor, y: Tensor, chunk: int | None = None, factors: bool = False
) -> PassByHand | None:
    """What the closure finds by hand, or that it is left to torch."""
    return pass_by_hand(optimizer.closure(x, y, chunk=chunk), optimizer.network, factors)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("name", LOSSES)
def test_loss_and_gradients(name: str, bias: bool) -> None:
    make, likelihood = LOSSES[name]
    model, x = mlp([4, 6, 5, 3], bias=bias), normal(9, 4)
    y = random_targets(model(x), likelihood)
    optimizer = KFAC(model, make())
    expected = optimizer.closure(x, y)()
    grads = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    passed = by_hand(optimizer, x, y)
    assert passed is not None
    assert_close(passed.loss, expected, **AUTODIFF)
    assert passed.batch.recorded_loss is not None
    assert_close(passed.batch.recorded_loss, expected, **AUTODIFF)
    assert [p.grad is not None for p in model.parameters()] == [True] * len(grads)
    for p, grad in zip(model.parameters(), grads, strict=True):
        assert_close(p.grad, grad, **AUTODIFF)
        assert p.grad.shape == p.shape
        assert p.grad.stride() == grad.stride(), "who flattens gradients does it by view(-1)"
    (part,) = passed.batch.passes
    (terms,) = part.terms
    assert passed.batch.examples == part.examples == 9
    assert terms.shape == torch.Size((9, 3))
    assert_close(terms.targets, y)


def test_the_gradient_in_factors() -> None:
    model, x, y = mlp([4, 6, 3]), normal(9, 4), normal(9, 3, seed=1)
    optimizer = KFAC(model, Gaussian())
    passed = by_hand(optimizer, x, y, factors=True)
    assert passed is not None
    assert passed.factors is not None
    hidden = model[0](x)
    hidden.retain_grad()
    outputs = model[1:](hidden)
    outputs.retain_grad()
    Gaussian()(outputs, y).backward(inputs=[hidden, outputs])
    ones = x.new_ones(9, 1)
    expected = [
        (hidden.grad, torch.cat([x, ones], dim=1)),
        (outputs.grad, torch.cat([hidden.detach().tanh(), ones], dim=1)),
    ]
    for factor, (g, a), unit in zip(passed.factors, expected, optimizer.network.units, strict=True):
        assert_close(factor.grads, g, **AUTODIFF)
        assert_close(factor.inputs, a, **AUTODIFF)
        V = unit.join([p.grad for p in unit.parameters if p.grad is not None])
        assert_close(factor.to_dense(), V, **AUTODIFF)
    assert by_hand(optimizer, x, y).factors is None, "if they are not wanted"


@pytest.mark.parametrize("chunk", [None, 4])
def test_gradients_from_before_are_not_held_while_the_step_is_computed(
    chunk: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x, y = mlp([4, 6, 3]), normal(9, 4), normal(9, 3, seed=1)
    optimizer = KFAC(model, Gaussian())
    optimizer.step(optimizer.closure(x, y, chunk=chunk))
    before = [weakref.ref(p.grad) for p in model.parameters() if p.grad is not None]
    held: list[bool] = []

    def watched(*args: Any, **settings: Any) -> Transition:
        held.append(any(grad() is not None for grad in before))
        return compute_step(*args, **settings)

    monkeypatch.setattr("kronfac.step.take.compute_step", watched)
    optimizer.step(optimizer.closure(x, y, chunk=chunk))
    assert len(before) == 4
    assert held == [False]


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


def test_what_is_left_to_torch() -> None:
    x, y = normal(9, 4), normal(9, 3, seed=1)
    optimizer = KFAC(mlp([4, 6, 3]), Gaussian())
    assert by_hand(optimizer, x, y, chunk=4) is None
    assert by_hand(optimizer, x, y, chunk=9) is not None
    masks = nn.Sequential(*mlp([4, 6]), nn.Dropout(), *mlp([6, 3]))
    found = by_hand(KFAC(masks, Gaussian()), x, y)
    assert found is not None
    assert found.batch.random  # further passes draw the same masks
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert by_hand(optimizer, x, y) is None


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
    handle = register_module_full_backward_hook(lambda *_: None)
    try:
        assert by_hand(optimizer, x, y) is None
    finally:
        handle.remove()
    assert by_hand(optimizer, x, y) is not None


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
