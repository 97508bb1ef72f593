"""Dropout: a regression ends as low as with AdamW, although most of every step is noise."""

from statistics import median

import pytest
import torch
from sklearn.datasets import make_friedman1
from torch import nn

from kronfac import KFAC
from tests.conftest import seeded

TRAINED, BATCH, EPOCHS, DECAY = 10_000, 250, 10, 1e-4


@pytest.fixture(scope="module")
def friedman():
    """Standardised inputs and targets, (12000, 10) and (12000, 1)."""
    x, y = make_friedman1(12_000, noise=1.0, random_state=7)
    columns = torch.tensor(x).float(), torch.tensor(y).float()[:, None]
    return [(part - part.mean(0)) / part.std(0) for part in columns]


def validation_loss(friedman, seed, make):
    """After ten epochs."""
    x, y = friedman
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Linear(10, 96), nn.ReLU(), nn.Dropout(0.15),
        nn.Linear(96, 96), nn.ReLU(), nn.Dropout(0.15),
        nn.Linear(96, 1),
    )  # fmt: skip
    loss, generator = nn.MSELoss(), seeded(100 + seed)
    optimizer = make(model, loss)
    for _ in range(EPOCHS):
        for chosen in torch.randperm(TRAINED, generator=generator).split(BATCH):
            optimizer.zero_grad()
            loss(model(x[chosen]), y[chosen]).backward()
            optimizer.step()
    model.eval()
    with torch.no_grad():
        return float(loss(model(x[TRAINED:]), y[TRAINED:]))


@pytest.mark.slow
def test_with_dropout_the_validation_loss_is_within_five_per_cent_of_adamw(friedman):
    def adamw(model, _):
        return torch.optim.AdamW(model.parameters(), 3e-3, weight_decay=DECAY)

    def kfac(model, loss):
        return KFAC(model, loss, weight_decay=DECAY)

    losses = {
        make.__name__: median(validation_loss(friedman, seed, make) for seed in range(3))
        for make in (adamw, kfac)
    }
    assert losses["kfac"] < 1.05 * losses["adamw"]
