"""`loss.backward(); optimizer.step()` takes the step that a closure would, however the loop is written."""

import warnings
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from kronfac import KFAC
from kronfac.report import EventKind
from tests.failures.steps import flat
from tests.loop.loops import (
    PROBLEMS,
    same_parameters,
    step_with_closure,
    step_without_closure,
)

PROBLEM = PROBLEMS["perceptron"]


@pytest.mark.parametrize("name", PROBLEMS)
def test_the_step_is_that_of_a_closure_to_the_bit(name: str) -> None:
    problem = PROBLEMS[name]
    one, other = problem.model(), problem.model()
    with_closure, without = KFAC(one, problem.loss_fn), KFAC(other, problem.loss_fn)
    for k, (x, y) in enumerate(problem.batches(6)):
        torch.manual_seed(k)
        step_with_closure(with_closure, lambda x=x, y=y: problem.loss(one, x, y))
        torch.manual_seed(k)
        step_without_closure(without, lambda x=x, y=y: problem.loss(other, x, y))
        assert with_closure.report is not None
        assert without.report is not None
        assert not without.report.events
        assert with_closure.report.next_rho == without.report.next_rho
        assert same_parameters(one, other)
    for (_, a), (_, b) in zip(one.named_buffers(), other.named_buffers(), strict=True):
        assert torch.equal(a, b)


def test_micro_batches_before_one_step_are_one_mini_batch() -> None:
    one, other = PROBLEM.model().double(), PROBLEM.model().double()
    with_closure, without = KFAC(one, PROBLEM.loss_fn), KFAC(other, PROBLEM.loss_fn)
    for x, y in ((x.double(), y) for x, y in PROBLEM.batches(5)):

        def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
            with_closure.zero_grad()
            total = torch.zeros((), dtype=x.dtype)
            for part, target in zip(x.split(12), y.split(12), strict=True):
                loss = PROBLEM.loss(one, part, target) / 4
                loss.backward()
                total = total + loss.detach()
            return total

        with_closure.step(closure)
        for part, target in zip(x.split(12), y.split(12), strict=True):
            (PROBLEM.loss(other, part, target) / 4).backward()
        without.step()
        without.zero_grad()
        assert without.report is not None
        assert without.report.examples == 48
    for p, q in zip(one.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-10, atol=1e-12)


def test_a_rejected_step_is_rolled_back_and_the_gradient_is_not_used() -> None:
    model = PROBLEM.model()
    optimizer = KFAC(model, PROBLEM.loss_fn)
    ((x, y),) = PROBLEM.batches(1)
    for lr in (1.0, 1.0, 1.0, 200.0):  # the last one to where the loss is far higher
        before = flat(model)
        optimizer.param_groups[0]["lr"] = lr
        step_without_closure(optimizer, lambda: PROBLEM.loss(model, x, y))
    optimizer.param_groups[0]["lr"] = 1.0
    step_without_closure(optimizer, lambda: PROBLEM.loss(model, x, y))
    assert optimizer.report is not None
    assert [event.kind for event in optimizer.report.events] == [EventKind.REJECTED]
    assert torch.equal(flat(model), before)
    step_without_closure(optimizer, lambda: PROBLEM.loss(model, x, y))
    assert not optimizer.report.events


class Own(nn.Module):
    """A model that computes its own loss, as those of Hugging Face do."""

    def __init__(self) -> None:
        super().__init__()
        self.body = PROBLEMS["perceptron"].make()

    def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        logits = self.body(x)
        if labels is None:
            return {"logits": logits}
        loss = nn.functional.cross_entropy(logits, labels, ignore_index=-100)
        return {"loss": loss, "logits": logits}


def test_a_loss_inside_of_the_model_is_seen() -> None:
    torch.manual_seed(3)
    one = Own()
    torch.manual_seed(3)
    other = Own()
    with_closure, without = KFAC(one, PROBLEM.loss_fn), KFAC(other, PROBLEM.loss_fn)
    for x, y in PROBLEM.batches(6):
        y[::5] = -100
        step_with_closure(with_closure, lambda x=x, y=y: one(x, labels=y)["loss"])
        step_without_closure(without, lambda x=x, y=y: other(x, labels=y)["loss"])
        assert without.report is not None
        assert without.report.events == ()
    assert same_parameters(one, other)


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


class OwnAutocast(nn.Module):
    """A model that opens an autocast in its own forward, as Accelerate makes it."""

    def __init__(self, enabled: bool = True) -> None:
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


def test_bfloat16_autocast_around_the_model_or_in_it() -> None:
    """K-FAC's own passes are in full precision; the steps are the same, with a closure and without."""

    def around(model: nn.Module, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            outputs: Tensor = model(x)
        return outputs.float()

    models = []
    for step in (step_with_closure, step_without_closure):
        for inside in (False, True):
            model = OwnAutocast(inside)
            optimizer = KFAC(model, PROBLEM.loss_fn)
            call = model if inside else partial(around, model)
            for x, y in PROBLEM.batches(4):
                step(optimizer, partial(PROBLEM.loss, call, x, y))
                assert optimizer.report is not None
                assert not optimizer.report.events
            if inside:
                assert model.dtypes.count(torch.bfloat16) == 4  # passes of the loop
                assert len(model.dtypes) > 8
            models.append(model)
    for model in models[1:]:
        for p, q in zip(models[0].parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-6)
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
