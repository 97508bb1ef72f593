"""Thousands of small steps: memory stays flat."""

import gc

import pytest
import torch
from torch import Tensor, nn

from kronfac import KFAC
from tests.conftest import mlp, normal

STEPS = 4000


def tensors() -> tuple[int, int]:
    """How many there are, and their bytes."""
    gc.collect()
    found = [t for t in gc.get_objects() if issubclass(type(t), Tensor)]
    return len(found), sum(t.untyped_storage().nbytes() for t in found)


@pytest.mark.slow
@pytest.mark.parametrize("closure", [True, False], ids=["closure", "loop"])
@pytest.mark.parametrize("inverse", ["block_diagonal", "block_tridiagonal", "ekfac"])
def test_a_long_run(inverse, closure):
    """With passes beside it that no step goes by."""
    model, loss = mlp([3, 6, 2]), nn.MSELoss()
    optimizer = KFAC(model, loss, inverse=inverse)
    marks = []
    for k in range(1, STEPS + 1):
        x = normal(8, 3, seed=k)
        y = torch.stack([x.prod(dim=1), x.sum(dim=1)], dim=1)
        loss(model(x.clone()), y)
        if closure:
            optimizer.step(optimizer.closure(x, y))
        else:
            optimizer.zero_grad()
            loss(model(x), y).backward()
            optimizer.step()
        assert all(bool(p.isfinite().all()) for p in model.parameters())
        if k in (STEPS // 4, STEPS):
            marks.append(tensors())
    (count, size), (last_count, last_size) = marks
    assert last_count <= count + 8
    assert last_size <= 1.02 * size
