"""uᵀFv from forward-mode products alone, against the dense Fisher."""

import pytest
import torch
from torch import nn

from kronfac.linearize import Linearizer
from kronfac.objective import Gaussian
from kronfac.record import record
from tests.conformance import assert_relative
from tests.conftest import (
    ACTIVATIONS,
    LIKELIHOODS,
    batch,
    mlp,
    network_of,
    normal,
    passes_either_way,
    random_targets,
)
from tests.reference import dense

WIDTHS = [4, 5, 3, 2]

passes = passes_either_way()


def vectors(model, count):
    size = len(dense.theta(model))
    return [normal(size, seed=seed) for seed in range(count)]


@torch.no_grad()  # as in `KFAC.step`
def gram_of(model, loss, x, flat, chunk=None, targets=None, factor=1.0):
    directions = [dense.unflatten(v, dense.shapes(model)) for v in flat]
    network = network_of(model, loss)
    return Linearizer(network).fisher_gram(batch(network, x, targets, chunk), directions, factor)


def expected_gram(F, flat):
    V = torch.stack(flat, dim=1)
    return V.mT @ F @ V


@pytest.mark.parametrize("likelihood", LIKELIHOODS)
@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("chunk", [None, 5, 1])
def test_gram_is_that_of_the_dense_fisher(likelihood, count, chunk):
    model, x = mlp(WIDTHS), normal(12, 4)
    flat = vectors(model, count)
    gram = gram_of(model, LIKELIHOODS[likelihood](), x, flat, chunk)
    F = dense.exact_fisher(model, x, likelihood)
    assert gram.shape == (count, count)
    assert torch.equal(gram, gram.mT)
    assert_relative(gram, expected_gram(F, flat))


@pytest.mark.parametrize(
    "activation",
    [*ACTIVATIONS, lambda: nn.ReLU(inplace=True)],
    ids=[*ACTIVATIONS, "relu_in_place"],
)
@pytest.mark.parametrize("bias", [True, False])
def test_activations_and_biases(activation, bias):
    model, x = mlp(WIDTHS, activation, bias), normal(12, 4)
    plain = mlp(WIDTHS, activation if isinstance(activation, str) else "relu", bias)
    flat = vectors(model, 2)
    F = dense.exact_fisher(plain, x, "categorical")
    assert_relative(gram_of(model, LIKELIHOODS["categorical"](), x, flat), expected_gram(F, flat))


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize(
    ("loss", "likelihood"),
    [
        (nn.MSELoss, "gaussian"),
        (nn.BCEWithLogitsLoss, "bernoulli"),
        (nn.CrossEntropyLoss, "categorical"),
    ],
)
def test_gram_has_the_units_of_the_loss_module(loss, likelihood, reduction):
    """For a network that is linear in θ the Gauss-Newton matrix is the Hessian of the module itself."""
    model, x = mlp([4, 3]), normal(12, 4)
    module = loss(reduction=reduction)
    y = random_targets(model(x), likelihood)
    hessian = torch.func.hessian(lambda t: module(dense.network_function(model, t, x), y))(
        dense.theta(model)
    )
    flat = vectors(model, 2)
    for targets in (y, None):  # read from the call, or declared
        gram = gram_of(model, module, x, flat, chunk=5, targets=targets)
        assert_relative(gram, expected_gram(hessian, flat))


@pytest.mark.parametrize("likelihood", LIKELIHOODS)
@pytest.mark.parametrize("chunk", [None, 5])
def test_product_is_that_of_the_dense_fisher(likelihood, chunk):
    model, x = mlp(WIDTHS), normal(12, 4)
    (v,) = vectors(model, 1)
    network = network_of(model, LIKELIHOODS[likelihood]())
    V = dense.unflatten(v, dense.shapes(model))
    with torch.no_grad():
        product = Linearizer(network).fisher_product(batch(network, x, chunk=chunk), V, factor=1.5)
    F = dense.exact_fisher(model, x, likelihood)
    assert_relative(dense.flatten(product), 1.5 * F @ v)


def weighted_fisher(model, x, weights, likelihood="categorical"):
    """Σ_t w_t J_tᵀ F_R J_t."""
    J = dense.jacobian(model, x)
    F_R = dense.output_fisher(model(x).detach(), likelihood)
    return torch.einsum("c,cop,coq,cqr->pr", weights, J, F_R, J)


def test_terms_with_weights():
    """Class weights and ignored targets: a mean over the weights of the targets that count."""
    model, x = mlp([4, 5, 3]), normal(6, 4)
    y, weight = torch.tensor([0, 2, -100, 1, 1, -100]), torch.tensor([1.0, 2.0, 5.0]).double()
    loss = nn.CrossEntropyLoss(weight=weight)
    flat = vectors(model, 2)
    weights = torch.tensor([1.0, 5.0, 0.0, 2.0, 2.0, 0.0]).double() / 10
    gram = gram_of(model, loss, x, flat, targets=y)
    assert_relative(gram, expected_gram(weighted_fisher(model, x, weights), flat))


def test_flattened_sequences_have_a_term_each():
    """`loss(model(x).reshape(-1, C), y.reshape(-1))`: the softmax is over the classes of one token."""
    model, x = mlp([4, 5, 3]), normal(6, 2, 4)
    y = torch.randint(3, (6, 2), generator=torch.Generator().manual_seed(1))
    loss, flat = nn.CrossEntropyLoss(), vectors(model, 2)
    network = network_of(model, loss)
    with record(model, network.objective) as recording:
        loss(model(x).reshape(-1, 3), y.reshape(-1)).backward()
    directions = [dense.unflatten(v, dense.shapes(model)) for v in flat]
    with torch.no_grad():
        gram = Linearizer(network).fisher_gram(recording.batch(), directions)
    F = dense.exact_fisher(model, x.reshape(-1, 4), "categorical")
    assert_relative(gram, expected_gram(F, flat))


def test_frozen_layers_take_no_part():
    model, x = mlp(WIDTHS), normal(12, 4)
    F = dense.exact_fisher(model, x, "gaussian")
    shapes = dense.shapes(model)
    V = list(dense.unflatten(normal(len(F)), shapes))
    model[2].requires_grad_(False)
    kept = (V[0], V[2])
    network = network_of(model, Gaussian())
    gram = Linearizer(network).fisher_gram(batch(network, x), [kept])
    v = dense.flatten([V[0], torch.zeros_like(V[1]), V[2]])
    assert_relative(gram, (v @ F @ v).reshape(1, 1))


def test_outputs_with_more_dimensions():
    model, x = mlp([4, 5, 6]), normal(12, 4)
    shaped = nn.Sequential(model, nn.Unflatten(1, (2, 3)))
    flat = vectors(model, 2)
    F = dense.exact_fisher(model, x, "gaussian")
    assert_relative(gram_of(shaped, Gaussian(), x, flat), expected_gram(F, flat))


def test_float32_directions_give_a_float64_gram():
    model, x = mlp(WIDTHS), normal(12, 4)
    flat = vectors(model, 2)
    single = gram_of(model.float(), Gaussian(), x.float(), [v.float() for v in flat])
    assert single.dtype == torch.float64
    F = dense.exact_fisher(mlp(WIDTHS), x, "gaussian")
    assert_relative(single, expected_gram(F, flat), 1e-5)


def test_nothing_is_left_behind():
    model, x = mlp(WIDTHS), normal(12, 4)
    before = dense.theta(model)
    gram = gram_of(model, Gaussian(), x, vectors(model, 2))
    assert not gram.requires_grad
    assert torch.equal(dense.theta(model), before)
    assert all(p.grad is None and type(p) is nn.Parameter for p in model.parameters())


def test_directions_see_the_same_dropout_masks():
    """Then the Gram matrix of v, v and 2v is that of one number, to rounding; the RNG is restored."""
    model = nn.Sequential(nn.Linear(4, 20), nn.Tanh(), nn.Dropout(0.5), nn.Linear(20, 3)).double()
    V = (normal(20, 5, seed=1), normal(3, 21, seed=2))
    directions = [V, V, tuple(2 * v for v in V)]
    network = network_of(model, Gaussian())
    with record(model, network.objective) as recording:
        z = model(normal(12, 4))
        Gaussian()(z, torch.zeros_like(z)).backward()
    before = torch.get_rng_state()
    gram = Linearizer(network).fisher_gram(recording.batch(), directions)
    assert torch.equal(torch.get_rng_state(), before)
    pattern = torch.tensor([[1, 1, 2], [1, 1, 2], [2, 2, 4]], dtype=torch.float64)
    assert_relative(gram, gram[0, 0] * pattern)


def test_the_model_is_left_as_it_was_if_it_fails():
    """In the middle of a pass."""

    class Broken(nn.Module):
        def forward(self, x):
            if self.broken:
                raise RuntimeError("broken")
            return x

    model = nn.Sequential(nn.Linear(4, 3), Broken()).double()
    model[1].broken = False
    network = network_of(model, Gaussian())
    rows = batch(network, normal(6, 4))
    before = [p.detach().clone() for p in model.parameters()]
    model[1].broken = True
    with pytest.raises(RuntimeError, match="broken"):
        Linearizer(network).fisher_gram(rows, [(normal(3, 5),)])
    assert "forward" not in model[0].__dict__
    assert not any(module._forward_hooks for module in model.modules())
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))


def test_outputs_come_with_the_products():
    """A pass for each direction and no further one: the passes compute the outputs too."""
    model = nn.Sequential(mlp(WIDTHS), nn.LayerNorm(2, dtype=torch.float64))
    network = network_of(model, Gaussian())
    made = batch(network, normal(6, 4))
    network.learned.compared = True
    seen = []
    model.register_forward_hook(lambda *_: seen.append(1))
    directions = [tuple(normal(*u.shape, seed=s) for u in network.units) for s in range(2)]
    with torch.no_grad():
        Linearizer(network).fisher_gram(made, directions)
    assert len(seen) == 2
