"""Functions called in every way that torch takes, and weights that are computed from parameters."""

import copy
import warnings

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from kronfac import KFAC
from kronfac.curvature import DiagonalBlock, KroneckerBlock
from tests.conftest import normal

WIDTH, N = 4, 4
"""As many examples as features: an x that is multiplied from the wrong side has the right shape."""


class Called(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.first, self.W = nn.Linear(3, WIDTH), nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return CALLS[self.name](torch.tanh(self.first(x)), self.W)


CALLS = {
    "x @ W": lambda x, W: x @ W,
    "matmul(x, other=W)": lambda x, W: torch.matmul(x, other=W),
    "matmul(input=x, other=W)": lambda x, W: torch.matmul(other=W, input=x),
    "x.matmul(other=W)": lambda x, W: x.matmul(other=W),
    "mm(x, mat2=W)": lambda x, W: torch.mm(x, mat2=W),
    "x.mm(mat2=W)": lambda x, W: x.mm(mat2=W),
    "W.__rmatmul__(x)": lambda x, W: W.__rmatmul__(x),
}
DERIVED = {
    "normalised": lambda x, W: x @ functional.normalize(W).T,
    "scaled": lambda x, W: x @ (3 * W).t(),
    "some rows": lambda x, W: x @ W.roll(1, 0).mT,
    "transposed twice": lambda x, W: x @ W.T.T,
}


def stepped(model: nn.Module) -> KFAC:
    optimizer = KFAC(model, nn.MSELoss())
    x, y = normal(N, 3), normal(N, WIDTH, seed=1)
    for _ in range(3):
        optimizer.step(optimizer.closure(x, y))
    return optimizer


@pytest.mark.parametrize("name", CALLS)
def test_operands_by_position_and_by_name(name):
    torch.manual_seed(0)
    model = Called(name).double()
    same = copy.deepcopy(model)
    same.name = "x @ W"
    optimizer, expected = stepped(model), stepped(same)
    unit = optimizer.network.units[0]
    assert unit.names == ("W",)
    assert isinstance(unit.block, KroneckerBlock)
    for p, q in zip(model.parameters(), same.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=0)
    assert len(expected.network.units) == len(optimizer.network.units)


def test_sizes_by_name():
    class Token(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.token, self.linear = nn.Parameter(torch.zeros(1, 3)), nn.Linear(3, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(torch.tanh(x + self.token.expand(size=(len(x), -1))))

    optimizer = stepped(Token().double())
    assert all(unit.observed for unit in optimizer.network.units)


@pytest.mark.parametrize("name", DERIVED)
def test_the_transpose_of_what_is_computed_from_a_weight_is_not_the_weights(name, monkeypatch):
    """It has a diagonal block, and there is nothing to warn of: no use was seen as what it is not."""
    monkeypatch.setitem(CALLS, name, DERIVED[name])
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer = stepped(Called(name).double())
    unit = optimizer.network.units[0]
    assert isinstance(unit.block, DiagonalBlock)
    assert "matmul" in unit.why
