"""A network and the same written in another way take the same steps."""

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.testing import assert_close

from kronfac import Blocks
from kronfac.model import find_units, record_uses
from tests.conftest import normal
from tests.layers.kit import assert_same_steps, fixed
from tests.layers.modules import perturbed
from tests.networks.libraries import transformers

N = 5
each_sharing = pytest.mark.parametrize("sharing", ["expand", "reduce"])


class Head(nn.Module):
    """A layer, an activation, and a last layer that is the same in both."""

    def __init__(self, layer: nn.Module, x: Tensor) -> None:
        super().__init__()
        torch.manual_seed(1)
        with torch.no_grad():
            width = layer(x).flatten(1).shape[1]
        self.layer, self.head = layer, nn.Linear(width, 3, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.layer(x)).flatten(1))


def assert_same_layers(
    one: nn.Module, other: nn.Module, x: Tensor, blocks: Blocks | None = None
) -> None:
    """Before the same head, for both kinds of losses."""
    targets = {nn.MSELoss(): normal(N, 3, seed=2), nn.CrossEntropyLoss(): torch.arange(N) % 3}
    for loss, y in targets.items():
        pair = (copy.deepcopy(Head(layer, x)) for layer in (one, other))
        assert_same_steps(*pair, x, y, loss, blocks=blocks)


def made(module: nn.Module) -> nn.Module:
    return perturbed(module.double())


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


@each_sharing
def test_tied_layers_as_one_that_is_used_twice(sharing):
    once, tied = made(Twice(bias=False)), Tied(bias=False).double()
    with torch.no_grad():
        tied.a.weight.copy_(once.a.weight)
    assert_same_layers(once, tied, normal(N, 2, 3), Blocks(sharing))


class OwnLayer(nn.Module):
    """A user's own module that gives its parameters to torch's function."""

    def __init__(self, layer: nn.Module, function, **options: object) -> None:
        super().__init__()
        for name, p in layer.named_parameters():
            self.register_parameter(name, nn.Parameter(p.detach().clone()))
        self.function, self.options = function, options

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, *self.parameters(), **self.options)


@each_sharing
def test_a_weight_in_a_users_own_module(sharing):
    linear = made(nn.Linear(3, 4, bias=False))
    own = OwnLayer(linear, functional.linear)
    assert_same_layers(linear, own, normal(N, 2, 3), Blocks(sharing))


@pytest.mark.parametrize("dense_limit", [0, 512])
@each_sharing
def test_a_kernel_in_a_users_own_module(sharing, dense_limit):
    conv = made(nn.Conv2d(2, 3, 3, padding=1, bias=False))
    own = OwnLayer(conv, functional.conv2d, padding=1)
    blocks = Blocks(sharing, dense_limit=dense_limit)
    assert_same_layers(conv, own, normal(N, 2, 4, 3), blocks)


class Pairs(nn.Module):
    """nn.Bilinear of two parts of the input."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Bilinear(2, 3, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x[..., :2], x[..., 2:])


class Outer(nn.Module):
    """nn.Linear of their outer product."""

    def __init__(self, other: Pairs) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 4, dtype=torch.float64)
        with torch.no_grad():
            self.layer.weight.copy_(other.layer.weight.flatten(1))
            self.layer.bias.copy_(other.layer.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer((x[..., :2, None] * x[..., None, 2:]).flatten(-2))


@pytest.mark.parametrize("places", [1, 3])
def test_a_bilinear_layer_as_a_linear_one_on_outer_products(places):
    bilinear = made(Pairs())
    assert_same_layers(bilinear, Outer(bilinear), normal(N, places, 5))


def test_a_bilinear_weight_that_is_computed_is_given_up():
    model = nn.Bilinear(2, 3, 4, bias=False, dtype=torch.float64)
    with record_uses([], find_units(model).units, N) as seen:
        functional.bilinear(normal(N, 2), normal(N, 3), model.weight.exp())
    why = "torch's bilinear is given what is computed from it, not the parameter itself"
    assert seen.unseen == {id(model.weight): why}


@pytest.mark.slow
@each_sharing
def test_hugging_faces_transposed_layer(sharing):
    own, x = made(transformers().pytorch_utils.Conv1D(4, 3)), normal(N, 2, 3)
    linear = nn.Linear(3, 4, dtype=torch.float64)
    linear.weight = nn.Parameter(own.weight.detach().mT.clone())
    linear.bias = nn.Parameter(own.bias.detach().clone())
    models = [Head(layer, x) for layer in (linear, own)]
    for model in models:
        optimizer = fixed(model, nn.MSELoss(), Blocks(sharing))
        for _ in range(3):
            optimizer.step(optimizer.closure(x, normal(N, 3, seed=2)))
    assert_close(models[0](x), models[1](x), rtol=1e-6, atol=1e-8)
    assert_close(linear.weight.mT, own.weight, rtol=1e-6, atol=1e-8)
