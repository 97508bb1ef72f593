"""The networks of `kronfac bench growth`: transformers and residual networks of any size."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from kronfac_experiments.bench.race.networks.models import GPT, ResidualBlock

Kind = Literal["transformer", "resnet"]
SYMBOLS, HEADS, CLASSES = 64, 4, 10


@dataclass(frozen=True)
class Size:
    """Size of a network and of its mini-batch."""

    kind: Kind
    width: int
    """Width of the shortcut: numbers of a token, or channels."""
    depth: int
    """Blocks."""
    extent: int
    """Tokens of a sequence, or pixels of an image's side."""
    batch: int

    def __str__(self) -> str:
        extent = "tokens" if self.kind == "transformer" else "pixels"
        return f"{self.kind}, width {self.width}, depth {self.depth}, {self.extent} {extent}"


def network(size: Size, seed: int) -> nn.Module:
    """The network, initialised."""
    torch.manual_seed(seed)
    if size.kind == "transformer":
        return GPT(SYMBOLS, size.extent, size.width, size.depth, HEADS)
    blocks = [ResidualBlock(size.width, size.width, stride=1) for _ in range(size.depth)]
    first = nn.Conv2d(3, size.width, 3, padding=1, bias=False)
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(size.width, CLASSES)]
    return nn.Sequential(first, nn.BatchNorm2d(size.width), nn.ReLU(), *blocks, *head)


def examples(size: Size, seed: int) -> tuple[Tensor, Tensor]:
    """One mini-batch; time does not depend on what is in it."""
    generator = torch.Generator().manual_seed(seed)
    if size.kind == "transformer":
        shape = (size.batch, size.extent)
        x, y = (torch.randint(SYMBOLS, shape, generator=generator) for _ in range(2))
        return x, y
    x = torch.randn(size.batch, 3, size.extent, size.extent, generator=generator)
    return x, torch.randint(CLASSES, (size.batch,), generator=generator)


def builder(size: Size, seed: int) -> Callable[[], nn.Module]:
    """Makes the network, the same each time."""
    return lambda: network(size, seed)
