"""Activations that overwrite a layer's outputs, which may be views of what torch has computed."""

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from kronfac import KFAC
from kronfac.curvature import DiagonalBlock
from tests.conftest import AUTODIFF, normal
from tests.layers.modules import perturbed
from tests.layers.problems import regression

N = 4


class InPlace(nn.Module):
    """A layer whose outputs are overwritten at once, and a head."""

    def __init__(self, layer: nn.Module, function) -> None:
        super().__init__()
        self.layer, self.function, self.head = layer, function, nn.LazyLinear(2)

    def forward(self, x):
        h = self.layer(x)
        self.function(h)
        return self.head(h.flatten(1))


LAYERS = {
    "Linear": (lambda: nn.Linear(3, 4), (N, 3)),
    "Linear at places": (lambda: nn.Linear(3, 4), (N, 5, 3)),
    "Linear at places without bias": (lambda: nn.Linear(3, 4, bias=False), (N, 5, 3)),
    "Conv1d": (lambda: nn.Conv1d(3, 2, 3), (N, 3, 5)),
    "ConvTranspose1d": (lambda: nn.ConvTranspose1d(3, 2, 3), (N, 3, 5)),
    "depthwise": (lambda: nn.Conv1d(3, 3, 3, groups=3), (N, 3, 5)),
    "LayerNorm": (lambda: nn.LayerNorm(3), (N, 5, 3)),
    "Embedding": (lambda: nn.Embedding(7, 3), None),
}
FUNCTIONS = {
    "relu_": torch.relu_,
    "a slice": lambda h: h[:, :1].mul_(2),
    "a reshaped view": lambda h: h.view(-1).mul_(0.5),
}


def build(name, function):
    make, shape = LAYERS[name]
    words = torch.randint(7, (N, 5), generator=torch.Generator().manual_seed(1))
    x = words if shape is None else normal(*shape)
    model = InPlace(make().double(), FUNCTIONS[function]).double()
    with torch.no_grad():
        model(x)  # the head's size
    return perturbed(model), x


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("name", LAYERS)
def test_uses_are_seen_before_they_are_overwritten(name, function):
    problem = regression(*build(name, function))
    for unit, moments in zip(problem.network.units, problem.curvature().blocks, strict=True):
        assert_close(moments.dense(), problem.truth.moments(unit), **AUTODIFF)
        assert moments.trace() > 0


@pytest.mark.parametrize("name", LAYERS)
def test_a_step_keeps_its_blocks(name):
    """Without a warning: it once fell back to a diagonal block."""
    model, x = build(name, "relu_")
    optimizer = KFAC(model, nn.MSELoss())
    optimizer.step(optimizer.closure(x, normal(N, 2)))
    assert not any(isinstance(unit.block, DiagonalBlock) for unit in optimizer.network.units)
