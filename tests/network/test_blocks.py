"""Which block a unit gets by its kind and size, and what the first pass changes about it."""

import pytest
import torch
from torch import nn

from kronfac import KFAC
from kronfac.curvature import (
    DenseBlock,
    DiagonalBlock,
    GroupedKroneckerBlock,
    KroneckerBlock,
    KroneckerSumBlock,
)
from kronfac.model import Blocks
from tests.conftest import normal

CHOICES = {
    "a small matrix": (("matrix", 3, 4), KroneckerBlock()),
    "a wide head": (("matrix", 5000, 64), KroneckerBlock(diagonal_grads=True)),
    "a small embedding": (("embedding", 30, 4), DenseBlock(512)),
    "an embedding": (("embedding", 300, 40), KroneckerBlock(diagonal_grads=True)),
    "small tied weights": (("tied", 10, 20), DenseBlock(512)),
    "tied weights": (("tied", 100, 20), KroneckerSumBlock()),
    "a tied embedding": (
        ("tied embedding", 300, 40),
        KroneckerSumBlock(KroneckerBlock(diagonal_grads=True), KroneckerBlock(diagonal_grads=True)),
    ),
    "a wide tied embedding": (
        ("tied embedding", 50_000, 40),
        KroneckerSumBlock(KroneckerBlock(diagonal_grads=True), KroneckerBlock(diagonal_grads=True)),
    ),
    "a small grouped convolution": (("grouped", 4, 100), DenseBlock(512)),
    "a depthwise convolution": (("grouped", 128, 10), DenseBlock(512)),
    "a grouped convolution": (("grouped", 64, 145), GroupedKroneckerBlock()),
    "a norm": (("elementwise", 64, 2), DenseBlock(512)),
    "a large scale": (("elementwise", 100_000, 1), DiagonalBlock()),
}


@pytest.mark.parametrize(("arguments", "expected"), CHOICES.values(), ids=CHOICES)
def test_a_choice(arguments, expected):
    assert Blocks().choose(*arguments) == expected


def test_a_large_grouped_convolution_trains_with_a_product_per_group():
    """Warnings are errors: the gradient that is rebuilt from its uses is autograd's."""
    torch.manual_seed(0)
    convolution = nn.Conv1d(16, 16, 9, padding=4, groups=2, dtype=torch.float64)
    model = nn.Sequential(convolution, nn.Tanh(), nn.Flatten(), nn.Linear(96, 3).double())
    x, y = normal(20, 16, 6), normal(20, 3, seed=1)
    optimizer = KFAC(model, nn.MSELoss())
    losses = [float(optimizer.step(optimizer.closure(x, y))) for _ in range(8)]
    assert isinstance(optimizer.network.units[0].block, GroupedKroneckerBlock)
    assert losses[-1] < 0.2 * losses[0]
