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

from kronfac import KFAC, Blocks, FixedDamping, FixedGamma, QuadraticModel
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
        damping=FixedDamping(0.1),
        gamma=FixedGamma(0.3),
        step_size=QuadraticModel(),
        acceptance=None,
        statistics_fraction=1.0,
        fisher_fraction=1.0,
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


class Unfolded(nn.Module):
    """A convolution as a Linear layer of patches."""

    def __init__(self, conv: nn.Conv2d) -> None:
        super().__init__()
        self.conv = (conv.kernel_size, conv.dilation, conv.padding, conv.stride)
        self.linear = nn.Linear(conv.weight[0].numel(), len(conv.weight), dtype=torch.float64)
        self.linear.weight = nn.Parameter(conv.weight.detach().flatten(1).clone())
        self.linear.bias = nn.Parameter(conv.bias.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(functional.unfold(x, *self.conv).mT).mT


class Flat(nn.Module):
    """A convolution whose outputs are (examples, channels, places)."""

    def __init__(self, conv: nn.Module) -> None:
        super().__init__()
        self.conv = conv

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x).flatten(2)


each_sharing = pytest.mark.parametrize("sharing", ["expand", "reduce"])


@each_sharing
def test_a_convolution_as_unfold_and_linear(sharing):
    conv = made(nn.Conv2d(2, 3, (3, 2), stride=2, padding=1, dilation=(1, 2)))
    blocks = Blocks(sharing, dense_limit=0)
    assert_same_layers(Flat(conv), Unfolded(conv), normal(N, 2, 6, 7), blocks=blocks)


class AtPlaces(nn.Module):
    """A 1 × 1 convolution as a Linear layer."""

    def __init__(self, conv: nn.Conv2d) -> None:
        super().__init__()
        self.linear = nn.Linear(conv.in_channels, conv.out_channels, dtype=torch.float64)
        self.linear.weight = nn.Parameter(conv.weight.detach().flatten(1).clone())
        self.linear.bias = nn.Parameter(conv.bias.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.movedim(1, -1)).movedim(-1, 1)


@each_sharing
def test_a_one_by_one_convolution_as_linear(sharing):
    conv = made(nn.Conv2d(3, 4, 1))
    blocks = Blocks(sharing, dense_limit=0)
    assert_same_layers(conv, AtPlaces(conv), normal(N, 3, 2, 3), blocks=blocks)


class Stretched(nn.Module):
    """A transposed convolution as a convolution of a stretched input."""

    def __init__(self, conv: nn.ConvTranspose1d) -> None:
        super().__init__()
        self.stride, self.sides = conv.stride[0], conv.kernel_size[0] - 1 - conv.padding[0]
        kernel = conv.weight.detach().transpose(0, 1).flip(2).clone()
        self.conv = nn.Conv1d(*kernel.shape[1::-1], kernel.shape[2], dtype=torch.float64)
        self.conv.weight = nn.Parameter(kernel)
        self.conv.bias = nn.Parameter(conv.bias.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        wide = x.new_zeros(*x.shape[:2], (x.shape[2] - 1) * self.stride + 1)
        wide[..., :: self.stride] = x
        return self.conv(functional.pad(wide, (self.sides, self.sides)))


@pytest.mark.parametrize("dense_limit", [0, 512])
@each_sharing
def test_a_transposed_convolution_as_a_convolution(sharing, dense_limit):
    conv = made(nn.ConvTranspose1d(2, 3, 4, stride=2, padding=1))
    blocks = Blocks(sharing, dense_limit=dense_limit)
    assert_same_layers(conv, Stretched(conv), normal(N, 2, 4), blocks=blocks)


class ByProduct(nn.Module):
    """An embedding as the product of unit vectors with a weight, stored in either way."""

    def __init__(self, table: nn.Embedding, transposed: bool) -> None:
        super().__init__()
        weight = table.weight.detach().clone()
        self.weight = nn.Parameter(weight.mT.clone() if transposed else weight)
        self.transposed = transposed

    def forward(self, x: Tensor) -> Tensor:
        words = self.weight.shape[1 if self.transposed else 0]
        hot = functional.one_hot(x, words).double()
        return functional.linear(hot, self.weight) if self.transposed else hot @ self.weight


@pytest.mark.parametrize("transposed", [True, False])
def test_an_embedding_as_a_product_with_unit_vectors(transposed):
    table = made(nn.Embedding(6, 3))
    words = torch.randint(6, (N, 4), generator=torch.Generator().manual_seed(2))
    other = ByProduct(table, transposed)
    assert_same_layers(table, other, words, blocks=Blocks(dense_limit=0))


class Chunks(nn.Module):
    """A grouped convolution as one convolution per group."""

    def __init__(self, conv: nn.Conv1d) -> None:
        super().__init__()
        self.parts = nn.ModuleList()
        rows = conv.out_channels // conv.groups
        for i in range(conv.groups):
            part = nn.Conv1d(conv.in_channels // conv.groups, rows, 3, dtype=torch.float64)
            part.weight = nn.Parameter(conv.weight.detach()[i * rows : (i + 1) * rows].clone())
            part.bias = nn.Parameter(conv.bias.detach()[i * rows : (i + 1) * rows].clone())
            self.parts.append(part)

    def forward(self, x: Tensor) -> Tensor:
        pieces = x.chunk(len(self.parts), dim=1)
        return torch.cat([part(h) for part, h in zip(self.parts, pieces, strict=True)], dim=1)


def test_a_depthwise_convolution_as_separate_ones():
    """With dense pieces of one row: one matrix for every channel, in both."""
    conv = made(nn.Conv1d(3, 3, 3, groups=3))
    assert_same_layers(conv, Chunks(conv), normal(N, 3, 6), blocks=Blocks(dense_limit=4))


class OwnNorm(nn.Module):
    """LayerNorm by its function."""

    def __init__(self, norm: nn.LayerNorm) -> None:
        super().__init__()
        self.weight = nn.Parameter(norm.weight.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        return functional.layer_norm(x, (x.shape[-1],), self.weight)


class NormByHand(OwnNorm):
    """LayerNorm in single operations."""

    def forward(self, x: Tensor) -> Tensor:
        centred = x - x.mean(dim=-1, keepdim=True)
        variance = centred.square().mean(dim=-1, keepdim=True)
        return centred / (variance + 1e-5).sqrt() * self.weight


@pytest.mark.parametrize("other", [OwnNorm, NormByHand])
def test_a_layer_norm_by_its_function(other):
    norm = made(nn.LayerNorm(4, bias=False))
    assert_same_layers(norm, other(norm), normal(N, 3, 4))


class Affine(nn.Module):
    """BatchNorm in eval() by single operations."""

    def __init__(self, norm: nn.BatchNorm1d) -> None:
        super().__init__()
        self.register_buffer("mean", norm.running_mean.clone())
        self.register_buffer("size", (norm.running_var + norm.eps).sqrt())
        self.scale = nn.Parameter(norm.weight.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        return (x - self.mean) / self.size * self.scale


def test_batch_norm_in_eval_as_a_scale():
    norm = made(nn.BatchNorm1d(4)).eval()
    norm.running_mean, norm.running_var = normal(4), normal(4, seed=1).square() + 0.5
    norm.bias = None
    assert_same_layers(norm, Affine(norm), normal(N, 4))


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
