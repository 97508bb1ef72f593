"""A loop whose loss K-FAC does not see: what it reports, and what it must not make of a loss of nothing."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional

import kronfac
from kronfac import KFAC
from tests.loop.loops import PROBLEMS, Gpt, step_without_closure

PROBLEM = PROBLEMS["perceptron"]

pytestmark = pytest.mark.filterwarnings("ignore:KFAC.step.. has not seen the loss")


def unseen_step(optimizer: KFAC, x: torch.Tensor, y: torch.Tensor) -> None:
    step_without_closure(optimizer, lambda: functional.cross_entropy(optimizer.model(x), y))


def seen_step(optimizer: KFAC, x: torch.Tensor, y: torch.Tensor) -> None:
    step_without_closure(optimizer, lambda: optimizer.objective.module(optimizer.model(x), y))


@pytest.mark.parametrize("loss", [nn.CrossEntropyLoss(), nn.CrossEntropyLoss(reduction="sum")])
def test_the_loss_that_is_reported_is_not_a_number(loss: nn.Module) -> None:
    optimizer = KFAC(PROBLEM.model(), loss)
    numbers: list[dict[str, float]] = []
    kronfac.log_to(optimizer, lambda given, step: numbers.append(given), prefix="")
    for x, y in PROBLEM.batches(3):
        unseen_step(optimizer, x, y)
        assert optimizer.report is not None
        assert math.isnan(optimizer.report.loss)
        assert optimizer.report.mean_loss is not None
        assert math.isnan(optimizer.report.mean_loss)
    assert not any({"loss", "mean_loss"} & set(given) for given in numbers)


def test_so_is_that_of_a_refused_step() -> None:
    optimizer = KFAC(PROBLEM.model(), PROBLEM.loss_fn)
    ((x, y),) = PROBLEM.batches(1)
    x[0, 0] = math.nan
    with pytest.warns(UserWarning, match="refused a step"):
        unseen_step(optimizer, x, y)
    assert optimizer.report is not None
    assert optimizer.report.refused
    assert math.isnan(optimizer.report.loss)


def test_the_step_is_not_bounded_by_the_penalty_alone() -> None:
    """A step promises no more than the loss, which is not negative; of this one nothing is known."""
    ends = []
    for weight_decay in (0.0, 1e-12):
        optimizer = KFAC(PROBLEM.model(), PROBLEM.loss_fn, weight_decay=weight_decay)
        for x, y in PROBLEM.batches(3):
            unseen_step(optimizer, x, y)
        ends.append(nn.utils.parameters_to_vector(optimizer.model.parameters()).detach())
    torch.testing.assert_close(*ends, rtol=1e-3, atol=1e-4)


def test_a_loss_that_is_seen_again_is_not_compared_with_nothing() -> None:
    """Mini-batches of one loss: what differs between them is its noise, not the loss itself."""
    optimizer = KFAC(PROBLEM.model(), PROBLEM.loss_fn)
    ((x, y),) = PROBLEM.batches(1)
    for step in (unseen_step, seen_step, seen_step):
        step(optimizer, x, y)
    noise = optimizer._state.acceptance.noise
    assert noise is not None
    assert noise < 1e-5


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_a_language_model_with_a_functional_loss_does_not_diverge(reduction: str) -> None:
    """No step is validated: predictive distributions may not change by more than half a nat a token."""
    torch.manual_seed(0)
    model = Gpt(50, 64)
    optimizer = KFAC(model, nn.CrossEntropyLoss(reduction=reduction))
    losses = []
    for _ in range(30):
        tokens = (torch.randint(50, (16, 1)) + torch.arange(17) * 3) % 50
        logits = model(tokens[:, :-1]).flatten(0, 1)
        loss = functional.cross_entropy(logits, tokens[:, 1:].flatten(), reduction=reduction)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.1 * losses[0]
