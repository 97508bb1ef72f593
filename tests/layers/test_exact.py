"""Where K-FAC is exact, and how near it is elsewhere (Dangel et al. 2025, "K-FAC from scratch").

- A deep linear network with a Gaussian: ∂f/∂s is the same for all examples. With one place a layer is exact
  in either setting; with several, expand is if no two places meet, and reduce if all places are pooled.
- One example at one place, whatever the network: the mean of one product is a product.
"""

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from kronfac.curvature import DenseBlock, KroneckerBlock
from tests.conftest import AUTODIFF, normal
from tests.layers.architectures import KINDS
from tests.layers.kit import assert_exact
from tests.layers.modules import PositionTable, perturbed
from tests.layers.problems import classification, regression
from tests.layers.truth import OwnLinear, OwnProduct, Positions

N = 4
"""Examples. No other dimension has as many."""


class Last(nn.Module):
    """(examples, …, channels) from (examples, channels, …)."""

    def forward(self, x):
        return x.movedim(1, -1)


class Pooled(nn.Module):
    """The mean over all places of (examples, channels, …)."""

    def forward(self, x):
        return x.flatten(2).mean(dim=2)


class PooledTokens(nn.Module):
    """The mean over all places of (examples, places, features)."""

    def forward(self, x):
        return x.mean(dim=1)


def conv(*args, **options):
    return nn.Conv1d(*args, padding_mode="circular", **options)


def tokens(*shape, size=6):
    return torch.randint(size, shape, generator=torch.Generator().manual_seed(3))


EXPAND = {
    "Linear at every place": (lambda: (nn.Linear(3, 4), nn.Linear(4, 2)), (N, 5, 3)),
    "F.linear and x @ W": (lambda: (OwnLinear(3, 4), OwnProduct(4, 2)), (N, 5, 3)),
    "a convolution": (lambda: (nn.Conv2d(2, 3, 3, stride=2, padding=1), Last()), (N, 2, 5, 4)),
    "a convolution, then at every place": (
        lambda: (nn.Conv1d(2, 3, 3, dilation=2), nn.Conv1d(3, 2, 1), Last(), nn.Linear(2, 2)),
        (N, 2, 7),
    ),
    "a convolution in three dimensions": (lambda: (nn.Conv3d(1, 2, 2), Last()), (N, 1, 3, 3, 2)),
    "a transposed convolution, then at every place": (
        lambda: (nn.ConvTranspose1d(2, 3, 3, stride=2, padding=1), nn.Conv1d(3, 2, 1), Last()),
        (N, 2, 4),
    ),
    "a transposed convolution in two": (
        lambda: (nn.ConvTranspose2d(2, 2, (3, 2), stride=2, output_padding=1), Last()),
        (N, 2, 3, 2),
    ),
    "Embedding, then at every place": (lambda: (nn.Embedding(6, 3), nn.Linear(3, 2)), None),
    "positions, then at every place": (lambda: (Positions(5, 3), nn.Linear(3, 2)), (N, 5, 3)),
}
REDUCE = {
    "Linear, pooled": (
        lambda: (nn.Linear(3, 4), nn.Linear(4, 3), PooledTokens(), nn.Linear(3, 2)),
        (N, 5, 3),
    ),
    "convolutions, pooled": (
        lambda: (conv(2, 3, 3, padding=1), conv(3, 3, 3, padding=1), Pooled(), nn.Linear(3, 2)),
        (N, 2, 6),
    ),
    "a convolution with stride, pooled": (
        lambda: (nn.Conv2d(2, 3, 3, stride=2), Pooled(), nn.Linear(3, 2)),
        (N, 2, 7, 5),
    ),
    "a transposed convolution, pooled": (
        lambda: (nn.ConvTranspose2d(2, 3, 2, stride=2), Pooled(), nn.Linear(3, 2)),
        (N, 2, 3, 2),
    ),
    "Embedding, pooled": (lambda: (nn.Embedding(6, 3), PooledTokens(), nn.Linear(3, 2)), None),
}
ONE_PLACE = {
    "Linear": (lambda: (nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 2)), (N, 3)),
    "convolutions to one place": (
        lambda: (nn.Conv2d(2, 3, (4, 3)), nn.Flatten(), nn.Linear(3, 2)),
        (N, 2, 4, 3),
    ),
    "a transposed convolution to one place": (
        lambda: (nn.ConvTranspose1d(2, 3, 3, padding=1), nn.Flatten(), nn.Linear(3, 2)),
        (N, 2, 1),
    ),
}


def linear_network(make, shape) -> tuple[nn.Module, torch.Tensor]:
    model = perturbed(nn.Sequential(*make())).double()
    return model, tokens(N, 5) if shape is None else normal(*shape)


def with_kronecker(sharing):
    """Full factors: pooled unit vectors have second moments that are no diagonal."""
    return lambda block: KroneckerBlock(sharing)


@pytest.mark.parametrize("name", EXPAND)
def test_expand_is_exact_if_no_two_places_meet(name):
    assert_exact(regression(*linear_network(*EXPAND[name]), block=with_kronecker("expand")))


@pytest.mark.parametrize("name", REDUCE)
def test_reduce_is_exact_if_places_are_pooled(name):
    assert_exact(regression(*linear_network(*REDUCE[name]), block=with_kronecker("reduce")))


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
@pytest.mark.parametrize("name", ONE_PLACE)
def test_either_is_exact_at_one_place(name, sharing):
    assert_exact(regression(*linear_network(*ONE_PLACE[name]), block=with_kronecker(sharing)))


@pytest.mark.parametrize("make", [regression, classification])
@pytest.mark.parametrize("name", ONE_PLACE)
def test_one_example_is_exact_whatever_the_network(name, make):
    layers = [m for layer in ONE_PLACE[name][0]() for m in (layer, nn.Tanh())]
    model = perturbed(nn.Sequential(*layers)).double()
    x = normal(*ONE_PLACE[name][1])[:1]
    assert_exact(make(model, x, block=with_kronecker("expand")))


def test_the_setting_matters():
    """The other one is not exact, so that the tests above can fail."""
    problem = regression(*linear_network(*REDUCE["Linear, pooled"]), block=with_kronecker("expand"))
    with pytest.raises(AssertionError, match="not close"):
        assert_exact(problem)


# ----------------------------------------------------------------------------------------- every layer


@pytest.mark.parametrize("name", KINDS)
def test_a_dense_block_of_any_layer_is_the_fishers_own(name):
    """So are its uses, example by example."""
    spec = KINDS[name]
    problem = regression(spec.build(), spec.inputs(), block=lambda block: DenseBlock())
    # Gradients summed over the examples give an estimate, see test_other_uses.py.
    summed = [m.table.weight for m in problem.model.modules() if isinstance(m, PositionTable)]
    for unit, moments in zip(problem.network.units, problem.curvature().blocks, strict=True):
        if not unit.observed:
            assert unit.why
        elif unit.parameters[0] not in set(summed):
            v = problem.truth.vectors(unit)
            assert_close(moments.dense(), v.mT @ v, **AUTODIFF)
