import pytest
import torch
from torch import nn

from kronfac.errors import UnsupportedModelError
from kronfac.network import LossCall, ModelCall, Network, Pass
from kronfac.network.chain import chain_network
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


@pytest.mark.parametrize(
    ("model", "what"),
    [
        (Skip, "'c' does not depend on 'b' alone"),
        (SkipToOutput, "the model's output does not depend on 'c' alone"),
        (InputToOutput, "the model's output does not depend on 'c' alone"),
        (InputInTheMiddle, "'b' does not depend on 'a' alone"),
        (Concatenated, "'b' does not depend on 'a' alone"),
        (TwoHeads, "'c' does not depend on 'b' alone"),
        (Ignored, "'b'|'c' does not depend on 'b' alone"),
        (Unused, "every layer to be used; 'c' was not"),
    ],
)
def test_anything_but_a_chain_is_refused(model, what):
    model = model()
    with pytest.raises(UnsupportedModelError, match=what):
        order(model)
    assert not any(module._forward_hooks for module in model.modules())


def test_two_inputs_that_go_to_different_layers_are_refused():
    with pytest.raises(UnsupportedModelError, match="does not depend on"):
        order(TwoInputs(), normal(5, 3), normal(5, 3, seed=1))


def test_a_layer_that_is_used_twice_is_refused():
    class Twice(Net):
        def forward(self, x):
            return self.c(self.b(self.a(self.a(x))))

    with pytest.raises(UnsupportedModelError, match="'a'"):
        order(Twice())


def test_a_layer_that_is_used_at_several_places_is_refused():
    with pytest.raises(UnsupportedModelError, match=r"'0' have shape \(5, 2, 3\)"):
        order(mlp([3, 4, 2]), normal(5, 2, 3))


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
    places = {site.name: [number for number, _ in site.columns] for site in network.sites}
    assert places == {"a": [0], "b": [1], "c": [2]}


def test_it_does_not_touch_the_mini_batch():
    model, x = mlp([3, 4, 2]), normal(5, 3)
    chained(model, x)
    assert not x.requires_grad
    assert all(p.grad is None for p in model.parameters())
    assert not any(module._forward_hooks for module in model.modules())
