"""Every layer's uses against autograd: the gradient, and that of every example."""

import operator

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.testing import assert_close

from kronfac.model import find_units, record_uses
from kronfac.testing import check_adapter
from tests.conftest import ALGEBRA, normal
from tests.layers.modules import perturbed

N = 3


def indices(*shape: int, size: int = 7) -> torch.Tensor:
    return torch.randint(size, shape, generator=torch.Generator().manual_seed(1))


CONVOLUTIONS = {
    "1d": (lambda: nn.Conv1d(2, 3, 3), (N, 2, 9)),
    "2d": (lambda: nn.Conv2d(2, 3, (3, 2)), (N, 2, 6, 5)),
    "3d": (lambda: nn.Conv3d(2, 3, 2), (N, 2, 4, 3, 5)),
    "without bias": (lambda: nn.Conv2d(2, 3, 3, bias=False), (N, 2, 6, 5)),
    "stride": (lambda: nn.Conv2d(2, 3, 3, stride=(2, 3)), (N, 2, 8, 9)),
    "padding": (lambda: nn.Conv2d(2, 3, 3, padding=(1, 2)), (N, 2, 6, 5)),
    "same": (lambda: nn.Conv2d(2, 3, (3, 5), padding="same"), (N, 2, 6, 5)),
    "valid": (lambda: nn.Conv2d(2, 3, 3, padding="valid"), (N, 2, 6, 5)),
    "circular": (
        lambda: nn.Conv2d(2, 3, 3, padding=1, padding_mode="circular"),
        (N, 2, 6, 5),
    ),
    "reflect": (lambda: nn.Conv1d(2, 3, 3, padding=2, padding_mode="reflect"), (N, 2, 9)),
    "replicate": (lambda: nn.Conv1d(2, 3, 3, padding=2, padding_mode="replicate"), (N, 2, 9)),
    "dilation": (lambda: nn.Conv2d(2, 3, 3, dilation=(1, 2)), (N, 2, 6, 9)),
    "groups": (lambda: nn.Conv2d(4, 6, 3, groups=2), (N, 4, 6, 5)),
    "depthwise": (lambda: nn.Conv2d(4, 4, 3, groups=4, padding=1), (N, 4, 6, 5)),
    "depthwise, multiplied": (lambda: nn.Conv1d(4, 8, 3, groups=4, bias=False), (N, 4, 9)),
    "one by one": (lambda: nn.Conv2d(4, 3, 1), (N, 4, 3, 3)),
    # Further transposed ones are in test_patches.py.
    "transposed, all options": (
        lambda: nn.ConvTranspose2d(2, 3, 3, stride=3, padding=2, output_padding=1, dilation=2),
        (N, 2, 4, 4),
    ),
    "transposed, without bias": (lambda: nn.ConvTranspose1d(4, 2, 3, bias=False), (N, 4, 5)),
}
NORMS = {
    "LayerNorm": (lambda: nn.LayerNorm(5), (N, 4, 5)),
    "LayerNorm of two": (lambda: nn.LayerNorm((4, 5)), (N, 2, 4, 5)),
    "LayerNorm without bias": (lambda: nn.LayerNorm(5, bias=False), (N, 5)),
    "RMSNorm": (lambda: nn.RMSNorm(5), (N, 4, 5)),
    "GroupNorm": (lambda: nn.GroupNorm(2, 6), (N, 6, 4)),
    "InstanceNorm1d": (lambda: nn.InstanceNorm1d(4, affine=True), (N, 4, 6)),
    "InstanceNorm2d": (
        lambda: nn.InstanceNorm2d(4, affine=True, track_running_stats=True),
        (N, 4, 3, 3),
    ),
    "BatchNorm1d in eval()": (lambda: nn.BatchNorm1d(4).eval(), (N, 4)),
    "BatchNorm2d in eval()": (lambda: nn.BatchNorm2d(4).eval(), (N, 4, 3, 2)),
    "PReLU": (nn.PReLU, (N, 4, 2)),
    "PReLU per channel": (lambda: nn.PReLU(4), (N, 4, 2)),
}


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(N, 4), (N, 2, 4), (N, 2, 5, 4)], ids=str)
def test_a_linear_layer(shape, bias):
    check_adapter(nn.Linear(4, 5, bias=bias), normal(*shape))


@pytest.mark.parametrize("bias", [True, False])
def test_inputs_without_a_first_dimension_are_one_example(bias):
    module, x = nn.Linear(4, 5, bias=bias).double(), normal(4)
    (unit,) = find_units(module).units
    with record_uses([], [unit], 1) as seen:
        s = module(x)
    (tap,) = seen.uses.taps(0, [torch.zeros_like(s)])
    assert_close((tap.inputs @ unit.join(unit.parameters).mT)[0, 0], s, **ALGEBRA)


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_a_convolution(name):
    make, shape = CONVOLUTIONS[name]
    check_adapter(perturbed(make()), normal(*shape))


@pytest.mark.parametrize("name", NORMS)
def test_a_normalisation_or_another_elementwise_layer(name):
    make, shape = NORMS[name]
    check_adapter(perturbed(make()), normal(*shape))


@pytest.mark.parametrize("module", [nn.BatchNorm1d, nn.BatchNorm2d], ids=lambda m: m.__name__)
def test_batch_norm_in_training(module):
    """The gradient of scale and shift is a sum over examples, whatever couples their inputs."""
    shape = (N, 4) if module is nn.BatchNorm1d else (N, 4, 2, 2)
    check_adapter(perturbed(module(4)), normal(*shape))


@pytest.mark.parametrize(
    "options", [{}, {"padding_idx": 2}, {"padding_idx": -1}, {"max_norm": 1.0}], ids=str
)
@pytest.mark.parametrize("shape", [(N,), (N, 4), (N, 2, 3)], ids=str)
def test_an_embedding(shape, options):
    check_adapter(nn.Embedding(7, 5, **options), indices(*shape))


@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_bags_of_embeddings(mode):
    check_adapter(nn.EmbeddingBag(7, 5, mode=mode), indices(N, 4))
    check_adapter(nn.EmbeddingBag(7, 5, mode=mode, padding_idx=3), indices(N, 4))


def test_weighted_bags_of_different_lengths():
    module = nn.EmbeddingBag(7, 5, mode="sum").double()
    units = find_units(module).units
    words, offsets, weights = indices(9), torch.tensor([0, 2, 2]), normal(9)
    with record_uses([], units, 3) as seen:
        z = module(words, offsets, weights)
    g = normal(3, 5, seed=2)
    (expected,) = torch.autograd.grad(z, module.weight, g, retain_graph=True)
    (tap,) = seen.uses.taps(0, torch.autograd.grad(z, seen.uses.edges, g))
    assert_close(tap.total(), expected, **ALGEBRA)
    assert_close(tap.gradients().sum(dim=0), expected, **ALGEBRA)


# ------------------------------------------------------------------------- without a layer of torch's


def uses_of(module: nn.Module, *args: torch.Tensor) -> None:
    """Compare what is seen of parameters that no adapter describes, example by example."""
    module = module.double()
    units = find_units(module).units
    with record_uses([], units, N) as seen:
        z = module(*args)
    assert not seen.unseen
    r = normal(*z.shape, seed=4)
    at_uses = torch.autograd.grad(z, seen.uses.edges, r, retain_graph=True)
    for n, unit in enumerate(units):
        taps = seen.uses.taps(n, at_uses)
        own = sum(tap.gradients() for tap in taps)
        assert own.shape == (N, *unit.shape)
        for i in range(N):
            mask = torch.zeros_like(r)
            mask[i] = r[i]
            grads = torch.autograd.grad(z, unit.parameters, mask, retain_graph=True)
            assert_close(own[i], unit.join(grads), **ALGEBRA)


class Own(nn.Module):
    """Parameters, and a function of them and the input."""

    def __init__(self, function, *shapes):
        super().__init__()
        self.function = function
        for i, shape in enumerate(shapes):
            self.register_parameter(f"p{i}", nn.Parameter(normal(*shape, seed=i)))

    def forward(self, *args):
        return self.function(*self.parameters(), *args)


FUNCTIONS = {
    "F.linear": (lambda w, b, x: functional.linear(x, w, b), (3, 4), (3,)),
    "matmul": (lambda w, x: x @ w, (4, 3)),
    "matmul with a transpose": (lambda w, x: x @ w.T, (3, 4)),
    "from the left": (lambda w, x: (w @ x.unsqueeze(-1)).squeeze(-1), (3, 4)),
    "addmm": (lambda b, w, x: torch.addmm(b, x, w), (3,), (4, 3)),
    "scale": (lambda s, x: x * s, (4,)),
    "scale from the left": (lambda s, x: s * x, (4,)),
    "one number": (lambda s, x: s * x, ()),
    "divided": (lambda s, x: s / (1 + x.square()), (4,)),
    "shift": (lambda s, x: x - s, (4,)),
    "shift from the left": (lambda s, x: s - x, (4,)),
    "in place": (lambda s, x: x.clone().mul_(s).add_(s), (4,)),
    "temperature": (lambda s, x: x * s.exp(), ()),
    "class token": (
        lambda t, x: torch.cat([t.expand(len(x), -1, -1), x.unsqueeze(1)], dim=1),
        (1, 1, 4),
    ),
    "positions": (lambda p, x: x.unsqueeze(1) + p, (1, 5, 4)),
    "some positions": (lambda p, x: x.unsqueeze(1) + p[:, :3], (1, 5, 4)),
    "twice": (lambda s, x: x * s + s, (4,)),
    "softplus of it": (lambda s, x: x * functional.softplus(s), (4,)),
    "in place by an operator": (lambda s, x: operator.iadd(operator.imul(x.clone(), s), s), (4,)),
    "matmul(x, other=W)": (lambda w, x: torch.matmul(x, other=w), (4, 3)),
    "matmul(input=x, other=W)": (lambda w, x: torch.matmul(other=w, input=x), (4, 3)),
    "x.matmul(other=W)": (lambda w, x: x.matmul(other=w), (4, 3)),
    "mm(x, mat2=W)": (lambda w, x: torch.mm(x, mat2=w), (4, 3)),
    "x.mm(mat2=W)": (lambda w, x: x.mm(mat2=w), (4, 3)),
    "W.__rmatmul__(x)": (lambda w, x: w.__rmatmul__(x), (4, 3)),
    "expand(size=…)": (lambda t, x: x + t.expand(size=(len(x), -1)), (1, 4)),
}
LOOKUPS = {
    "embedding": lambda E, i: functional.embedding(i, E),
    "E[i]": lambda E, i: E[i],
    "E[i], from the end": lambda E, i: E[i - len(E)],
    "E[i], int32": lambda E, i: E[i.int()],
    "index_select": lambda E, i: torch.index_select(E, 0, i.flatten()).view(*i.shape, -1),
    "E.index_select": lambda E, i: E.index_select(-2, index=i.flatten()).view(*i.shape, -1),
}
COMPUTED = {
    "normalised": lambda W, x: x @ functional.normalize(W).T,
    "scaled": lambda W, x: x @ (3 * W).t(),
    "some rows": lambda W, x: x @ W.roll(1, 0).mT,
    "transposed twice": lambda W, x: x @ W.T.T,
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_parameters_of_a_users_own_module(name):
    function, *shapes = FUNCTIONS[name]
    uses_of(Own(function, *shapes), normal(N, 4, seed=9))


@pytest.mark.parametrize("how", LOOKUPS)
@pytest.mark.parametrize("shape", [(N,), (N, 3)], ids=str)
def test_a_table_that_is_looked_up_without_a_layer(how, shape):
    uses_of(Own(LOOKUPS[how], (7, 5)), indices(*shape))


@pytest.mark.parametrize("name", COMPUTED)
def test_a_weight_that_is_computed_is_not_the_parameter(name):
    """As many examples as features: an x that is multiplied from the wrong side has the right shape."""
    module = Own(COMPUTED[name], (4, 4)).double()
    with record_uses([], find_units(module).units, 4) as seen:
        module(normal(4, 4))
    why = "torch's matmul is given what is computed from it, not the parameter itself"
    assert seen.unseen == {id(module.p0): why}


def test_a_function_that_is_not_understood_is_named():
    module = Own(lambda w, x: torch.einsum("ni,oi->no", x, w), (3, 4))
    units = find_units(module.double()).units
    with record_uses([], units, N) as seen:
        module(normal(N, 4))
    assert list(seen.unseen.values()) == ["used in torch's einsum, which KFAC does not understand"]


# --------------------------------------------------------------------------------- parts of a layer


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("frozen", ["weight", "bias"])
def test_a_grouped_convolution_of_which_a_part_is_frozen(frozen, transposed):
    """A bias that stands alone once had no inputs."""
    kind = nn.ConvTranspose1d if transposed else nn.Conv1d
    module = perturbed(kind(4, 6, 3, groups=2))
    module.get_parameter(frozen).requires_grad_(False)
    check_adapter(module, normal(N, 4, 5))


class WithAndWithoutBias(nn.Module):
    """A grouped convolution that is called, and its weight used once more."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Conv1d(4, 6, 3, groups=2)

    def forward(self, x):
        return self.inner(x) + functional.conv1d(x, self.inner.weight, groups=2)


def test_a_grouped_convolution_that_is_used_without_its_bias():
    uses_of(WithAndWithoutBias(), normal(N, 4, 5))


@pytest.mark.parametrize("kind", [nn.Linear, nn.Conv1d, nn.ConvTranspose1d, nn.LayerNorm])
def test_a_bias_whose_weight_is_frozen(kind):
    shape = (N, 4) if kind in (nn.Linear, nn.LayerNorm) else (N, 4, 5)
    args = {nn.Linear: (4, 6), nn.LayerNorm: (4,)}.get(kind, (4, 6, 3))
    module = perturbed(kind(*args))
    module.weight.requires_grad_(False)
    check_adapter(module, normal(*shape))
