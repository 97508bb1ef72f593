"""Tables that are looked up without an embedding layer, and weights that are computed from parameters."""

import pytest
import torch
from torch import Tensor, nn

import kronfac
from kronfac import KFAC
from kronfac.curvature import DenseBlock, DiagonalBlock
from tests.conftest import seeded
from tests.failures.steps import FIXED, closure_of

WORDS = torch.randint(300, (16, 3), generator=seeded(1))
Y = torch.randint(2, (16,), generator=seeded(2))


def test_a_table_with_an_index_of_the_models_own_is_a_part_of_the_parameter():
    """As biases of relative positions are: nothing is summed over the examples."""

    class Relative(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.zeros(5, 2))
            self.register_buffer("index", torch.arange(3)[:, None] - torch.arange(3) + 2)
            self.out = nn.Linear(4, 2)

        def forward(self, words: Tensor) -> Tensor:
            bias = self.table[self.index.view(-1)].view(3, 3, 2)
            x = words.to(bias.dtype)[:, :, None, None] / 300 + bias
            return self.out(torch.tanh(x).mean(dim=1).flatten(1)[:, :4])

    loss = nn.CrossEntropyLoss()
    optimizer = KFAC(Relative().double(), loss, **FIXED | {"fisher": "exact"})
    for _ in range(3):
        optimizer.step(closure_of(optimizer, lambda model: loss(model(WORDS), Y)))
    (unit,) = [unit for unit in optimizer.network.units if unit.names == ("table",)]
    assert unit.observed
    assert isinstance(unit.block, DenseBlock)


@pytest.mark.parametrize("norm", ["weight_norm", "spectral_norm"])
def test_the_plan_says_that_a_weight_is_computed(norm):
    torch.manual_seed(0)
    layer = getattr(nn.utils.parametrizations, norm)(nn.Linear(3, 2))
    model = nn.Sequential(layer, nn.Tanh(), nn.Linear(2, 1)).double()
    optimizer = KFAC(model, nn.MSELoss())
    x = torch.randn(8, 3, generator=seeded(0), dtype=torch.float64)
    optimizer.step(optimizer.closure(x, x[:, :1]))
    units = [unit for unit in optimizer.network.units if "original" in unit.names[0]]
    assert units
    for unit in units:
        assert isinstance(unit.block, DiagonalBlock)
        assert unit.why == "the layer's weight is computed from it by a parametrization"


def test_so_it_does_of_one_that_the_model_computes_itself():
    class Standardised(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            W = self.weight - self.weight.mean(dim=1, keepdim=True)
            return nn.functional.linear(x, W, self.bias)

    model = nn.Sequential(Standardised(3, 2), nn.Tanh(), nn.Linear(2, 1)).double()
    plan = kronfac.plan(model, nn.MSELoss(), torch.randn(8, 3, dtype=torch.float64))
    assert "torch's linear is given what is computed from it, not the parameter itself" in str(plan)
