"""Which layers follow each other."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from kronfac.curvature import KroneckerBlock
from kronfac.model import LinearAdapter, Network, registry
from kronfac.record import LossCall, ModelCall, Pass
from kronfac.record.discovery import chain_network, find_chains
from tests.conftest import mlp, network_of, normal


def chained(model, *args, **kwargs) -> Network:
    args = args or (normal(5, 3),)
    network = network_of(model)
    terms = network.objective.declare(model(*args, **kwargs).shape)
    part = Pass((ModelCall(args, kwargs, outputs=(0,)),), (LossCall(0, terms),))
    with torch.no_grad():
        return chain_network(network, part)


def order(model, *args, **kwargs):
    network = chained(model, *args, **kwargs)
    assert list(network.links) == [True] * (len(network.units) - 1)
    return [unit.name for unit in network.units]


class Net(nn.Module):
    """Three 3 × 3 layers, registered last to first, and what is done with them."""

    def __init__(self, forward: Callable[..., Tensor]) -> None:
        super().__init__()
        self.c, self.b, self.a = (nn.Linear(3, 3).double() for _ in range(3))
        self._forward = forward

    def forward(self, *args: Tensor, **kwargs: Tensor) -> Tensor:
        return self._forward(self, *args, **kwargs)


def normalised(h: Tensor) -> Tensor:
    return h / h.norm(dim=1, keepdim=True).clamp(min=1)


def skip(m: Net, x: Tensor) -> Tensor:
    h = m.a(x).tanh()
    return m.c(h + m.b(h).tanh())


def skip_to_output(m: Net, x: Tensor) -> Tensor:
    h = m.b(m.a(x).tanh()).tanh()
    return m.c(h) + h


def concatenated(m: Net, x: Tensor) -> Tensor:
    return m.b(torch.cat([m.a(x).tanh()[:, :2], x[:, :1]], dim=1))


def two_heads(m: Net, x: Tensor) -> Tensor:
    h = m.a(x).tanh()
    return torch.cat([m.b(h), m.c(h)], dim=1)


def ignored(m: Net, x: Tensor) -> Tensor:
    """Calls all three, but the last one does not see the others."""
    m.b(m.a(x))
    return m.c(x)


CHAINS = {
    "plain": lambda m, x: m.c(m.b(m.a(x).tanh()).tanh()),
    "transformed": lambda m, x: m.c(
        m.b(normalised(m.a((2 * x).clamp(min=-1)).relu())).sigmoid()
    ).exp() + 1,
    "in place": lambda m, x: m.c(m.b(m.a(x).relu_()).relu_()),
}  # fmt: skip


def test_sequential():
    assert order(mlp([3, 4, 3, 2])) == ["0", "2", "4"]
    assert order(nn.Sequential(mlp([3, 4]), nn.Tanh(), nn.Sequential(mlp([4, 2])))) == [
        "0.0",
        "2.0.0",
    ]


def test_one_layer():
    assert order(nn.Linear(3, 2).double()) == [""]


@pytest.mark.parametrize("forward", CHAINS.values(), ids=CHAINS)
def test_layers_come_in_the_order_of_their_calls(forward):
    assert order(Net(forward)) == ["a", "b", "c"]


def test_inputs_by_keyword():
    model = Net(lambda m, x, *, scale: m.c(m.b(m.a(x * scale).tanh()).tanh()))
    scale = torch.full((5, 3), 2.0, dtype=torch.float64)
    assert order(model, normal(5, 3), scale=scale) == ["a", "b", "c"]


def test_frozen_layers_in_between_are_looked_through():
    model = Net(CHAINS["plain"])
    model.b.requires_grad_(False)
    assert order(model) == ["a", "c"]


def pieces(model, *args):
    """The chains of a network, by name."""
    args = args or (normal(5, 3),)
    network = network_of(model)
    terms = network.objective.declare(model(*args).shape)
    part = Pass((ModelCall(args, {}, outputs=(0,)),), (LossCall(0, terms),))
    found = find_chains(network, part)
    assert not any(module._forward_hooks for module in model.modules())
    return [[network.units[n].name for n in piece] for piece in found]


BRANCHES = {
    "skip": (skip, ["a", "b", "c"]),
    "skip to the output": (skip_to_output, ["ab", "c"]),
    "input to the output": (lambda m, x: CHAINS["plain"](m, x) + x, ["abc"]),
    "input in the middle": (lambda m, x: m.c(m.b(m.a(x).tanh() * x).tanh()), ["a", "bc"]),
    "concatenated": (concatenated, ["a", "b", "c"]),
    "two heads": (two_heads, ["a", "b", "c"]),
    "ignored": (ignored, ["ab", "c"]),
    "unused": (lambda m, x: m.b(m.a(x).tanh()), ["ab", "c"]),
    "two inputs": (lambda m, x: m.c(m.a(x) + m.b(x.cos())), ["a", "b", "c"]),
    "used twice": (lambda m, x: m.c(m.b(m.a(m.a(x)))), ["a", "bc"]),
}


@pytest.mark.parametrize(("forward", "chains"), BRANCHES.values(), ids=BRANCHES)
def test_chains_end_at_branches(forward, chains):
    assert pieces(Net(forward)) == [list(chain) for chain in chains]


def test_a_layer_that_is_used_at_several_places_is_in_a_chain_if_they_are_reduced(monkeypatch):
    class Reduced(LinearAdapter):
        def block(self, module):
            return KroneckerBlock("reduce")

    places = normal(5, 2, 3)
    assert pieces(mlp([3, 4, 2]), places) == [["0"], ["2"]]
    monkeypatch.setitem(registry._ADAPTERS, nn.Linear, (Reduced(), False))
    assert pieces(mlp([3, 4, 2]), places) == [["0", "2"]]


def test_normalisation_layers_are_looked_through_and_embeddings_begin_nothing():
    model = nn.Sequential(nn.Embedding(6, 3), nn.Linear(3, 3), nn.LayerNorm(3), nn.Linear(3, 2))
    assert pieces(model.double(), torch.arange(5) % 6) == [["1", "3"], ["0"], ["2"]]


def test_units_without_uses_come_behind_the_chain_and_are_not_linked():
    model = Net(lambda m, x: m.c(m.b(m.a(x).tanh() * m.scale).tanh()))
    model.scale = nn.Parameter(torch.ones(3, dtype=torch.float64))
    network = chained(model)
    assert sorted(unit.name for unit in network.units) == ["a", "b", "c", "scale"]
    assert [unit.name for unit in network.units][-1] == "scale"
    assert list(network.links) == [True, True, False]
