"""A weight that is used outside its module: all uses count, or the parameter is named."""

import pytest
import torch
from torch import Tensor, nn

from kronfac import KFAC, Blocks
from tests.conftest import normal
from tests.failures.steps import FIXED, assert_right_curvature, closure_of, train

X = normal(20, 6)


class Autoencoder(nn.Module):
    """An encoder whose weight is the decoder's too, without a module."""

    def __init__(self) -> None:
        super().__init__()
        self.enc = nn.Linear(6, 4, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return torch.sigmoid(self.enc(x)) @ self.enc.weight


class ScaledByItsNorm(nn.Module):
    """A network whose first weight has a second use that is no product with it."""

    def __init__(self) -> None:
        super().__init__()
        self.enc = nn.Linear(6, 4, dtype=torch.float64)
        self.dec = nn.Linear(4, 6, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return self.dec(torch.sigmoid(self.enc(x))) * self.enc.weight.square().sum()


@pytest.mark.filterwarnings("ignore::UserWarning")  # of a parameter in its fallback block
@pytest.mark.parametrize("network", [Autoencoder, ScaledByItsNorm])
def test_the_curvature_is_that_of_all_uses(network):
    loss = nn.MSELoss()
    optimizer = KFAC(network(), loss, **FIXED)
    assert_right_curvature(optimizer, lambda f: f(X), lambda z: loss(z, X))


def test_a_use_that_is_no_product_is_named_in_one_warning():
    loss = nn.MSELoss()
    # Small ones would have a dense block, which takes uses of every kind.
    optimizer = KFAC(ScaledByItsNorm(), loss, blocks=Blocks(dense_limit=0))
    closure = closure_of(optimizer, lambda model: loss(model(X), X))
    with pytest.warns(UserWarning, match=r"enc\.weight") as caught:
        train(optimizer, closure, 30)
    uses = [w for w in caught if "KFAC rejected" not in str(w.message)]
    assert len(uses) == 1
    assert "dec." not in str(uses[0].message)
