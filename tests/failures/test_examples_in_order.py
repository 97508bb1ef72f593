"""A full batch in sorted order trains as one in random order does."""

import pytest
import torch
from torch import nn

from kronfac import KFAC
from tests.conftest import seeded
from tests.failures.steps import rejections

EXAMPLES, STEPS = 1000, 200


def sine(order: str, seed: int) -> tuple[float, int]:
    """The last loss of a network that learns sin 3x, and the number of rejected steps."""
    x = torch.linspace(-1, 1, EXAMPLES, dtype=torch.float64)[:, None]
    if order == "shuffled":
        x = x[torch.randperm(EXAMPLES, generator=seeded(seed))]
    y = torch.sin(3 * x)
    torch.manual_seed(seed)
    model = nn.Sequential(
        *(nn.Linear(1, 20), nn.Tanh()), *(nn.Linear(20, 20), nn.Tanh()), nn.Linear(20, 1)
    ).double()
    optimizer = KFAC(model, nn.MSELoss())
    rejected = 0
    for _ in range(STEPS):
        optimizer.step(optimizer.closure(x, y))
        rejected += rejections(optimizer)
    with torch.no_grad():
        return float(nn.functional.mse_loss(model(x), y)), rejected


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("order", ["shuffled", "sorted"])
def test_the_order_of_the_examples_does_not_matter(order, seed):
    loss, rejected = sine(order, seed)
    # 2e-10 to 4e-9 over seeds and orders; 0.02 from the first examples of sorted ones.
    assert loss < 1e-8
    assert rejected <= 6  # twice what shuffled examples need
