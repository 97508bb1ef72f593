"""A small classification problem, and what training without a library does to it."""

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from kronfac import KFAC

CLASSES = 3
EPOCHS = 10
"""Epochs of three mini-batches each, after which the loss is below `REACHED`."""
REACHED = 0.2


def data(examples: int = 192) -> tuple[Tensor, Tensor]:
    """Points in five dimensions; the class is how many of the first two are positive."""
    torch.manual_seed(7)
    x = torch.randn(examples, 5, dtype=torch.float64)
    return x, (x[:, :2] > 0).sum(dim=1)


def network() -> nn.Sequential:
    """The same each time."""
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, CLASSES)).double()


def loader(
    batch_size: int = 64, dtype: torch.dtype = torch.float64
) -> "DataLoader[tuple[Tensor, ...]]":
    """Mini-batches in a fixed order."""
    x, y = data()
    return DataLoader(TensorDataset(x.to(dtype), y), batch_size=batch_size)


def train(closure: bool, epochs: int = EPOCHS) -> nn.Sequential:
    """The network after a plain loop."""
    model, loss_fn = network(), nn.CrossEntropyLoss()
    optimizer = KFAC(model, loss_fn)
    for _ in range(epochs):
        for x, y in loader():

            def compute(x: Tensor = x, y: Tensor = y) -> Tensor:
                optimizer.zero_grad()
                loss: Tensor = loss_fn(model(x), y)
                loss.backward()
                return loss

            if closure:
                optimizer.step(compute)
            else:
                compute()
                optimizer.step()
    return model


def loss_of(model: nn.Module) -> float:
    """The cross-entropy on all examples."""
    x, y = data()
    with torch.no_grad():
        return float(nn.functional.cross_entropy(model.double()(x), y))


def assert_same(one: nn.Module, other: nn.Module) -> None:
    """Parameters agree to 1e-6."""
    for p, q in zip(one.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-6)
