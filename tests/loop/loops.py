"""Networks with data, and one step of training with and without a closure."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from kronfac import KFAC


class Gpt(nn.Module):
    """Two layers of attention over tokens, and a head."""

    def __init__(self, tokens: int = 11, width: int = 8) -> None:
        super().__init__()
        self.embedding = nn.Embedding(tokens, width)
        layer = nn.TransformerEncoderLayer(width, 2, 16, dropout=0.1, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, tokens)

    def forward(self, x: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        logits: Tensor = self.head(self.layers(self.embedding(x), mask=mask))
        return logits


class Recurrent(nn.Module):
    """An LSTM and a head on its last output."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(3, 6, batch_first=True)
        self.head = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        outputs, _ = self.lstm(x)
        result: Tensor = self.head(outputs[:, -1])
        return result


def perceptron() -> nn.Module:
    """A small multi-layer perceptron."""
    return nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 3))


def convolutional() -> nn.Module:
    """A convolution with BatchNorm and dropout."""
    return nn.Sequential(
        nn.Conv2d(1, 4, 3),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Dropout(0.2),
        nn.Flatten(),
        nn.Linear(4 * 36, 3),
    )


@dataclass(frozen=True)
class Problem:
    """A network, its loss and what goes in."""

    make: Callable[[], nn.Module]
    loss_fn: nn.Module
    inputs: Callable[[], Tensor]
    targets: Callable[[], Tensor]
    flatten: bool = False
    """Whether the loop flattens logits of tokens before it calls the loss."""

    def batches(self, count: int) -> list[tuple[Tensor, Tensor]]:
        """Mini-batches that differ little, so that no step is rejected; the same each time."""
        torch.manual_seed(7)
        x, y = self.inputs(), self.targets()
        orders = [torch.randperm(len(x))[: len(x) * 3 // 4] for _ in range(count)]
        return [(x[order], y[order]) for order in orders]

    def model(self) -> nn.Module:
        """The network, the same each time."""
        torch.manual_seed(3)
        return self.make()

    def loss(self, model: Callable[..., Any], x: Tensor, y: Tensor) -> Tensor:
        """What a loop computes."""
        outputs = model(x)
        if self.flatten:
            outputs, y = outputs[:, :-1].reshape(-1, outputs.shape[-1]), y[:, 1:].reshape(-1)
        loss: Tensor = self.loss_fn(outputs, y)
        return loss


PROBLEMS = {
    "perceptron": Problem(
        perceptron,
        nn.CrossEntropyLoss(),
        lambda: torch.randn(64, 5),
        lambda: torch.randint(3, (64,)),
    ),
    "convolutional": Problem(
        convolutional,
        nn.CrossEntropyLoss(),
        lambda: torch.randn(24, 1, 8, 8),
        lambda: torch.randint(3, (24,)),
    ),
    "gpt": Problem(
        Gpt,
        nn.CrossEntropyLoss(),
        lambda: torch.randint(11, (12, 6)),
        lambda: torch.randint(11, (12, 6)),
        flatten=True,
    ),
    "lstm": Problem(
        Recurrent, nn.MSELoss(), lambda: torch.randn(16, 5, 3), lambda: torch.randn(16, 2)
    ),
}


def step_with_closure(optimizer: KFAC, loss: Callable[[], Tensor]) -> None:
    """One step as for L-BFGS."""

    def closure() -> Tensor:
        optimizer.zero_grad()
        value = loss()
        value.backward()
        return value

    optimizer.step(closure)


def step_without_closure(optimizer: KFAC, loss: Callable[[], Tensor]) -> None:
    """One step as for Adam."""
    optimizer.zero_grad()
    loss().backward()
    optimizer.step()


def same_parameters(a: nn.Module, b: nn.Module) -> bool:
    """Whether two models have the same parameters, to the bit."""
    return all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))
