"""Random small networks out of all kinds of layers, for hypothesis.

Widths are the same throughout, so that any layer can be used again further on, or share its weight. A new
kind of layer is one line in one of the tables.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

from tests.layers.truth import OwnLinear, OwnProduct, Positions

EXAMPLES, LENGTH, WIDTH, CHANNELS, SIDE, WORDS = 3, 4, 3, 2, 5, 6


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


class Einsum(nn.Module):
    """What K-FAC does not understand, and says so."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 2)

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("...i,oi->...o", x, self.weight)


Table = dict[str, Callable[[], nn.Module]]

FEATURES: Table = {
    "Linear": lambda: nn.Linear(WIDTH, WIDTH),
    "Linear without bias": lambda: nn.Linear(WIDTH, WIDTH, bias=False),
    "a layer by keyword": lambda: ByKeyword(nn.Linear(WIDTH, WIDTH)),
    "F.linear": lambda: OwnLinear(WIDTH, WIDTH),
    "x @ W": lambda: OwnProduct(WIDTH, WIDTH),
    "frozen weight": lambda: Frozen(nn.Linear(WIDTH, WIDTH), "weight"),
    "frozen bias": lambda: Frozen(nn.Linear(WIDTH, WIDTH), "bias"),
    "frozen layer": lambda: Frozen(nn.Linear(WIDTH, WIDTH), "weight", "bias"),
    "low rank": LowRank,
    "LayerNorm": lambda: nn.LayerNorm(WIDTH),
    "LayerNorm without bias": lambda: nn.LayerNorm(WIDTH, bias=False),
    "RMSNorm": lambda: nn.RMSNorm(WIDTH),
    "PReLU": nn.PReLU,
    "scale": lambda: Scale(WIDTH),
    "one number": Scale,
    "log scale": lambda: Scale(WIDTH, function=torch.exp),
    "shift": lambda: Shift(WIDTH),
    "einsum": Einsum,
    "tanh": nn.Tanh,
    "ReLU in place": lambda: nn.ReLU(inplace=True),
    "GELU": nn.GELU,
    "Dropout in eval()": lambda: nn.Dropout(0.5).eval(),
    "residual Linear": lambda: Residual(nn.Linear(WIDTH, WIDTH)),
    "residual branch": lambda: Residual(
        nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Tanh(), Scale(WIDTH))
    ),
}
SEQUENCES: Table = {
    **FEATURES,
    "positions": lambda: Positions(LENGTH, WIDTH),
    "table of positions": PositionTable,
    "class token": ClassToken,
    "time first": lambda: TimeFirst(nn.Linear(WIDTH, WIDTH)),
    "scale with time first": lambda: TimeFirst(Scale(WIDTH)),
    "LayerNorm with time first": lambda: TimeFirst(nn.LayerNorm(WIDTH)),
    "Conv1d": lambda: ChannelsFirst(nn.Conv1d(WIDTH, WIDTH, 3, padding=1)),
    "Conv1d, circular": lambda: ChannelsFirst(
        nn.Conv1d(WIDTH, WIDTH, 3, padding=1, padding_mode="circular", bias=False)
    ),
    "causal Conv1d": lambda: ChannelsFirst(
        nn.Sequential(nn.ConstantPad1d((2, 0), 0.0), nn.Conv1d(WIDTH, WIDTH, 2, dilation=2))
    ),
}
TOKENS: Table = {
    "Embedding": lambda: nn.Embedding(WORDS, WIDTH),
    "Embedding with padding": lambda: nn.Embedding(WORDS, WIDTH, padding_idx=0),
}
BAGS: Table = {
    "sums": lambda: nn.EmbeddingBag(WORDS, WIDTH, mode="sum"),
    "means": lambda: nn.EmbeddingBag(WORDS, WIDTH, mode="mean"),
}
IMAGES: Table = {
    "Conv2d": lambda: nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1),
    "Conv2d without bias": lambda: nn.Conv2d(
        CHANNELS, CHANNELS, (1, 3), padding="same", bias=False
    ),
    "Conv2d with stride": lambda: nn.Conv2d(CHANNELS, CHANNELS, 3, padding=(1, 2), stride=(1, 2)),
    "Conv2d, dilated": lambda: nn.Conv2d(CHANNELS, CHANNELS, 2, padding=1, dilation=2),
    "Conv2d, reflected": lambda: nn.Conv2d(
        CHANNELS, CHANNELS, 3, padding=1, padding_mode="reflect"
    ),
    "one by one": lambda: nn.Conv2d(CHANNELS, CHANNELS, 1),
    "depthwise": lambda: nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1, groups=CHANNELS),
    "ConvTranspose2d": lambda: nn.ConvTranspose2d(CHANNELS, CHANNELS, 3, padding=1),
    "ConvTranspose2d with stride": lambda: nn.ConvTranspose2d(
        CHANNELS, CHANNELS, 2, stride=2, padding=2, output_padding=1
    ),
    "depthwise ConvTranspose2d": lambda: nn.ConvTranspose2d(
        CHANNELS, CHANNELS, 2, groups=CHANNELS, bias=False
    ),
    "GroupNorm": lambda: nn.GroupNorm(1, CHANNELS),
    "InstanceNorm": lambda: nn.InstanceNorm2d(CHANNELS, affine=True),
    "BatchNorm in eval()": lambda: nn.BatchNorm2d(CHANNELS).eval(),
    "PReLU per channel": lambda: nn.PReLU(CHANNELS),
    "scale per channel": lambda: Scale(CHANNELS, 1, 1),
    "shift per channel": lambda: Shift(1, CHANNELS, 1, 1),
    "frozen kernel": lambda: Frozen(nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1), "weight"),
    "tanh": nn.Tanh,
    "ReLU in place": lambda: nn.ReLU(inplace=True),
    "residual Conv2d": lambda: Residual(nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1)),
    "residual branch": lambda: Residual(
        nn.Sequential(nn.GroupNorm(1, CHANNELS), nn.Conv2d(CHANNELS, CHANNELS, 1), nn.Tanh())
    ),
}
TIED = (nn.Linear, nn.Conv2d, nn.Embedding)


@dataclass(frozen=True)
class Architecture:
    """What a network is made of, in words; hypothesis prints it if something fails."""

    data: str
    """`"features"`, `"sequences"`, `"tokens"`, `"bags"` or `"images"`."""
    layers: tuple[str, ...]
    """Names in the table for that kind of data."""
    first: str = ""
    """The lookup, of tokens."""
    again: bool = False
    """Whether the first layer is used once more, at the end."""
    tied: bool = False
    """Whether the first two layers of one type share their weights."""
    tied_head: bool = False
    """Whether the head has the weight of the embedding."""
    per_place: bool = False
    """Whether every place of a sequence has outputs of its own."""

    def build(self) -> nn.Module:
        """The network in float64, with parameters of no particular value."""
        torch.manual_seed(0)
        model = Assembled(self).double()
        with torch.no_grad():
            for p in model.parameters():
                p.add_(0.2 * torch.randn_like(p))
        return model

    def inputs(self) -> Tensor:
        """A mini-batch."""
        generator = torch.Generator().manual_seed(7)
        shape = {
            "features": (EXAMPLES, WIDTH),
            "sequences": (EXAMPLES, LENGTH, WIDTH),
            "images": (EXAMPLES, CHANNELS, SIDE, SIDE),
        }.get(self.data)
        if shape is None:
            return torch.randint(WORDS, (EXAMPLES, LENGTH), generator=generator)
        return torch.randn(shape, generator=generator, dtype=torch.float64)


class Assembled(nn.Module):
    """The network of an architecture."""

    def __init__(self, spec: Architecture) -> None:
        super().__init__()
        self.spec = spec
        table = TABLES[spec.data]
        self.first = (TOKENS | BAGS)[spec.first]() if spec.first else nn.Identity()
        self.layers = nn.Sequential(*(table[name]() for name in spec.layers))
        self.last = self.layers[0] if spec.again else nn.Identity()
        width = CHANNELS if spec.data == "images" else WIDTH
        self.head = nn.Linear(width, WORDS if spec.tied_head else 2)
        if spec.tied_head:
            self.head.weight = self.first.weight
        if spec.tied:
            _tie(self.layers)

    def forward(self, x: Tensor) -> Tensor:
        h = self.layers(self.first(x) if self.spec.first else x.clone())
        h = self.last(h)
        if self.spec.data == "images":
            h = torch.tanh(h).mean(dim=(2, 3))
        elif h.dim() == 3 and not self.spec.per_place:
            h = torch.tanh(h).mean(dim=1)
        return self.head(functional.softsign(h))


def _tie(layers: nn.Module) -> None:
    """Let two layers of one type and shape share a weight."""
    seen: dict[Any, nn.Module] = {}
    for module in layers.modules():
        if isinstance(module, TIED) and module.weight.requires_grad:
            key = type(module), module.weight.shape
            if key in seen:
                module.weight = seen[key].weight
                return
            seen[key] = module


TABLES = {
    "features": FEATURES,
    "sequences": SEQUENCES,
    "tokens": SEQUENCES,
    "bags": FEATURES,
    "images": IMAGES,
}


@st.composite
def architectures(draw: st.DrawFn) -> Architecture:
    """Random ones."""
    data = draw(st.sampled_from(sorted(TABLES)))
    layers = draw(st.lists(st.sampled_from(sorted(TABLES[data])), min_size=1, max_size=4))
    first = {"tokens": TOKENS, "bags": BAGS}.get(data)
    return Architecture(
        data,
        tuple(layers),
        first=draw(st.sampled_from(sorted(first))) if first else "",
        again=draw(st.booleans()),
        tied=draw(st.booleans()),
        tied_head=data in ("tokens", "bags") and draw(st.booleans()),
        per_place=data in ("sequences", "tokens") and draw(st.booleans()),
    )
