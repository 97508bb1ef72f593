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

from tests.layers.modules import (
    CHANNELS,
    DEPTH,
    EXAMPLES,
    LENGTH,
    SIDE,
    WIDTH,
    WORDS,
    ByKeyword,
    ChannelsFirst,
    ClassToken,
    Einsum,
    Frozen,
    LowRank,
    Outputs,
    PositionTable,
    Residual,
    Scale,
    SelfAttention,
    Shift,
    TimeFirst,
)
from tests.layers.truth import OwnLinear, OwnProduct, Positions

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
    "attention": SelfAttention,
    "residual attention": lambda: Residual(nn.Sequential(nn.LayerNorm(WIDTH), SelfAttention())),
    "TransformerEncoderLayer": lambda: nn.TransformerEncoderLayer(
        WIDTH, 1, 2, dropout=0.0, batch_first=True
    ),
    "LSTM": lambda: Outputs(nn.LSTM(WIDTH, WIDTH, batch_first=True)),
    "GRU": lambda: Outputs(nn.GRU(WIDTH, WIDTH, batch_first=True, bias=False)),
    "RNN": lambda: Outputs(nn.RNN(WIDTH, WIDTH, batch_first=True)),
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
VOLUMES: Table = {
    "Conv3d": lambda: nn.Conv3d(CHANNELS, CHANNELS, (1, 3, 3), padding="same"),
    "Conv3d in groups": lambda: nn.Conv3d(CHANNELS, CHANNELS, 2, padding=1, groups=CHANNELS),
    "GroupNorm": lambda: nn.GroupNorm(CHANNELS, CHANNELS),
    "tanh": nn.Tanh,
    "residual Conv3d": lambda: Residual(nn.Conv3d(CHANNELS, CHANNELS, 3, padding=1, bias=False)),
}
IN_TRAINING: dict[str, Table] = {
    "features": {
        "BatchNorm": lambda: nn.BatchNorm1d(WIDTH),
        "Dropout": lambda: nn.Dropout(0.3),
    },
    "sequences": {
        "Dropout": lambda: nn.Dropout(0.3),
        "attention with dropout": lambda: SelfAttention(dropout=0.2),
    },
    "images": {
        "BatchNorm": lambda: nn.BatchNorm2d(CHANNELS),
        "Dropout": lambda: nn.Dropout2d(0.3),
    },
    "volumes": {"BatchNorm": lambda: nn.BatchNorm3d(CHANNELS, momentum=None)},
}
"""Layers that draw, or take the examples together: no dense definition is an example's own."""
TIED = (nn.Linear, nn.Conv2d, nn.Embedding)
PICTURES = ("images", "volumes")


@dataclass(frozen=True)
class Architecture:
    """What a network is made of, in words; hypothesis prints it if something fails."""

    data: str
    """`"features"`, `"sequences"`, `"tokens"`, `"bags"`, `"images"` or `"volumes"`."""
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

    def build(self, seed: int = 0) -> nn.Module:
        """The network in float64, with parameters of no particular value."""
        torch.manual_seed(seed)
        model = Assembled(self).double()
        with torch.no_grad():
            for p in model.parameters():
                p.add_(0.2 * torch.randn_like(p))
        return model

    def inputs(self, examples: int = EXAMPLES, seed: int = 7) -> Tensor:
        """A mini-batch."""
        generator = torch.Generator().manual_seed(seed)
        shape = {
            "features": (examples, WIDTH),
            "sequences": (examples, LENGTH, WIDTH),
            "images": (examples, CHANNELS, SIDE, SIDE),
            "volumes": (examples, CHANNELS, *(DEPTH,) * 3),
        }.get(self.data)
        if shape is None:
            return torch.randint(WORDS, (examples, LENGTH), generator=generator)
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    def outputs(self, examples: int) -> tuple[int, ...]:
        """The shape of what the network returns."""
        places = (LENGTH,) if self.per_place else ()
        return examples, *places, WORDS if self.tied_head else 2


class Assembled(nn.Module):
    """The network of an architecture."""

    def __init__(self, spec: Architecture) -> None:
        super().__init__()
        self.spec = spec
        table = TABLES[spec.data] | IN_TRAINING.get(spec.data, {})
        self.first = (TOKENS | BAGS)[spec.first]() if spec.first else nn.Identity()
        self.layers = nn.Sequential(*(table[name]() for name in spec.layers))
        self.last = self.layers[0] if spec.again else nn.Identity()
        width = CHANNELS if spec.data in PICTURES else WIDTH
        self.head = nn.Linear(width, WORDS if spec.tied_head else 2)
        if spec.tied_head:
            self.head.weight = self.first.weight
        if spec.tied:
            _tie(self.layers)

    def forward(self, x: Tensor) -> Tensor:
        h = self.layers(self.first(x) if self.spec.first else x.clone())
        h = self.last(h)
        if self.spec.data in PICTURES:
            h = torch.tanh(h).flatten(2).mean(dim=2)
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
    "volumes": VOLUMES,
}

KINDS = {
    f"{data}: {name}": Architecture(data, (name,))
    for data, table in TABLES.items()
    for name in table
    if not name.startswith("residual") and data not in ("tokens", "bags")
} | {
    **{f"tokens: {name}": Architecture("tokens", ("tanh",), first=name) for name in TOKENS},
    **{f"bags: {name}": Architecture("bags", ("tanh",), first=name) for name in BAGS},
    "tied": Architecture("sequences", ("Linear", "tanh", "Linear"), tied=True),
    "tied embedding": Architecture("tokens", ("tanh",), first="Embedding", tied_head=True),
    "used twice": Architecture("sequences", ("Linear", "tanh"), again=True),
}
"""Every kind of layer by itself, in front of the head."""


@st.composite
def architectures(draw: st.DrawFn, most: int = 4, in_training: bool = False) -> Architecture:
    """Random ones of so many layers at `most`; with dropout and BatchNorm if `in_training`."""
    data = draw(st.sampled_from(sorted(TABLES)))
    names = sorted(TABLES[data] | (IN_TRAINING.get(data, {}) if in_training else {}))
    layers = draw(st.lists(st.sampled_from(names), min_size=1, max_size=most))
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
