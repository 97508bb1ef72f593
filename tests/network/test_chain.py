import pytest
import torch
from torch import nn

from kronfac.curvature import KroneckerBlock
from kronfac.model import LinearAdapter, Network, registry
from kronfac.record import LossCall, ModelCall, Pass
from kronfac.record.chain import chain_network, find_chains
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
    """Three 3 × 3 layers, registered last to first."""

    def __init__(self):
        super().__init__()
        self.c, self.b, self.a = (nn.Linear(3, 3).double() for _ in range(3))


class Chain(Net):
    def forward(self, x):
        return self.c(torch.tanh(self.b(torch.tanh(self.a(x)))))


class TransformedEnds(Net):
    def forward(self, x):
        h = (2 * x).clamp(min=-1)
        h = self.a(h).relu()
        h = self.b(h / h.norm(dim=1, keepdim=True).clamp(min=1))
        return self.c(h.sigmoid()).exp() + 1


class InPlace(Net):
    def forward(self, x):
        return self.c(self.b(self.a(x).relu_()).relu_())


class ByKeyword(Net):
    def forward(self, x, *, scale):
        return self.c(self.b(self.a(x * scale).tanh()).tanh())


class Skip(Net):
    def forward(self, x):
        h = self.a(x).tanh()
        return self.c(h + self.b(h).tanh())


class SkipToOutput(Net):
    def forward(self, x):
        h = self.b(self.a(x).tanh()).tanh()
        return self.c(h) + h


class InputToOutput(Net):
    def forward(self, x):
        return self.c(self.b(self.a(x).tanh()).tanh()) + x


class InputInTheMiddle(Net):
    def forward(self, x):
        return self.c(self.b(self.a(x).tanh() * x).tanh())


class Concatenated(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(3, 2).double(), nn.Linear(5, 2).double()

    def forward(self, x):
        return self.b(torch.cat([self.a(x).tanh(), x], dim=1))


class TwoHeads(Net):
    def forward(self, x):
        h = self.a(x).tanh()
        return torch.cat([self.b(h), self.c(h)], dim=1)


class TwoInputs(Net):
    def forward(self, x, y):
        return self.c(self.a(x) + self.b(y))


class Unused(Net):
    def forward(self, x):
        return self.b(self.a(x).tanh())


class Ignored(Net):
    """Calls all three, but the last one does not see the others."""

    def forward(self, x):
        self.b(self.a(x))
        return self.c(x)


def test_sequential():
    assert order(mlp([3, 4, 3, 2])) == ["0", "2", "4"]
    assert order(nn.Sequential(mlp([3, 4]), nn.Tanh(), nn.Sequential(mlp([4, 2])))) == [
        "0.0",
        "2.0.0",
    ]


def test_one_layer():
    assert order(nn.Linear(3, 2).double()) == [""]


@pytest.mark.parametrize("model", [Chain, TransformedEnds, InPlace])
def test_layers_come_in_the_order_of_their_calls(model):
    assert order(model()) == ["a", "b", "c"]


def test_inputs_by_keyword():
    x = normal(5, 3)
    assert order(ByKeyword(), x, scale=torch.full((5, 3), 2.0).double()) == ["a", "b", "c"]


def test_frozen_layers_in_between_are_looked_through():
    model = Chain()
    model.b.requires_grad_(False)
    assert order(model) == ["a", "c"]


def pieces(model, *args):
    """The chains of a network, by name, and why they do not go on."""
    args = args or (normal(5, 3),)
    network = network_of(model)
    terms = network.objective.declare(model(*args).shape)
    part = Pass((ModelCall(args, {}, outputs=(0,)),), (LossCall(0, terms),))
    found = find_chains(network, part)
    names = [unit.name for unit in network.units]
    assert not any(module._forward_hooks for module in model.modules())
    return (
        [[names[n] for n in piece] for piece in found.pieces],
        {names[n]: why for n, why in found.breaks.items()},
    )


SEVERAL = "it is fed by several layers, or by the input too"


@pytest.mark.parametrize(
    ("model", "chains", "breaks"),
    [
        (Skip, ["a", "b", "c"], {"b": "'a' before it feeds something else too", "c": SEVERAL}),
        (SkipToOutput, ["ab", "c"], {"c": "'b' before it feeds something else too"}),
        (InputToOutput, ["abc"], {}),
        (InputInTheMiddle, ["a", "bc"], {"b": SEVERAL}),
        (Concatenated, ["a", "b"], {"b": SEVERAL}),
        (
            TwoHeads,
            ["a", "b", "c"],
            dict.fromkeys("bc", "'a' before it feeds something else too"),
        ),
        (Ignored, ["ab", "c"], {}),
        (Unused, ["ab", "c"], {"c": "it is not used"}),
    ],
)
def test_chains_end_at_branches(model, chains, breaks):
    assert pieces(model()) == ([list(chain) for chain in chains], breaks)


def test_two_inputs_that_go_to_different_layers():
    found, breaks = pieces(TwoInputs(), normal(5, 3), normal(5, 3, seed=1))
    assert (found, breaks) == ([["a"], ["b"], ["c"]], {"c": SEVERAL})


def test_a_layer_that_is_used_twice_is_in_no_chain():
    class Twice(Net):
        def forward(self, x):
            return self.c(self.b(self.a(self.a(x))))

    found, breaks = pieces(Twice())
    assert found == [["a"], ["b", "c"]]
    assert breaks == {
        "a": "it is used more than once",
        "b": "'a' before it: it is used more than once",
    }


def test_a_layer_that_is_used_at_several_places_is_in_no_chain():
    found, breaks = pieces(mlp([3, 4, 2]), normal(5, 2, 3))
    assert found == [["0"], ["2"]]
    assert breaks["2"] == "it is used at 2 places of an example"


def test_a_layer_with_several_places_is_in_a_chain_if_they_are_reduced(monkeypatch):
    class Reduced(LinearAdapter):
        def block(self, module):
            return KroneckerBlock("reduce")

    monkeypatch.setitem(registry._ADAPTERS, nn.Linear, (Reduced(), False))
    assert pieces(mlp([3, 4, 2]), normal(5, 2, 3)) == ([["0", "2"]], {})


def test_units_without_uses_come_behind_the_chain_and_are_not_linked():
    class Scaled(Net):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(3, dtype=torch.float64))

        def forward(self, x):
            return self.c(self.b(self.a(x).tanh() * self.scale).tanh())

    network = chained(Scaled())
    assert [unit.name for unit in network.units] == ["a", "b", "c", "scale"]
    assert list(network.links) == [True, True, False]


def test_it_does_not_touch_the_mini_batch():
    model, x = mlp([3, 4, 2]), normal(5, 3)
    chained(model, x)
    assert not x.requires_grad
    assert all(p.grad is None for p in model.parameters())
    assert not any(module._forward_hooks for module in model.modules())
