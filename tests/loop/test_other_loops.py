"""Loops as people write them: mixed precision, checkpoints, compiled models, losses written by hand."""

import warnings

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from kronfac import KFAC
from tests.loop.loops import (
    PROBLEMS,
    same_parameters,
    step_with_closure,
    step_without_closure,
)

PROBLEM = PROBLEMS["perceptron"]


@pytest.mark.parametrize("unscale", [False, True])
def test_a_grad_scaler_changes_nothing(unscale: bool) -> None:
    one, other = PROBLEM.model(), PROBLEM.model()
    plain, scaled = KFAC(one, PROBLEM.loss_fn), KFAC(other, PROBLEM.loss_fn)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    for x, y in PROBLEM.batches(4):
        step_without_closure(plain, lambda x=x, y=y: PROBLEM.loss(one, x, y))
        scaled.zero_grad()
        scaler.scale(PROBLEM.loss(other, x, y)).backward()
        if unscale:
            scaler.unscale_(scaled)
        scaler.step(scaled)
        scaler.update()
    for p, q in zip(one.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-5)


def test_a_grad_scaler_that_overflows_takes_no_step() -> None:
    model = PROBLEM.model()
    optimizer = KFAC(model, PROBLEM.loss_fn)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    ((x, y),) = PROBLEM.batches(1)
    before = [p.detach().clone() for p in model.parameters()]
    scaler.scale(PROBLEM.loss(model, x, y)).backward()
    first = next(model.parameters())
    assert first.grad is not None
    first.grad[0, 0] = torch.inf
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0**9
    assert optimizer.report is None
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))


def test_bfloat16_autocast_around_the_forward_pass() -> None:
    one, other = PROBLEM.model(), PROBLEM.model()
    with_closure, without = KFAC(one, PROBLEM.loss_fn), KFAC(other, PROBLEM.loss_fn)

    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            outputs = model(x)
        return PROBLEM.loss_fn(outputs.float(), y)

    for x, y in PROBLEM.batches(4):
        step_with_closure(with_closure, lambda x=x, y=y: loss(one, x, y))
        step_without_closure(without, lambda x=x, y=y: loss(other, x, y))
        assert without.report is not None
        assert not without.report.events
    for p, q in zip(one.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-6)


class OwnAutocast(nn.Module):
    """A model that opens an autocast in its own forward, as Accelerate makes it."""

    def __init__(self, enabled: bool) -> None:
        super().__init__()
        self.model, self.enabled = PROBLEM.model(), enabled
        self.dtypes: list[torch.dtype] = []
        """The dtypes of what it has computed."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.enabled:
            return self.model(x)
        with torch.autocast("cpu", torch.bfloat16):
            outputs: Tensor = self.model(x)
        self.dtypes.append(outputs.dtype)
        return outputs.float()


@pytest.mark.parametrize("closure", [True, False], ids=["closure", "loop"])
def test_bfloat16_autocast_that_the_model_opens(closure: bool) -> None:
    """K-FAC's own passes are in full precision, as if it were opened around the model."""
    one, other = OwnAutocast(enabled=False), OwnAutocast(enabled=True)
    around, within = KFAC(one, PROBLEM.loss_fn), KFAC(other, PROBLEM.loss_fn)

    def loss(x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            outputs = one(x)
        return PROBLEM.loss_fn(outputs.float(), y)

    step = step_with_closure if closure else step_without_closure
    for x, y in PROBLEM.batches(4):
        step(around, lambda x=x, y=y: loss(x, y))
        step(within, lambda x=x, y=y: PROBLEM.loss(other, x, y))
    for p, q in zip(one.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-6)
    assert other.dtypes.count(torch.bfloat16) == 4  # passes of the loop
    assert len(other.dtypes) > 8
    assert not torch.is_autocast_enabled("cpu")


class Checkpointed(nn.Module):
    """A perceptron whose first half is computed again in the backward pass."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(5, 16), nn.Tanh())
        self.last = nn.Linear(16, 3)
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        hidden = checkpoint(self.first, x, use_reentrant=self.reentrant)
        outputs: Tensor = self.last(hidden)
        return outputs


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing(reentrant: bool) -> None:
    models = []
    for step in (step_with_closure, step_without_closure):
        torch.manual_seed(0)
        model = Checkpointed(reentrant)
        optimizer = KFAC(model, PROBLEM.loss_fn)
        for x, y in PROBLEM.batches(3):
            inputs = x.clone().requires_grad_(reentrant)
            step(optimizer, lambda m=model, x=inputs, y=y: PROBLEM.loss(m, x, y))
        models.append(model)
    assert same_parameters(*models)


def test_outputs_that_the_model_is_given_again() -> None:
    model = nn.Linear(4, 4)
    optimizer = KFAC(model, nn.MSELoss())
    x, y = torch.randn(16, 4), torch.randn(16, 4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            step_without_closure(optimizer, lambda: optimizer.objective.module(model(model(x)), y))
    assert optimizer.report is not None


@pytest.mark.slow
def test_a_compiled_model_is_compiled_once() -> None:
    model = PROBLEM.model()
    graphs = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> object:
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(model, backend=backend)
    optimizer = KFAC(compiled, PROBLEM.loss_fn)
    for x, y in PROBLEM.batches(5):
        step_without_closure(optimizer, lambda x=x, y=y: PROBLEM.loss(compiled, x, y))
    assert len(graphs) == 1
    plain = PROBLEM.model()
    other = KFAC(plain, PROBLEM.loss_fn)
    for x, y in PROBLEM.batches(5):
        step_without_closure(other, lambda x=x, y=y: PROBLEM.loss(plain, x, y))
    assert same_parameters(model, plain)
