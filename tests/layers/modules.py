"""Small modules that random networks are made of; widths are the same throughout."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from tests.conftest import normal

EXAMPLES, LENGTH, WIDTH, CHANNELS, SIDE, DEPTH, WORDS = 3, 4, 3, 2, 5, 3, 6


def perturbed(module: nn.Module) -> nn.Module:
    """With other scales than 1 and shifts than 0."""
    with torch.no_grad():
        for i, p in enumerate(module.parameters()):
            p.add_(0.3 * normal(*p.shape, seed=i).to(p.dtype))
    return module


class Scale(nn.Module):
    """A factor for every feature, or something that is computed from it."""

    def __init__(self, *shape: int, function: Callable[[Tensor], Tensor] | None = None) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(shape))
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return x * (self.scale if self.function is None else self.function(self.scale))


class Shift(nn.Module):
    """Something added to every feature."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(shape))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.shift


class ClassToken(nn.Module):
    """A token in front of a sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.zeros(1, 1, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.token.expand(len(x), -1, -1), x], dim=1)[:, : x.shape[1]]


class PositionTable(nn.Module):
    """Learned positions from a table that is looked up once for all examples."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(LENGTH + 3, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.table(torch.arange(x.shape[1]).unsqueeze(0))


class Residual(nn.Module):
    """x + f(x)."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)


class TimeFirst(nn.Module):
    """A layer that is called with (time, examples, features)."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x.transpose(0, 1)).transpose(0, 1)


class ByKeyword(nn.Module):
    """A layer that is called with a keyword argument."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(input=x)


class ChannelsFirst(nn.Module):
    """A convolution over a sequence (examples, time, channels)."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x.mT).mT


class Frozen(nn.Module):
    """A layer that is not trained, or only partly."""

    def __init__(self, inner: nn.Module, *names: str) -> None:
        super().__init__()
        self.inner = inner
        for name in names:
            inner.get_parameter(name).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


class LowRank(nn.Module):
    """A frozen layer with a trained low-rank addition."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.down, self.up = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


class SelfAttention(nn.Module):
    """`nn.MultiheadAttention` of a sequence to itself."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, WIDTH, dropout=dropout, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x, need_weights=False)[0]


class Outputs(nn.Module):
    """The outputs of a recurrent layer, without its state."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)[0]


class Einsum(nn.Module):
    """What K-FAC does not understand, and says so."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 2)

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("...i,oi->...o", x, self.weight)
