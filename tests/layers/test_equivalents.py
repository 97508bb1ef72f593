"""A network and the same written in another way take the same step.

With the exact Fisher, all examples and places, fixed rules and blocks of the same type, the change of the
outputs is the same to 1e-6 of itself.
"""

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.testing import assert_close

from kronfac import (
    KFAC,
    Blocks,
    FixedDamping,
    FixedGamma,
    Intervals,
    QuadraticModel,
)
from tests.conftest import normal
from tests.layers.kinds import perturbed
from tests.networks.libraries import transformers

N = 5


def changes(model: nn.Module, x: Tensor, blocks: Blocks, loss: nn.Module, steps: int = 2) -> Tensor:
    """By how much each of a few steps changes the outputs, (steps, …)."""
    optimizer = KFAC(
        model,
        loss,
        fisher="exact",
        damping=FixedDamping(0.1, reject=None),
        gamma=FixedGamma(0.3),
        step_rule=QuadraticModel(bounded=False, memory=None),
        intervals=Intervals(1.0, 1.0),
        blocks=blocks,
    )
    generator = torch.Generator().manual_seed(1)
    outputs = [model(x).detach()]
    if isinstance(loss, nn.CrossEntropyLoss):
        y = torch.randint(outputs[0].shape[1], (len(x),), generator=generator)
    else:
        y = torch.randn(outputs[0].shape, generator=generator, dtype=torch.float64)
    for _ in range(steps):
        optimizer.step(optimizer.closure(x, y))
        outputs.append(model(x).detach())
    return torch.stack(outputs).diff(dim=0)


def assert_same_steps(
    one: nn.Module,
    other: nn.Module,
    x: Tensor,
    loss: nn.Module | None = None,
    blocks: Blocks | None = None,
) -> None:
    blocks, loss = blocks or Blocks(), loss or nn.MSELoss()
    with torch.no_grad():
        assert_close(one(x), other(x), rtol=1e-10, atol=1e-12)
    first, second = (changes(copy.deepcopy(model), x, blocks, loss) for model in (one, other))
    for a, b in zip(first, second, strict=True):
        assert float(a.abs().max()) > 1e-4
        assert_close(a, b, rtol=0, atol=1e-6 * float(a.abs().max()))


class Head(nn.Module):
    """A layer, an activation, and a last layer that is the same in both."""

    def __init__(self, layer: nn.Module, width: int) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layer, self.head = layer, nn.Linear(width, 3, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.layer(x)).flatten(1))


def of_width(layer: nn.Module, x: Tensor) -> int:
    with torch.no_grad():
        return layer(x).flatten(1).shape[1]


def assert_same_layers(one: nn.Module, other: nn.Module, x: Tensor, **options: Blocks) -> None:
    """The same with a head, for both kinds of losses."""
    width = of_width(one, x)
    for loss in (nn.MSELoss(), nn.CrossEntropyLoss()):
        assert_same_steps(Head(one, width), Head(other, width), x, loss, **options)


def made(module: nn.Module) -> nn.Module:
    return perturbed(module.double())


# ------------------------------------------------------------------------------------------- the pairs


each_sharing = pytest.mark.parametrize("sharing", ["expand", "reduce"])


class Tied(nn.Module):
    """Two layers that share weight and bias."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
        self.a.weight = self.b.weight = nn.Parameter(layer.weight.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(self.a(x)))


class Twice(nn.Module):
    """One layer, used twice."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(torch.tanh(self.layer(x)))


@each_sharing
def test_tied_layers_as_one_that_is_used_twice(sharing):
    layer = made(nn.Linear(3, 3, bias=False))
    assert_same_layers(Twice(layer), Tied(layer), normal(N, 2, 3), blocks=Blocks(sharing))


class OwnLayer(nn.Module):
    """A user's own module that gives its weight to torch's function."""

    def __init__(self, layer: nn.Module, function, **options: object) -> None:
        super().__init__()
        self.weight = nn.Parameter(layer.weight.detach().clone())
        self.function, self.options = function, options

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, self.weight, **self.options)


@each_sharing
def test_a_weight_in_a_users_own_module(sharing):
    linear = made(nn.Linear(3, 4, bias=False))
    own = OwnLayer(linear, functional.linear)
    assert_same_layers(linear, own, normal(N, 2, 3), blocks=Blocks(sharing))


@pytest.mark.parametrize("dense_limit", [0, 512])
@each_sharing
def test_a_kernel_in_a_users_own_module(sharing, dense_limit):
    conv = made(nn.Conv2d(2, 3, 3, padding=1, bias=False))
    own = OwnLayer(conv, functional.conv2d, padding=1)
    blocks = Blocks(sharing, dense_limit=dense_limit)
    assert_same_layers(conv, own, normal(N, 2, 4, 3), blocks=blocks)


@pytest.mark.slow
def test_hugging_faces_transposed_layer():
    own = made(transformers().pytorch_utils.Conv1D(4, 3))
    linear = nn.Linear(3, 4, dtype=torch.float64)
    linear.weight = nn.Parameter(own.weight.detach().mT.clone())
    linear.bias = nn.Parameter(own.bias.detach().clone())
    for sharing in ("expand", "reduce"):
        assert_same_layers(linear, own, normal(N, 2, 3), blocks=Blocks(sharing))
