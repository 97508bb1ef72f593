"""`loss.backward(); optimizer.step()` takes the step that a closure would."""

import pytest
import torch
from torch import Tensor, nn

from kronfac import KFAC
from kronfac.report import EventKind
from tests.loop.loops import (
    PROBLEMS,
    same_parameters,
    step_with_closure,
    step_without_closure,
)


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
    problem = PROBLEMS["perceptron"]
    one, other = problem.model().double(), problem.model().double()
    with_closure, without = KFAC(one, problem.loss_fn), KFAC(other, problem.loss_fn)
    for x, y in ((x.double(), y) for x, y in problem.batches(5)):

        def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
            with_closure.zero_grad()
            total = torch.zeros((), dtype=x.dtype)
            for part, target in zip(x.split(12), y.split(12), strict=True):
                loss = problem.loss(one, part, target) / 4
                loss.backward()
                total = total + loss.detach()
            return total

        with_closure.step(closure)
        for part, target in zip(x.split(12), y.split(12), strict=True):
            (problem.loss(other, part, target) / 4).backward()
        without.step()
        without.zero_grad()
        assert without.report is not None
        assert without.report.examples == 48
    for p, q in zip(one.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-10, atol=1e-12)


def test_a_rejected_step_is_rolled_back_and_the_gradient_is_not_used() -> None:
    problem = PROBLEMS["perceptron"]
    model = problem.model()
    optimizer = KFAC(model, problem.loss_fn)
    ((x, y),) = problem.batches(1)
    for _ in range(3):
        step_without_closure(optimizer, lambda: problem.loss(model, x, y))
    pending = optimizer._state.acceptance.pending
    assert pending is not None
    assert pending.kept is not None
    before = optimizer.network.split(pending.kept.theta)
    before = [value.clone() for value in before]
    # A step to where the loss is far higher, as the next mini-batch will find.
    with torch.no_grad():
        for p, V in zip(
            optimizer.network.parameters, optimizer.network.split(pending.delta), strict=True
        ):
            p.add_(V, alpha=200.0)
            V.mul_(201.0)
    optimizer._versions = optimizer.network.versions  # as if the step itself had been that long
    step_without_closure(optimizer, lambda: problem.loss(model, x, y))
    assert optimizer.report is not None
    assert [event.kind for event in optimizer.report.events] == [EventKind.REJECTED]
    for p, value in zip(optimizer.network.parameters, before, strict=True):
        assert torch.equal(p, value)
    step_without_closure(optimizer, lambda: problem.loss(model, x, y))
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
    problem = PROBLEMS["perceptron"]
    torch.manual_seed(3)
    one = Own()
    torch.manual_seed(3)
    other = Own()
    with_closure, without = KFAC(one, problem.loss_fn), KFAC(other, problem.loss_fn)
    for x, y in problem.batches(6):
        y[::5] = -100
        step_with_closure(with_closure, lambda x=x, y=y: one(x, labels=y)["loss"])
        step_without_closure(without, lambda x=x, y=y: other(x, labels=y)["loss"])
        assert without.report is not None
        assert without.report.events == ()
    assert same_parameters(one, other)
