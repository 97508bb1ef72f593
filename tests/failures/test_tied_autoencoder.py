"""A tied autoencoder: K-FAC and AdamW end in local minima, which differ from start to start."""

from statistics import median

import pytest
import torch
from torch import nn

from kronfac import KFAC
from tests.conftest import seeded


class Tied(nn.Module):
    """tanh(enc(x)) @ enc.weight."""

    def __init__(self) -> None:
        super().__init__()
        self.enc = nn.Linear(20, 9)

    def forward(self, x):
        return torch.tanh(self.enc(x)) @ self.enc.weight


def train(x, model, steps, adamw=None):
    """The loss after full-batch steps of K-FAC, or of AdamW with this learning rate."""
    loss = nn.MSELoss()
    optimizer = torch.optim.AdamW(model.parameters(), adamw) if adamw else KFAC(model, loss)
    for _ in range(steps):
        optimizer.zero_grad()
        loss(model(x), x).backward()
        optimizer.step()
    with torch.no_grad():
        return float(loss(model(x), x))


@pytest.mark.slow
def test_a_tied_autoencoder_ends_in_a_minimum_that_adamw_does_not_leave():
    generator = seeded(1)
    x = torch.randn(400, 5, generator=generator) @ torch.randn(5, 20, generator=generator)
    x = x / x.std()
    by_kfac, by_adamw, later = [], [], []
    for seed in range(3):
        models = []
        for _ in range(3):
            torch.manual_seed(seed)
            models.append(Tied())
        by_kfac.append(train(x, models[0], 300))
        by_adamw.append(
            min(train(x, m, 300, lr) for m, lr in zip(models[1:], (1e-2, 3e-2), strict=True))
        )
        later.append(train(x, models[0], 300, 3e-3))
    assert median(by_kfac) < 1.03 * median(by_adamw)
    assert all(b > 0.97 * a for a, b in zip(by_kfac, later, strict=True))
