"""Recurrent layers and cells: one use of each matrix, with the time steps as places."""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import rnn
from torch.testing import assert_close

from kronfac.extend import KroneckerBlock
from kronfac.model import find_units, record_uses
from kronfac.record.discovery import discover
from tests.conftest import batch, network_of, normal
from tests.layers.kit import (
    assert_exact,
    assert_same_steps,
    assert_uses,
    traced,
)
from tests.layers.problems import regression

N = T = 4  # the same: which dimension has the examples does not show in the sizes
KINDS: dict[str, Callable[..., nn.RNNBase]] = {
    "lstm": nn.LSTM,
    "gru": nn.GRU,
    "tanh": nn.RNN,
    "relu": lambda *args, **kwargs: nn.RNN(*args, nonlinearity="relu", **kwargs),
}
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "no bias": {"bias": False},
    "two layers": {"num_layers": 2},
    "bidirectional": {"bidirectional": True, "num_layers": 2},
    "batch first": {"batch_first": True},
    "two layers without bias": {"num_layers": 2, "bidirectional": True, "bias": False},
}
each_kind = pytest.mark.parametrize("kind", KINDS)
each_variant = pytest.mark.parametrize("variant", VARIANTS)


def layer_of(kind: str, **options: Any) -> nn.RNNBase:
    """Three features in, hidden states of three numbers."""
    torch.manual_seed(0)
    return KINDS[kind](3, 3, dtype=torch.float64, **options)


class Sequences(nn.Module):
    """All outputs and last states of a recurrent layer, from its own first states or learned ones."""

    def __init__(self, layer: nn.RNNBase, given: bool = False) -> None:
        super().__init__()
        self.layer, self.given = layer, given

    def forward(self, x: Tensor) -> Tensor:
        first = self.layer.batch_first
        h = None
        if self.given:
            count = self.layer.num_layers * (1 + self.layer.bidirectional)
            h = x.new_ones(count, len(x), 3) * x[:, 0, :1]
            if isinstance(self.layer, nn.LSTM):
                h = (h, x.new_ones(count, len(x), 3) * x[:, 0, 1:2])
        outputs, states = self.layer(x if first else x.transpose(0, 1), h)
        outputs = outputs if first else outputs.transpose(0, 1)
        last = states if isinstance(states, tuple) else (states,)
        return torch.cat([outputs.flatten(1), *(s.transpose(0, 1).flatten(1) for s in last)], dim=1)


class Packed(nn.Module):
    """The same for sequences of different lengths: zeros are not part of them."""

    def __init__(self, layer: nn.RNNBase, ordered: bool = True) -> None:
        super().__init__()
        self.layer, self.ordered = layer, ordered

    def forward(self, x: Tensor) -> Tensor:
        lengths = x.ne(0).all(dim=-1).sum(dim=1)
        packed = rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=self.ordered)
        outputs, states = self.layer(packed)
        padded, _ = rnn.pad_packed_sequence(outputs, batch_first=True, total_length=x.shape[1])
        last = states if isinstance(states, tuple) else (states,)
        return torch.cat([padded.flatten(1), *(s.transpose(0, 1).flatten(1) for s in last)], dim=1)


def of_lengths(*lengths: int) -> Tensor:
    """Sequences (examples, time, 3) of these lengths."""
    x = normal(len(lengths), max(lengths), 3)
    return x * (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).unsqueeze(-1)


@each_kind
@each_variant
def test_uses(kind, variant):
    layer = layer_of(kind, **VARIANTS[variant])
    network = assert_uses(Sequences(layer), normal(N, T, 3))
    names = {name for unit in network.units for name in unit.names}
    assert names == {name for name, _ in network.model.named_parameters()}
    assert all(isinstance(unit.block, KroneckerBlock) for unit in network.units)
    # One use each, however long the sequences are.
    taps = traced(network, normal(N, T, 3)).taps([torch.ones_like(network.model(normal(N, T, 3)))])
    assert [len(uses) for uses in taps] == [1] * len(network.units)


@each_kind
@each_variant
def test_gradients_go_on_through_inputs_and_first_states_that_are_given(kind, variant):
    layer = Sequences(layer_of(kind, **VARIANTS[variant]), given=True)
    assert_uses(nn.Sequential(nn.Linear(3, 3, dtype=torch.float64), layer), normal(N, T, 3))


@each_kind
@each_variant
def test_packed_sequences(kind, variant):
    network = assert_uses(Packed(layer_of(kind, **VARIANTS[variant])), of_lengths(5, 3, 3, 1))
    x = of_lengths(5, 3, 3, 1)
    taps = traced(network, x).taps([torch.ones_like(network.model(x))])
    assert all(len(tap.input_rows()) == 12 for uses in taps for tap in uses)


def test_packed_sequences_in_any_order():
    """Examples are then in the order of their lengths."""
    model, x = Packed(layer_of("lstm", bidirectional=True), ordered=False), of_lengths(1, 5, 3)
    network = assert_uses(model, of_lengths(5, 3, 3, 1))
    total = model(x).sum()
    grads = network.join(torch.autograd.grad(total, network.parameters))
    taps = traced(network, x).taps([torch.ones_like(model(x))])
    for (tap,), V in zip(taps, grads, strict=True):
        assert_close(tap.total(), V)


@each_kind
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("packed", [False, True])
def test_dropout_has_the_masks_of_torch(kind, dtype, packed):
    layer = layer_of(kind, num_layers=3, dropout=0.5, bidirectional=True).to(dtype)
    model = Packed(layer) if packed else Sequences(layer)
    x = (of_lengths(7, 6, 6, 2) if packed else normal(N, T, 3)).to(dtype)
    torch.manual_seed(3)
    expected = model(x)
    torch.manual_seed(3)
    with record_uses([], find_units(model).units, len(x)):
        found = model(x)
    assert_close(found, expected)
    torch.manual_seed(4)
    assert not torch.allclose(model(x), expected)


@each_kind
def test_one_example_at_one_time_makes_its_blocks_exact(kind):
    assert_exact(regression(Sequences(layer_of(kind), given=True), normal(1, 1, 3)))


def test_the_uses_of_a_projected_lstm_are_not_seen():
    model = nn.LSTM(3, 3, proj_size=2, bias=False, dtype=torch.float64)
    with record_uses([], find_units(model).units, N) as seen:
        outputs = model(normal(N, T, 3))[0]
    assert_close(outputs, model(normal(N, T, 3))[0])
    why = "used in torch's lstm, which KFAC does not understand"
    assert seen.unseen == {id(p): why for p in model.parameters()}


def test_outputs_may_be_overwritten():
    class Overwritten(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = layer_of("lstm")

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x.transpose(0, 1))[0].relu_().transpose(0, 1).flatten(1)

    assert_uses(Overwritten(), normal(N, T, 3))


# ---------------------------------------------------------------------------------- written another way


class Head(nn.Module):
    """A recurrent layer, and a linear one at every time."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer, self.head = layer, nn.Linear(3, 2, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        outputs = self.layer(x.transpose(0, 1))[0]
        return self.head(outputs).transpose(0, 1).flatten(1)


CELLS = {"lstm": nn.LSTMCell, "gru": nn.GRUCell, "tanh": nn.RNNCell, "relu": nn.RNNCell}


class Cells(nn.Module):
    """A cell in a loop."""

    def __init__(self, kind: str, parameters: Sequence[Tensor]) -> None:
        super().__init__()
        options = {"nonlinearity": kind} if CELLS[kind] is nn.RNNCell else {}
        self.cell = CELLS[kind](3, 3, dtype=torch.float64, **options)
        with torch.no_grad():
            for p, q in zip(self.cell.parameters(), parameters, strict=True):
                p.copy_(q)

    def forward(self, x: Tensor) -> tuple[Tensor]:
        state: Any = None
        outputs = []
        for step in x:
            state = self.cell(step, state)
            outputs.append(state[0] if isinstance(state, tuple) else state)
        return (torch.stack(outputs),)


@each_kind
def test_it_takes_the_steps_of_cells_in_a_loop(kind):
    first = Head(layer_of(kind))
    second = Head(Cells(kind, list(first.layer.parameters())))
    second.head = copy.deepcopy(first.head)
    x, y = normal(6, T, 3), normal(6, 2 * T, seed=1)
    assert_same_steps(first, second, x, y, nn.MSELoss())


@each_kind
def test_learned_first_states_are_given_up(kind):
    """Their uses are not understood; those of the layer are."""

    class Learned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = layer_of(kind)
            self.first = nn.Parameter(normal(1, 1, 3))

        def forward(self, x: Tensor) -> Tensor:
            h = self.first.expand(1, len(x), 3).contiguous()
            state = (h, h) if kind == "lstm" else h
            return self.layer(x.transpose(0, 1), state)[0].transpose(0, 1).flatten(1)

    model, x = Learned(), normal(N + 1, T, 3)
    network = network_of(model)
    (part,) = batch(network, x).passes
    units = {unit.name: unit for unit in discover(network, part).units}
    name = f"rnn_{kind}" if kind in ("tanh", "relu") else kind
    why = f"torch's {name} is given what is computed from it, not the parameter itself"
    assert units.pop("first").why == why
    assert all(unit.observed for unit in units.values())
    r = torch.ones_like(model(x))
    expected = torch.autograd.grad(model(x), network.parameters, r)
    for V, W in zip(traced(network, x).vjp([r]), network.join(expected), strict=True):
        assert_close(V, W)
