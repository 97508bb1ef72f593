"""A is that of what weights were multiplied with; equivalent networks take equal steps."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from kronfac import WhitenedMomentum
from kronfac.whitened_momentum import InputFactors
from tests.networks import libraries

ALL_ROWS = InputFactors(interval=1, rows=None)
CLOSE = {"rtol": 1e-9, "atol": 1e-10}


def steps(model: nn.Module, x: Tensor, count: int = 4, **settings: object) -> WhitenedMomentum:
    """A few steps on a made-up loss."""
    settings = {"method": "polar", "inputs": ALL_ROWS, **settings}
    optimizer = WhitenedMomentum(model, 0.02, **settings)
    for k in range(count):
        optimizer.zero_grad()
        z = model(x)
        z = z[0] if isinstance(z, tuple) else z
        weights = torch.linspace(-1, 1, z.numel(), dtype=z.dtype).sin().view_as(z)
        # Small: rounding in gradients that are zero, as of a key's bias, is to be small beside Adam's ε.
        (1e-3 * (k + 1) * (z.square().mean() + (z * weights).sum())).backward()
        optimizer.step()
    return optimizer


def factor(optimizer: WhitenedMomentum, p: Tensor) -> Tensor:
    return optimizer.state[p]["A"]


def mean_square(rows: Tensor) -> Tensor:
    return rows.mT @ rows / rows.shape[-2]


def test_of_convolutions_the_rows_are_patches():
    torch.manual_seed(0)
    model = nn.Conv2d(4, 12, 3, padding=1, stride=2, groups=2).double()
    x = torch.randn(5, 4, 7, 7).double()
    optimizer = steps(model, x, 1)
    patches = functional.unfold(x, 3, padding=1, stride=2).mT.reshape(-1, 2, 18).transpose(0, 1)
    torch.testing.assert_close(factor(optimizer, model.weight), mean_square(patches), **CLOSE)


def test_of_recurrent_layers_the_rows_are_time_steps():
    torch.manual_seed(0)
    model = nn.LSTM(3, 4).double()
    x = torch.randn(6, 5, 3).double()
    h = model(x)[0].detach()
    optimizer = steps(model, x, 1)
    before = torch.cat([torch.zeros_like(h[:1]), h[:-1]]).flatten(0, 1)
    for p, rows in ((model.weight_ih_l0, x.flatten(0, 1)), (model.weight_hh_l0, before)):
        torch.testing.assert_close(factor(optimizer, p)[0], mean_square(rows), **CLOSE)


def test_uses_of_a_repeated_weight_and_micro_batches_are_averaged():
    torch.manual_seed(0)
    layer = nn.Linear(4, 4).double()
    model = nn.Sequential(layer, nn.Tanh(), layer)
    batches = torch.randn(2, 5, 4).double()
    optimizer = WhitenedMomentum(model, method="polar", inputs=ALL_ROWS)
    for x in batches:
        model(x).square().sum().backward()
    x = batches.flatten(0, 1)
    with torch.no_grad():  # it is not a pass that is trained on
        rows = torch.cat([x, layer(x).tanh()])
    optimizer.step()
    torch.testing.assert_close(factor(optimizer, layer.weight)[0], mean_square(rows), **CLOSE)


# --------------------------------------------------------------------------------- equivalent networks


class Unfolded(nn.Module):
    """A convolution as a product with patches."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(27, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(functional.unfold(x, 3).mT).mT.unflatten(-1, (4, 4))


class Attention(nn.Module):
    """Self-attention by one layer for each of queries, keys and values, or by one for all."""

    def __init__(self, form: str = "separate") -> None:
        super().__init__()
        self.form = form
        if form == "separate":
            self.q, self.k, self.v = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        else:
            self.qkv = nn.Linear(8, 24)
        self.out = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        if self.form == "separate":
            parts = self.q(x), self.k(x), self.v(x)
        elif self.form == "chunk":
            parts = self.qkv(x).chunk(3, dim=-1)
        else:
            parts = self.qkv(x).reshape(*x.shape[:2], 3, 2, 4).permute(2, 0, 1, 3, 4).unbind()
        q, k, v = (t.reshape(*x.shape[:2], 2, 4).transpose(1, 2) for t in parts)
        heads = functional.scaled_dot_product_attention(q, k, v)
        return self.out(heads.transpose(1, 2).flatten(2))


class Torchs(nn.Module):
    """Torch's attention."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        z: Tensor = self.inner(x, x, x, need_weights=False)[0]
        return z


class Cells(nn.Module):
    """A recurrent layer, one step at a time."""

    def __init__(self, cell: type[nn.Module]) -> None:
        super().__init__()
        self.cell = cell(3, 4)

    def forward(self, x: Tensor) -> Tensor:
        state, outputs = None, []
        for each in x:
            state = self.cell(each, state)
            outputs.append(state[0] if isinstance(state, tuple) else state)
        return torch.stack(outputs)


class Gates(nn.Module):
    """An LSTM, written with products whose results are split."""

    def __init__(self) -> None:
        super().__init__()
        self.ih, self.hh = nn.Linear(3, 16), nn.Linear(4, 16)

    def forward(self, x: Tensor) -> Tensor:
        h = c = x.new_zeros(x.shape[1], 4)
        outputs = []
        for each in x:
            (i, f, g, o), (a, b, d, e) = self.ih(each).chunk(4, 1), self.hh(h).chunk(4, 1)
            c = torch.sigmoid(f + b) * c + torch.sigmoid(i + a) * torch.tanh(g + d)
            h = torch.sigmoid(o + e) * torch.tanh(c)
            outputs.append(h)
        return torch.stack(outputs)


class Stored(nn.Module):
    """A layer whose weight is stored as (in, out)."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.empty(8, 5)), nn.Parameter(torch.empty(5))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight + self.bias


IMAGES, TOKENS, TIMES = (3, 3, 6, 6), (3, 5, 8), (5, 3, 3)
PAIRS: dict[str, tuple[Callable[[], nn.Module], Callable[[], nn.Module], tuple[int, ...]]] = {
    "convolution": (Unfolded, lambda: nn.Conv2d(3, 6, 3), IMAGES),
    "torch's attention": (Attention, Torchs, TOKENS),
    "packed attention": (Attention, lambda: Attention("chunk"), TOKENS),
    "timm's attention": (Attention, lambda: Attention("reshape"), TOKENS),
    "LSTM": (lambda: Cells(nn.LSTMCell), lambda: nn.LSTM(3, 4), TIMES),
    "LSTM by hand": (Gates, lambda: nn.LSTM(3, 4), TIMES),
    "GRU": (lambda: Cells(nn.GRUCell), lambda: nn.GRU(3, 4), TIMES),
    "x W": (lambda: nn.Linear(8, 5), Stored, TOKENS),
    "transposed convolution": (
        lambda: nn.ConvTranspose2d(3, 6, 1),
        lambda: nn.Conv2d(3, 6, 1),
        IMAGES,
    ),
}  # fmt: skip


def values(model: nn.Module, like: nn.Module) -> list[Tensor]:
    """The parameters of one model in the shapes of the other's."""
    given, found = [p.detach() for p in model.parameters()], []
    wanted = list(like.parameters())
    if len(given) > len(wanted):  # packed: queries, keys and values
        weights, biases = torch.cat(given[0:6:2]), torch.cat(given[1:6:2])
        given = [weights, biases, *given[6:]]
    if len(wanted) == 4 and len(given) == 4 and given[1].dim() != wanted[1].dim():
        given = [given[0], given[2], given[1], given[3]]
    for value, p in zip(given, wanted, strict=True):
        swap = value.dim() > 1 and value.shape != p.shape and value.numel() == p.numel()
        swap = swap and value.shape[0] != p.shape[0]
        found.append((value.transpose(0, 1) if swap else value).reshape(p.shape))
    return found


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("method", ["polar", "whitened"])
def test_equivalent_networks_take_equal_steps(name, method):
    first, second, shape = PAIRS[name]
    torch.manual_seed(3)
    one, other = first().double(), second().double()
    with torch.no_grad():
        for p in one.parameters():
            p.copy_(torch.randn_like(p) / 2)
        for p, value in zip(other.parameters(), values(one, other), strict=True):
            p.copy_(value)
    x = torch.randn(shape).double()
    before = [p.detach().clone() for p in other.parameters()]
    for model in (one, other):
        steps(model, x, method=method, weight_decay=0.0)
    for p, value, start in zip(other.parameters(), values(one, other), before, strict=True):
        moved = torch.ones_like(p, dtype=torch.bool)
        if "attention" in name and p.shape == (24,):
            moved[8:16] = (
                False  # no output depends on the keys' bias: its gradient is rounding error
            )
        torch.testing.assert_close(p.detach()[moved], value[moved], rtol=1e-7, atol=1e-8)
        assert not torch.equal(p, start)


def test_hugging_face_and_lora_have_methods_of_their_own():
    conv1d = libraries.transformers().pytorch_utils.Conv1D

    class Adapted(nn.Module):
        def __init__(self):
            super().__init__()
            self.frozen, self.head = conv1d(24, 8), nn.Linear(8, 2)
            self.down, self.up = nn.Linear(8, 3, bias=False), nn.Linear(3, 24, bias=False)
            self.frozen.requires_grad_(False)

        def forward(self, x):
            q, k, v = (self.frozen(x) + self.up(self.down(x))).split(8, dim=-1)
            return self.head(q * k + v)

    model = Adapted()
    optimizer = steps(model, torch.randn(6, 50, 8), method="auto")
    assert optimizer.report.methods["polar"] == ["down.weight", "up.weight"]
    assert not optimizer.state[model.frozen.weight]
    model.frozen.requires_grad_(True)
    optimizer.zero_grad()
    model(torch.randn(6, 50, 8)).sum().backward()
    optimizer.step()
    state = optimizer.state[model.frozen.weight]
    assert "frozen.weight" in optimizer.report.methods["polar"]
    assert state["treatment"][2:] == (1, 1, 1)
    alone = conv1d(24, 8)
    split = nn.Sequential(alone, nn.GLU(), nn.Linear(12, 2))
    assert steps(split, torch.randn(50, 8)).state[alone.weight]["treatment"][2:] == (1, 1, 1)
