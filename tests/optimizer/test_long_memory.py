"""What KFAC does with a memory: u ← c κα Δ + μ u, saved, restored, and forgotten where it has to be."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from kronfac import KFAC, AdaptiveDamping
from kronfac.control import LongMemory, RawStep
from tests.conftest import mlp, normal
from tests.optimizer.runs import same

LOSS = nn.MSELoss()


def noisy(steps: int) -> KFAC:
    """On targets that are nothing but noise, none of what M predicts is confirmed."""
    optimizer = KFAC(mlp([3, 8, 2], seed=1), LOSS, damping=AdaptiveDamping(settling=100))
    for k in range(steps):
        advance(optimizer, k)
    return optimizer


def advance(optimizer: KFAC, k: int) -> None:
    x, y = normal(16, 3, seed=2 * k), normal(16, 2, seed=2 * k + 1)
    optimizer.step(optimizer.closure(x, y))


def values(optimizer: KFAC) -> list[Tensor]:
    return [p.detach().clone() for p in optimizer.model.parameters()]


def joined(parameters: list[Tensor]) -> list[Tensor]:
    """[W b] of every layer."""
    pairs = zip(parameters[::2], parameters[1::2], strict=True)
    return [torch.cat([W, b[:, None]], dim=1) for W, b in pairs]


def test_momentum_goes_on_with_its_memory_and_a_part_of_the_new_step():
    optimizer = noisy(40)
    for k in range(40, 60):
        # The validation that is made first leaves the memory as it is.
        u, start = optimizer._state.step.momentum, joined(values(optimizer))
        advance(optimizer, k)
        state, report = optimizer._state, optimizer.report
        assert not report.events
        assert state.step.momentum is not state.acceptance.pending.delta
        moved = [b - a for a, b in zip(start, joined(values(optimizer)), strict=True)]
        own = [d - report.mu * V for d, V in zip(moved, u, strict=True)]
        c = LongMemory().kept  # where noise is all there is, else more
        shares = []
        for U, V, new in zip(state.step.momentum, u, own, strict=True):
            kept = U - report.mu * V
            shares.append(float((kept * new).sum() / new.square().sum()))
            torch.testing.assert_close(kept, shares[-1] * new, rtol=1e-8, atol=1e-12)
        assert shares == pytest.approx([shares[0]] * len(shares), rel=1e-6)
        assert c - 1e-9 <= shares[0] < 1
        assert report.memory == pytest.approx(max(min(0.15 * (k + 1), state.step.memory.length), 1))


def test_the_statistics_are_remembered_as_long_where_that_is_longer():
    optimizer = noisy(140)
    n = optimizer._state.curvature.examples
    for k in range(140, 150):
        advance(optimizer, k)
        state = optimizer._state
        assert state.acceptance.confirmed <= 0.25, "these mini-batches have nothing in common"
        # As long as momentum might at the most, also where noise makes its memory shorter.
        assert optimizer.report.memory < 0.15 * (k + 1)
        decay = 1 - 1 / (0.15 * (k + 1))
        # The variance of a weighted mean over 16 new cases and n old ones.
        expected = 1 / (decay**2 / n + (1 - decay) ** 2 / 16)
        assert state.curvature.examples == pytest.approx(expected, rel=1e-9)
        n = state.curvature.examples


def test_it_is_saved():
    optimizer = noisy(41)
    state = optimizer.state_dict()
    kfac = state["kfac"]
    assert not same(kfac["step"]["momentum"], kfac["acceptance"]["pending"]["delta"])
    other = noisy(0)
    other.model.load_state_dict(optimizer.model.state_dict())
    other.load_state_dict(state)
    for k in range(41, 50):
        advance(optimizer, k)
        advance(other, k)
    assert all(map(torch.equal, values(optimizer), values(other)))


def test_it_comes_back_with_a_step_that_is_rejected():
    optimizer = noisy(44)
    u = optimizer._state.step.momentum
    assert u is not optimizer._state.acceptance.pending.delta
    sensible = optimizer.settings
    optimizer.settings = replace(sensible, step_rule=RawStep(1e4))
    advance(optimizer, 44)
    optimizer.settings = sensible
    advance(optimizer, 45)
    assert [event.kind for event in optimizer.report.events] == ["rejected"]
    assert all(map(torch.equal, optimizer._state.acceptance.pending.kept.momentum, u))
