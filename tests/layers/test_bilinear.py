"""nn.Bilinear: products with x₁ ⊗ x₂."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from kronfac.extend import KroneckerBlock
from kronfac.model import find_units, record_uses
from tests.conftest import normal
from tests.layers.kit import (
    assert_exact,
    assert_same_steps,
    assert_twice_is_once,
    assert_uses,
)


class Pairs(nn.Module):
    """x₁ and x₂ are parts of the input."""

    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.layer = nn.Bilinear(2, 3, 4, bias=bias, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.layer(x[..., :2], x[..., 2:])).flatten(1)


class Outer(nn.Module):
    """The same with nn.Linear."""

    def __init__(self, other: Pairs) -> None:
        super().__init__()
        weight = other.layer.weight.detach()
        self.layer = nn.Linear(6, 4, dtype=torch.float64)
        with torch.no_grad():
            self.layer.weight.copy_(weight.flatten(1))
            self.layer.bias.copy_(other.layer.bias)

    def forward(self, x: Tensor) -> Tensor:
        outer = x[..., :2, None] * x[..., None, 2:]
        return torch.tanh(self.layer(outer.flatten(-2))).flatten(1)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("places", [1, 3])
def test_uses(bias, places):
    network = assert_uses(Pairs(bias), normal(5, places, 5))
    (unit,) = network.units
    assert unit.shape == (4, 6 + bias)
    assert isinstance(unit.block, KroneckerBlock)
    assert_twice_is_once(network, normal(5, places, 5))


def test_one_example_makes_its_block_exact():
    network = assert_uses(Pairs(bias=True), normal(1, 1, 5))
    assert_exact(network, normal(1, 1, 5))


def test_it_takes_the_steps_of_a_linear_layer_on_outer_products():
    first = Pairs(bias=True)
    assert_same_steps(first, Outer(first), normal(6, 1, 5), normal(6, 4, seed=1), nn.MSELoss())


def test_a_weight_that_is_computed_is_given_up():
    weight = nn.Parameter(normal(4, 2, 3))
    model = nn.Module()
    model.weight = weight
    units = find_units(model).units
    with record_uses([], units, 5) as seen:
        functional.bilinear(normal(5, 2), normal(5, 3), weight.exp())
    assert seen.unseen == {id(weight): "bilinear"}
