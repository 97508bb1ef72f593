"""Models that compute in half precision inside, by an autocast of their own."""

import pytest
import torch
from torch import nn

from kronfac import Blocks
from kronfac.curvature import DiagonalBlock
from tests.conftest import normal
from tests.layers.kit import train
from tests.layers.truth import OwnProduct, Positions

N = 8


class Autocast(nn.Module):
    """Layers in bfloat16, and a last one in float32."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers, self.head = nn.Sequential(*layers), nn.LazyLinear(2)

    def forward(self, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            h = self.layers(x)
        return self.head(torch.tanh(h.float()).flatten(1))


MODELS = {
    "Linear": (lambda: (nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 3, bias=False)), (N, 3)),
    "Linear at places": (lambda: (nn.Linear(3, 4), nn.GELU(), nn.Linear(4, 3)), (N, 5, 3)),
    "x @ W": (lambda: (nn.Linear(3, 3), OwnProduct(3, 4)), (N, 5, 3)),
    "Conv1d": (lambda: (nn.Conv1d(3, 4, 3), nn.ReLU(), nn.Conv1d(4, 2, 1)), (N, 3, 6)),
    "grouped": (lambda: (nn.Conv1d(4, 4, 1), nn.Conv1d(4, 4, 3, groups=4)), (N, 4, 6)),
    "ConvTranspose1d": (lambda: (nn.Conv1d(3, 3, 1), nn.ConvTranspose1d(3, 2, 3)), (N, 3, 6)),
    "LayerNorm": (lambda: (nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 3)), (N, 5, 3)),
    "GroupNorm and PReLU": (
        lambda: (nn.Conv1d(3, 4, 3), nn.GroupNorm(2, 4), nn.PReLU(), nn.Conv1d(4, 2, 1)),
        (N, 3, 6),
    ),
    "positions": (lambda: (nn.Linear(3, 3), Positions(5, 3), nn.Linear(3, 3)), (N, 5, 3)),
}


@pytest.mark.parametrize("blocks", [Blocks(), Blocks(dense_limit=0), Blocks("reduce", 0)], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_a_model_with_an_autocast_of_its_own_trains(name, blocks):
    """Its gradients have a few digits, which once raised an error; no block falls back for that."""
    make, shape = MODELS[name]
    torch.manual_seed(0)
    model, x, y = Autocast(*make()), normal(*shape).float(), normal(N, 2).float()
    model(x)
    optimizer, losses = train(model, nn.MSELoss(), x, y, blocks=blocks)
    assert min(losses[1:]) < losses[0]
    small = blocks.dense_limit == 0  # what is no product has a diagonal block then
    assert small or not any(isinstance(u.block, DiagonalBlock) for u in optimizer.network.units)
