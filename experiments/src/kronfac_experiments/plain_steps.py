"""Steps and nothing else, for clocks that should see the optimizer alone.

Everything that trains takes its steps here, but for `optimizers.ClosureStepper`, which serves optimizers
that ask for the loss several times.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from kronfac import KFAC


class Steps(Protocol):
    """An optimizer on a model and a loss."""

    def step(self, x: Tensor, y: Tensor) -> object:
        """One step on a mini-batch."""
        ...


@dataclass(frozen=True)
class KfacSteps:
    """Steps of K-FAC with the closure that it makes itself.

    Args:
        optimizer: With its model and loss.
        chunk: Examples at a time, if a mini-batch is larger.
    """

    optimizer: KFAC
    chunk: int | None = None

    def step(self, x: Tensor, y: Tensor) -> None:
        """One step on a mini-batch."""
        self.optimizer.step(self.optimizer.closure(x, y, chunk=self.chunk))


@dataclass(frozen=True)
class GradientSteps:
    """Steps of an optimizer that needs the gradient alone."""

    model: nn.Module
    loss: nn.Module
    optimizer: torch.optim.Optimizer

    def step(self, x: Tensor, y: Tensor) -> None:
        """One step on a mini-batch."""
        self.optimizer.zero_grad()
        self.loss(self.model(x), y).backward()
        self.optimizer.step()
