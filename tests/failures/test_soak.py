"""Thousands of small steps: memory stays flat, and the state is what its definition says."""

import gc

import pytest
import torch
from torch import Tensor, nn

from kronfac import KFAC, Intervals
from kronfac.extend import SampledFisher
from tests.conftest import mlp, normal

STEPS = 4000
DECAY = 0.95


def batch(k: int) -> tuple[Tensor, Tensor]:
    x = normal(8, 3, seed=k)
    return x, torch.stack([x.prod(dim=1), x.sum(dim=1)], dim=1)


def tensors() -> tuple[int, int]:
    """How many there are, and their bytes."""
    gc.collect()
    found = [t for t in gc.get_objects() if issubclass(type(t), Tensor)]
    return len(found), sum(t.untyped_storage().nbytes() for t in found)


@pytest.mark.slow
@pytest.mark.parametrize("inverse", ["block_diagonal", "block_tridiagonal", "ekfac"])
def test_a_long_run(inverse):
    """Moving averages of inputs are recomputed from a log of what the layers were given."""
    model = mlp([3, 6, 2])
    fisher = SampledFisher(ema_decay=DECAY)
    optimizer = KFAC(
        model,
        nn.MSELoss(),
        inverse=inverse,
        fisher=fisher,
        intervals=Intervals(statistics_fraction=1.0),
    )
    truth: list[Tensor | None] = [None, None]
    marks = []
    for k in range(1, STEPS + 1):
        x, y = batch(k)
        kept = [p.detach().clone() for p in model.parameters()]
        before = optimizer._state.iteration
        optimizer.step(optimizer.closure(x, y))
        report, state = optimizer.report, optimizer._state
        assert report is not None
        assert not report.refused
        assert state.iteration == before + 1 == k
        decay = min(1 - 1 / k, DECAY)  # [MG15 §5]
        if report.rejected:  # statistics were taken at the θ before the step that was rolled back
            kept = _theta_before(model, state)
        h = torch.tanh(x @ kept[0].mT + kept[1])
        for n, a in enumerate((x, h)):
            ones = torch.cat([a, torch.ones(len(a), 1, dtype=a.dtype)], dim=1)
            new, old = ones.mT @ ones / len(a), truth[n]
            truth[n] = new if old is None else decay * old + (1 - decay) * new
        for n, block in enumerate(state.curvature.blocks):
            torch.testing.assert_close(block.A, truth[n], rtol=1e-8, atol=1e-10)
        assert all(bool(p.isfinite().all()) for p in model.parameters())
        if k in (STEPS // 4, STEPS // 2, STEPS):
            marks.append(tensors())
    (count, size), *_, (last_count, last_size) = marks
    assert last_count <= count + 8
    assert last_size <= 1.02 * size


def _theta_before(model: nn.Module, state) -> list[Tensor]:
    """θ that the last step was computed at: θ − δ."""
    delta = state.acceptance.pending.delta
    parts = [t for V in delta for t in (V[:, :-1], V[:, -1])]
    return [p.detach() - part for p, part in zip(model.parameters(), parts, strict=True)]
