"""Every kind of layer, in a small network that ends in a layer of its own. A new kind is one line."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tests.conftest import normal
from tests.layers.modules import ClassToken, Einsum, LowRank, Scale, Shift
from tests.layers.truth import OwnLinear, OwnProduct, Positions

N = 4
"""Examples. No other dimension has as many."""


def perturbed(module: nn.Module) -> nn.Module:
    """With other scales than 1 and shifts than 0."""
    with torch.no_grad():
        for i, p in enumerate(module.parameters()):
            p.add_(0.3 * normal(*p.shape, seed=i).to(p.dtype))
    return module


class Head(nn.Module):
    """Two outputs of every example from whatever a layer returns."""

    def __init__(self, layer: nn.Module, width: int) -> None:
        super().__init__()
        self.layer, self.head = layer, nn.Linear(width, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x)
        h = h[0] if isinstance(h, tuple) else h  # recurrent layers return their state too
        return self.head(torch.tanh(h).flatten(1))


@dataclass(frozen=True)
class Kind:
    """How a layer is made, and what it is called with."""

    make: Callable[[], nn.Module]
    shape: tuple[int, ...]
    words: int = 0
    """The number of words, if it is called with indices."""

    def build(self) -> tuple[nn.Module, Tensor]:
        """The network in float64, and a mini-batch."""
        torch.manual_seed(0)
        x = normal(*self.shape)
        if self.words:
            x = torch.randint(self.words, self.shape, generator=torch.Generator().manual_seed(2))
        layer = self.make().double()
        with torch.no_grad():
            h = layer(x)
            h = h[0] if isinstance(h, tuple) else h
        return perturbed(Head(layer, h.flatten(1).shape[1]).double()), x


class Tied(nn.Module):
    """Two layers with one weight."""

    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 3, bias), nn.Linear(3, 3, bias)
        self.b.weight = self.a.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(self.a(x)))


class Twice(nn.Module):
    """One layer used twice."""

    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        self.a = nn.Linear(3, 3, bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.a(torch.tanh(self.a(x)))


class SelfAttention(nn.Module):
    """`nn.MultiheadAttention` of a sequence to itself."""

    def __init__(self, **options: bool) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True, **options)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x, need_weights=False)[0]


class BilinearOfOne(nn.Module):
    """`nn.Bilinear` of an input with itself."""

    def __init__(self) -> None:
        super().__init__()
        self.bilinear = nn.Bilinear(3, 3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.bilinear(x, torch.tanh(x))


KINDS = {
    "Linear": Kind(lambda: nn.Linear(3, 5), (N, 3)),
    "Linear at places": Kind(lambda: nn.Linear(3, 2, bias=False), (N, 5, 3)),
    "F.linear": Kind(lambda: OwnLinear(3, 2), (N, 5, 3)),
    "x @ W": Kind(lambda: OwnProduct(3, 2), (N, 5, 3)),
    "Conv1d": Kind(lambda: nn.Conv1d(2, 3, 3, stride=2), (N, 2, 9)),
    "Conv2d": Kind(lambda: nn.Conv2d(2, 3, 3, padding=1), (N, 2, 5, 3)),
    "Conv3d": Kind(lambda: nn.Conv3d(1, 2, 2), (N, 1, 3, 2, 3)),
    "Conv2d in groups": Kind(lambda: nn.Conv2d(6, 2, 3, groups=2), (N, 6, 3, 5)),
    "depthwise": Kind(lambda: nn.Conv1d(3, 3, 3, groups=3, padding=1), (N, 3, 5)),
    "ConvTranspose1d": Kind(lambda: nn.ConvTranspose1d(2, 3, 3, stride=2), (N, 2, 3)),
    "ConvTranspose2d": Kind(lambda: nn.ConvTranspose2d(2, 3, 2, padding=1), (N, 2, 3, 3)),
    "ConvTranspose2d in groups": Kind(lambda: nn.ConvTranspose2d(2, 6, 2, groups=2), (N, 2, 2, 3)),
    "Embedding": Kind(lambda: nn.Embedding(7, 3), (N, 5), 7),
    "Embedding with padding": Kind(lambda: nn.Embedding(7, 3, padding_idx=1), (N, 5), 7),
    "EmbeddingBag": Kind(lambda: nn.EmbeddingBag(7, 3), (N, 5), 7),
    "LayerNorm": Kind(lambda: nn.LayerNorm(3), (N, 5, 3)),
    "RMSNorm": Kind(lambda: nn.RMSNorm(3), (N, 5, 3)),
    "GroupNorm": Kind(lambda: nn.GroupNorm(2, 6), (N, 6, 3)),
    "InstanceNorm1d": Kind(lambda: nn.InstanceNorm1d(3, affine=True), (N, 3, 5)),
    "BatchNorm1d in eval()": Kind(lambda: nn.BatchNorm1d(3).eval(), (N, 3)),
    "BatchNorm2d in eval()": Kind(lambda: nn.BatchNorm2d(3).eval(), (N, 3, 2, 2)),
    "PReLU": Kind(nn.PReLU, (N, 3)),
    "PReLU per channel": Kind(lambda: nn.PReLU(3), (N, 3, 5)),
    "scale": Kind(lambda: Scale(3), (N, 5, 3)),
    "log scale": Kind(lambda: Scale(3, function=torch.exp), (N, 5, 3)),
    "shift": Kind(lambda: Shift(5, 3), (N, 5, 3)),
    "positions": Kind(lambda: Positions(5, 3), (N, 5, 3)),
    "class token": Kind(ClassToken, (N, 5, 3)),
    "low rank": Kind(LowRank, (N, 3)),
    "tied": Kind(Tied, (N, 5, 3)),
    "used twice": Kind(Twice, (N, 5, 3)),
    "einsum": Kind(Einsum, (N, 3)),
    "MultiheadAttention": Kind(SelfAttention, (N, 3, 6)),
    "Bilinear": Kind(BilinearOfOne, (N, 3)),
    "LSTM": Kind(lambda: nn.LSTM(2, 3, batch_first=True), (N, 5, 2)),
    "GRU": Kind(lambda: nn.GRU(2, 3, batch_first=True), (N, 5, 2)),
}
