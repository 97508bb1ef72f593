"""The networks of `kronfac bench scaling`: chains of equally wide layers, and random cases for them."""

from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor, nn

Inverse = Literal["block_diagonal", "block_tridiagonal"]


@dataclass(frozen=True)
class Sizes:
    """Sizes of a tanh network with a softmax, and of its mini-batch."""

    width: int
    """Units of the input and of every hidden layer."""
    depth: int
    """Layers with weights."""
    batch: int
    outputs: int

    @property
    def widths(self) -> tuple[int, ...]:
        """From inputs to outputs."""
        return (*[self.width] * self.depth, self.outputs)

    def __str__(self) -> str:
        return f"width {self.width}, depth {self.depth}, batch {self.batch}, outputs {self.outputs}"


def network(sizes: Sizes, seed: int) -> nn.Sequential:
    """Glorot and Bengio's (2010) initialisation, made for tanh."""
    generator = torch.Generator().manual_seed(seed)
    modules: list[nn.Module] = []
    for inputs, outputs in pairwise(sizes.widths):
        layer = nn.utils.skip_init(nn.Linear, inputs, outputs)
        assert isinstance(layer, nn.Linear)
        nn.init.xavier_uniform_(layer.weight, generator=generator)
        nn.init.zeros_(layer.bias)
        modules += [layer, nn.Tanh()]
    return nn.Sequential(*modules[:-1])


def cases(sizes: Sizes, seed: int) -> tuple[Tensor, Tensor]:
    """Inputs and classes of one mini-batch; time does not depend on what is in them."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(sizes.batch, sizes.width, generator=generator)
    return x, torch.randint(sizes.outputs, (sizes.batch,), generator=generator)
