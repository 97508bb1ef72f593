"""The first function of Friedman (1991), a regression that needs no download.

The regression sets that come with Python's libraries have a few hundred cases, too few to tell optimizers
apart. Without noise the error can go to 0, so that it measures optimisation and not overfitting.
"""

import math

import torch
from torch import Tensor

INPUTS = 10
"""Number of inputs; the last five say nothing."""
SEED = 1991
MEAN, DEVIATION = 14.41, 4.88
"""Mean and standard deviation of y over the cube: anyone would scale it, and an optimizer
that suffers from an offset would lose to the data instead of to its peers."""


def friedman(cases: int) -> tuple[Tensor, Tensor]:
    """Inputs (cases, 10) and targets (cases, 1), all scaled to mean 0 and variance 1; always the same.

    y = 10 sin(π x₁ x₂) + 20 (x₃ − ½)² + 10 x₄ + 5 x₅, x uniform in [0, 1]
    """
    generator = torch.Generator().manual_seed(SEED)
    x = torch.rand(cases, INPUTS, generator=generator)
    y = 10 * torch.sin(math.pi * x[:, 0] * x[:, 1]) + 20 * (x[:, 2] - 0.5) ** 2
    y = y + 10 * x[:, 3] + 5 * x[:, 4]
    return (x - 0.5) * math.sqrt(12), ((y - MEAN) / DEVIATION).unsqueeze(1)
