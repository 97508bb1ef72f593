"""Small networks and data in float64, and the mini-batches of the recorded runs."""

from collections.abc import Iterator
from itertools import pairwise

import torch
from sklearn import datasets
from torch import Tensor, nn

STEPS = 30


def standardised(x: Tensor) -> Tensor:
    """Columns with mean 0 and deviation 1; a constant one is 0."""
    deviation = x.std(dim=0)
    return (x - x.mean(dim=0)) / torch.where(deviation > 0, deviation, 1)


def cancer() -> tuple[Tensor, Tensor]:
    """Inputs (569, 30) and targets (569, 1)."""
    x, y = map(torch.from_numpy, datasets.load_breast_cancer(return_X_y=True))
    return standardised(x), y.double()[:, None]


def network(widths: tuple[int, ...], activation: type[nn.Module]) -> nn.Sequential:
    """A perceptron, always with the same initial parameters."""
    modules: list[nn.Module] = []
    generator = torch.Generator().manual_seed(0)
    for inputs, outputs in pairwise(widths):
        layer = nn.utils.skip_init(nn.Linear, inputs, outputs, dtype=torch.float64)
        nn.init.normal_(layer.weight, std=inputs**-0.5, generator=generator)
        nn.init.zeros_(layer.bias)
        modules += [layer, activation()]
    return nn.Sequential(*modules[:-1])


def batches(x: Tensor, y: Tensor, examples: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Mini-batches of examples in random order, each drawn anew from all of them."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(STEPS):
        rows = torch.randperm(len(x), generator=generator)[:examples]
        yield x[rows], y[rows]
