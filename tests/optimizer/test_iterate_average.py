"""The average of the iterates by definition, and the length of the memory that follows from its loss."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kronfac import KFAC, AdaptiveDamping, QuadraticModel
from kronfac.control import Measurement, MemoryState, RawStep
from kronfac.extend import LongMemory
from tests.conftest import mlp, normal

LOSS = nn.MSELoss()
WEIGHT_DECAY = 0.01


def optimizer_of(model: nn.Module, **settings: Any) -> KFAC:
    return KFAC(
        model, LOSS, weight_decay=WEIGHT_DECAY, damping=AdaptiveDamping(settling=100), **settings
    )


def rows(k: int, noise: float = 1.0) -> tuple[Tensor, Tensor]:
    x = normal(16, 3, seed=2 * k)
    return x, x[:, :2].sin() + noise * normal(16, 2, seed=2 * k + 1)


def theta(model: nn.Module) -> list[Tensor]:
    """[W b] of every layer."""
    values = [p.detach().clone() for p in model.parameters()]
    pairs = zip(values[::2], values[1::2], strict=True)
    return [torch.cat([W, b[:, None]], dim=1) for W, b in pairs]


@torch.no_grad()
def objective(model: nn.Module, x: Tensor, y: Tensor, parameters: list[Tensor]) -> float:
    """h with these parameters, weight decay and all."""
    names = [name for name, _ in model.named_parameters()]
    values = [part for V in parameters for part in (V[:, :-1], V[:, -1])]
    outputs = torch.func.functional_call(model, dict(zip(names, values, strict=True)), x)
    squares = sum(float(V.square().sum()) for V in parameters)
    return float(LOSS(outputs, y)) + WEIGHT_DECAY / 2 * squares


def test_average_and_memory_by_their_definitions():
    model = mlp([3, 8, 2], seed=1)
    optimizer = optimizer_of(model)
    average, start, memory = None, 0, math.inf
    shorter = longer = 0
    for k in range(1, 301):
        x, y = rows(k)
        here = theta(model)
        optimizer.step(optimizer.closure(x, y))
        state, confirmed = optimizer._state.step.memory, optimizer._state.acceptance.confirmed
        # The step has validated the one before; this is what it went by.
        noisy = confirmed is not None and confirmed < 0.5
        assert not optimizer.report.rejected, "θ would have been another"
        if not noisy:
            average, memory = None, math.inf
        if average is not None and k % 20 == 0 and k - start >= 0.2 * k:
            rise = objective(model, x, y, average) - objective(model, x, y, here)
            factor = min(math.exp(20 / (0.2 * k)), 1.5)
            ceiling = min(max(0.15 * k, 1), 100)
            used = min(ceiling, memory)
            if rise < 0:
                memory = max(used / factor, 0.01)
            else:
                memory = math.inf if memory >= ceiling else used * factor
            shorter, longer = shorter + (rise < 0), longer + (rise > 0)
        if noisy and k % 5 == 0:
            if average is None:
                average, start = here, k
            # All the same until there are enough for a fifth of the iterations.
            weight = min(max(5 / (0.2 * k), 5 / (k - start + 5)), 1)
            average = [(1 - weight) * a + weight * b for a, b in zip(average, here, strict=True)]
        assert state.length == pytest.approx(memory, rel=1e-9)
        assert optimizer.report.memory == pytest.approx(max(min(0.15 * k, 100, memory), 1))
        assert (state.average is None) == (average is None)
        if average is not None:
            torch.testing.assert_close(list(state.average), average, rtol=1e-10, atol=1e-12)
    assert shorter > 2
    assert longer > 2
    assert shorter + longer == 300 // 20


def test_nothing_is_averaged_where_mini_batches_agree():
    optimizer = optimizer_of(mlp([3, 8, 2], seed=1))
    x, y = rows(0, noise=0.0)
    for _ in range(45):
        optimizer.step(optimizer.closure(x, y))
    assert optimizer._state.step.memory.average is None
    assert optimizer._state.step.memory.length == math.inf


@pytest.mark.parametrize("step_rule", [RawStep(0.1), QuadraticModel()])
def test_nor_by_rules_without_a_long_memory(step_rule):
    optimizer = optimizer_of(mlp([3, 8, 2], seed=1), step_rule=step_rule)
    for k in range(45):
        optimizer.step(optimizer.closure(*rows(k)))
    assert optimizer._state.step.memory.average is None
    assert optimizer.report.memory == 1


def test_nor_by_a_long_memory_that_does_not_average():
    memory = LongMemory(averaged=None)
    optimizer = optimizer_of(mlp([3, 8, 2], seed=1), step_rule=QuadraticModel(memory=memory))
    for k in range(61):
        optimizer.step(optimizer.closure(*rows(k)))
    assert optimizer._state.acceptance.confirmed < 0.25
    assert optimizer._state.step.memory == MemoryState()
    assert optimizer.report.memory == pytest.approx(0.15 * 61), "as long as it may be"


def test_with_dropout_both_are_compared_with_the_same_masks():
    """Those of the closure, so that the comparison is about the parameters."""
    layers = [nn.Linear(3, 8), nn.Tanh(), nn.Dropout(0.5), nn.Linear(8, 2)]
    model = nn.Sequential(*layers).double()
    optimizer = optimizer_of(model)
    compared = 0
    for k in range(1, 121):
        x, y = rows(k)
        here, before, masks = theta(model), optimizer._state.step.memory, torch.get_rng_state()
        optimizer.step(optimizer.closure(x, y))
        after, next_masks = optimizer._state.step.memory.length, torch.get_rng_state()
        if before.average is None or optimizer.report.rejected or after == before.length:
            continue
        values = []
        for parameters in (here, before.average):
            torch.set_rng_state(masks)
            values.append(objective(model, x, y, parameters))
        torch.set_rng_state(next_masks)
        m = Measurement(iteration=k, loss=values[0])
        expected = LongMemory().compare(before, m, change=values[1] - values[0]).length
        assert after == pytest.approx(expected, rel=1e-6)
        compared += 1
    assert compared == 120 // 20, "every comparison changes the memory"


@pytest.mark.filterwarnings("ignore:The gradient of:UserWarning")  # it has more in it
def test_a_loss_of_the_closures_own_is_asked_for_again():
    """A penalty that K-FAC cannot see, and that makes the average better or worse."""
    model = mlp([3, 8, 2], seed=1)
    optimizer = optimizer_of(model)
    for k in range(1, 120):
        optimizer.step(optimizer.closure(*rows(k)))
    state = optimizer._state.step.memory
    assert state.average is not None
    at_average = [part for V in state.average for part in (V[:, :-1], V[:, -1])]
    x, y = rows(120)

    def closure() -> Tensor:
        optimizer.zero_grad()
        parameters = zip(model.parameters(), at_average, strict=True)
        loss = LOSS(model(x), y) + 100 * sum((p - a).square().sum() for p, a in parameters)
        loss.backward()
        return loss

    optimizer.step(closure)
    assert "loss_not_seen" in {event.kind for event in optimizer.report.events}
    m = Measurement(iteration=120, loss=1.0)
    expected = LongMemory().compare(MemoryState(state.length), m, change=-1.0).length
    assert optimizer._state.step.memory.length == pytest.approx(expected)


def test_a_refused_step_leaves_both():
    optimizer = optimizer_of(mlp([3, 8, 2], seed=1))
    for k in range(1, 60):
        optimizer.step(optimizer.closure(*rows(k)))
    before = optimizer._state.step.memory
    assert before.average is not None
    x, y = rows(60)
    optimizer.step(optimizer.closure(x, y * math.nan))
    assert optimizer.report.refused
    assert optimizer._state.step.memory.average is before.average
    assert optimizer._state.step.memory.length == before.length


def test_both_are_saved():
    optimizer = optimizer_of(mlp([3, 8, 2], seed=1))
    for k in range(1, 103):
        optimizer.step(optimizer.closure(*rows(k)))
    saved = optimizer.state_dict()
    assert saved["kfac"]["step"]["memory"]["average"] is not None
    assert math.isfinite(saved["kfac"]["step"]["memory"]["length"])
    other = optimizer_of(mlp([3, 8, 2], seed=2))
    other.model.load_state_dict(optimizer.model.state_dict())
    other.load_state_dict(saved)
    for k in range(103, 145):
        for run in (optimizer, other):
            run.step(run.closure(*rows(k)))
    assert all(map(torch.equal, theta(optimizer.model), theta(other.model)))
    assert all(
        map(torch.equal, optimizer._state.step.memory.average, other._state.step.memory.average)
    )
