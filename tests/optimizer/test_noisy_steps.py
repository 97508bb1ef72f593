"""Steps that are mostly noise: momentum with a long memory, the averaged iterate, statistics and γ."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from kronfac import KFAC, AdaptiveDamping, AdaptiveGamma, QuadraticModel
from kronfac.control import Measurement, MemoryState, RawStep
from kronfac.extend import LongMemory
from tests.conftest import mlp, normal
from tests.optimizer.runs import same, too_long_step

LOSS = nn.MSELoss()
WEIGHT_DECAY = 0.01


def new(model: nn.Module | None = None, **settings: Any) -> KFAC:
    settings = {"damping": AdaptiveDamping(settling=100), "weight_decay": WEIGHT_DECAY} | settings
    return KFAC(mlp([3, 8, 2], seed=1) if model is None else model, LOSS, **settings)


def rows(k: int, noise: float = 1.0) -> tuple[Tensor, Tensor]:
    x = normal(16, 3, seed=2 * k)
    return x, x[:, :2].sin() + noise * normal(16, 2, seed=2 * k + 1)


def advance(optimizer: KFAC, steps: range) -> KFAC:
    for k in steps:
        optimizer.step(optimizer.closure(*rows(k)))
    return optimizer


def pure_noise(optimizer: KFAC, steps: range) -> KFAC:
    """On targets that are nothing but noise, none of what M predicts is confirmed."""
    for k in steps:
        optimizer.step(optimizer.closure(normal(16, 3, seed=2 * k), normal(16, 2, seed=2 * k + 1)))
    return optimizer


def state(optimizer: KFAC, *path: str) -> Any:
    found = optimizer.state_dict()["kfac"]
    for key in path:
        found = found[key]
    return found


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


# ------------------------------------------------------------------------------------------- momentum


def test_momentum_goes_on_with_its_memory_and_a_part_of_the_new_step():
    """u ← c κα Δ + μ u."""
    optimizer = pure_noise(new(weight_decay=0.0), range(40))
    for k in range(40, 60):
        # The validation that is made first leaves the memory as it is.
        u, start = state(optimizer, "step", "momentum"), theta(optimizer.model)
        pure_noise(optimizer, range(k, k + 1))
        report = optimizer.report
        assert not report.events
        moved = [b - a for a, b in zip(start, theta(optimizer.model), strict=True)]
        own = [d - report.mu * V for d, V in zip(moved, u, strict=True)]
        shares = []
        for U, V, new_part in zip(state(optimizer, "step", "momentum"), u, own, strict=True):
            kept = U - report.mu * V
            shares.append(float((kept * new_part).sum() / new_part.square().sum()))
            assert_close(kept, shares[-1] * new_part, rtol=1e-8, atol=1e-12)
        assert shares == pytest.approx([shares[0]] * len(shares), rel=1e-6)
        # c where noise is all there is, else more.
        assert LongMemory().kept - 1e-9 <= shares[0] < 1
        length = state(optimizer, "step", "memory", "length")
        assert report.memory == pytest.approx(max(min(0.15 * (k + 1), length), 1))


def test_the_statistics_are_remembered_as_long_where_that_is_longer():
    optimizer = pure_noise(new(weight_decay=0.0), range(140))
    n = state(optimizer, "curvature", "examples")
    for k in range(140, 150):
        pure_noise(optimizer, range(k, k + 1))
        confirmed = state(optimizer, "acceptance", "confirmed")
        assert confirmed <= 0.25, "these mini-batches have nothing in common"
        # As long as momentum might at the most, also where noise makes its memory shorter.
        assert optimizer.report.memory < 0.15 * (k + 1)
        decay = 1 - 1 / (0.15 * (k + 1))
        # The variance of a weighted mean over 16 new cases and n old ones.
        n = 1 / (decay**2 / n + (1 - decay) ** 2 / 16)
        assert state(optimizer, "curvature", "examples") == pytest.approx(n, rel=1e-9)


def test_momentum_comes_back_with_a_step_that_is_rejected():
    optimizer = pure_noise(new(), range(44))
    momentum = state(optimizer, "step", "momentum")
    assert not same(momentum, state(optimizer, "acceptance", "pending", "delta"))
    too_long_step(optimizer, optimizer.closure(*rows(44)), lr=1e4)
    pure_noise(optimizer, range(45, 46))
    assert [event.kind for event in optimizer.report.events] == ["rejected"]
    assert optimizer.report.mu is not None
    assert same(state(optimizer, "acceptance", "pending", "kept", "momentum"), momentum)


# ------------------------------------------------------------------------------ the averaged iterate


def test_average_and_memory_by_their_definitions():
    optimizer = new()
    model = optimizer.model
    average, start, memory = None, 0, math.inf
    shorter = longer = 0
    for k in range(1, 301):
        x, y = rows(k)
        here = theta(model)
        optimizer.step(optimizer.closure(x, y))
        found, confirmed = (
            state(optimizer, *path) for path in (("step", "memory"), ("acceptance", "confirmed"))
        )
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
        assert found["length"] == pytest.approx(memory, rel=1e-9)
        assert optimizer.report.memory == pytest.approx(max(min(0.15 * k, 100, memory), 1))
        assert (found["average"] is None) == (average is None)
        if average is not None:
            assert_close(found["average"], average, rtol=1e-10, atol=1e-12)
    assert shorter > 2
    assert longer > 2
    assert shorter + longer == 300 // 20


def test_nothing_is_averaged_where_mini_batches_agree():
    optimizer = new()
    x, y = rows(0, noise=0.0)
    for _ in range(45):
        optimizer.step(optimizer.closure(x, y))
    assert state(optimizer, "step", "memory", "average") is None
    assert state(optimizer, "step", "memory", "length") == math.inf


@pytest.mark.parametrize(
    "step_rule",
    [RawStep(0.1), QuadraticModel(bounded=False, memory=None), QuadraticModel(memory=None)],
)
def test_nor_by_rules_without_a_long_memory(step_rule):
    optimizer = advance(new(step_rule=step_rule), range(45))
    assert state(optimizer, "step", "memory", "average") is None
    assert optimizer.report.memory == 1
    momentum, delta = (
        state(optimizer, *path)
        for path in (("step", "momentum"), ("acceptance", "pending", "delta"))
    )
    assert same(momentum, delta)


def test_nor_by_a_long_memory_that_does_not_average():
    memory = LongMemory(averaged=None)
    optimizer = advance(new(step_rule=QuadraticModel(memory=memory)), range(61))
    assert state(optimizer, "acceptance", "confirmed") < 0.25
    found = state(optimizer, "step", "memory")
    assert (found["length"], found["average"]) == (math.inf, None)
    assert optimizer.report.memory == pytest.approx(0.15 * 61), "as long as it may be"


def test_with_dropout_both_are_compared_with_the_same_masks():
    """Those of the closure, so that the comparison is about the parameters."""
    layers = [nn.Linear(3, 8), nn.Tanh(), nn.Dropout(0.5), nn.Linear(8, 2)]
    optimizer = new(nn.Sequential(*layers).double())
    model, compared = optimizer.model, 0
    for k in range(1, 121):
        x, y = rows(k)
        here, before, masks = (
            theta(model),
            state(optimizer, "step", "memory"),
            torch.get_rng_state(),
        )
        optimizer.step(optimizer.closure(x, y))
        after, next_masks = state(optimizer, "step", "memory", "length"), torch.get_rng_state()
        if before["average"] is None or optimizer.report.rejected or after == before["length"]:
            continue
        values = []
        for parameters in (here, before["average"]):
            torch.set_rng_state(masks)
            values.append(objective(model, x, y, parameters))
        torch.set_rng_state(next_masks)
        m = Measurement(iteration=k, loss=values[0])
        change = values[1] - values[0]
        expected = LongMemory().compare(MemoryState(before["length"]), m, change=change).length
        assert after == pytest.approx(expected, rel=1e-6)
        compared += 1
    assert compared == 120 // 20, "every comparison changes the memory"


@pytest.mark.filterwarnings("ignore:The gradient of:UserWarning")  # it has more in it
def test_a_loss_of_the_closures_own_is_asked_for_again():
    """A penalty that K-FAC cannot see, and that makes the average better or worse."""
    optimizer = advance(new(), range(1, 120))
    model, before = optimizer.model, state(optimizer, "step", "memory")
    at_average = [part for V in before["average"] for part in (V[:, :-1], V[:, -1])]
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
    expected = LongMemory().compare(MemoryState(before["length"]), m, change=-1.0).length
    assert state(optimizer, "step", "memory", "length") == pytest.approx(expected)


def test_a_refused_step_leaves_both():
    optimizer = advance(new(), range(1, 60))
    before = state(optimizer, "step", "memory")
    assert before["average"] is not None
    x, y = rows(60)
    optimizer.step(optimizer.closure(x, y * math.nan))
    assert optimizer.report.refused
    assert same(state(optimizer, "step", "memory"), before)


def test_both_are_saved():
    optimizer, other = advance(new(), range(1, 103)), new(mlp([3, 8, 2], seed=2))
    assert state(optimizer, "step", "memory", "average") is not None
    assert math.isfinite(state(optimizer, "step", "memory", "length"))
    other.model.load_state_dict(optimizer.model.state_dict())
    other.load_state_dict(optimizer.state_dict())
    for run in (optimizer, other):
        advance(run, range(103, 145))
    assert same(theta(optimizer.model), theta(other.model))
    assert same(state(optimizer, "step"), state(other, "step"))


# --------------------------------------------------------------------------------------------------- γ


def test_gamma_is_of_the_sampling_error_and_not_searched_for():
    tried = []

    class Watched(AdaptiveGamma):
        def candidates(self, state, m):
            found = super().candidates(state, m)
            tried.append((m.iteration, m.confidence, len(found)))
            return found

    default = {"damping": AdaptiveDamping(), "weight_decay": 0.0}
    advance(new(gamma=Watched(), **default), range(1, 66))
    late = [count for k, confirmed, count in tried if k > 20 and confirmed < 0.5]
    assert late == [1] * 4
    refreshes = [k for k, _, _ in tried]
    tried.clear()
    advance(new(gamma=Watched(strength=None), **default), range(1, 66))
    assert [k for k, _, _ in tried] == refreshes
    assert [count for _, _, count in tried] == [1] + [2] * (len(refreshes) - 1)
