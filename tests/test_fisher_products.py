"""uᵀFv from forward-mode products alone, against the dense Fisher."""

import pytest
import torch
from torch import nn

from kronfac.fisher_products import fisher_gram
from kronfac.layers import find_layers
from kronfac.objective import Gaussian, objective_of
from kronfac.statistics import capture
from tests.conformance import assert_relative
from tests.conftest import (
    ACTIVATIONS,
    LIKELIHOODS,
    batch,
    mlp,
    normal,
    passes_either_way,
    random_targets,
)
from tests.reference import dense

WIDTHS = [4, 5, 3, 2]

passes = passes_either_way("kronfac.fisher_products")


def vectors(model, count):
    size = len(dense.theta(model))
    return [normal(size, seed=seed) for seed in range(count)]


@torch.no_grad()  # as in `KFAC.step`
def gram_of(model, likelihood, x, flat, chunk=None, weight=1.0):
    directions = [dense.unflatten(v, dense.shapes(model)) for v in flat]
    outputs = model(x[:1]).numel()
    rows = batch(x, outputs, chunk=chunk)
    return fisher_gram(model, find_layers(model), likelihood, rows, weight, directions)


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
    objective = objective_of(module)
    flat = vectors(model, 2)
    weight = objective.case_weight(len(x), 3)
    gram = gram_of(model, objective.likelihood, x, flat, chunk=5, weight=weight)
    assert_relative(gram, expected_gram(hessian, flat))


def test_frozen_layers_take_no_part():
    model, x = mlp(WIDTHS), normal(12, 4)
    F = dense.exact_fisher(model, x, "gaussian")
    shapes = dense.shapes(model)
    V = list(dense.unflatten(normal(len(F)), shapes))
    model[2].requires_grad_(False)
    kept = (V[0], V[2])
    gram = fisher_gram(model, find_layers(model), Gaussian(), batch(x, 2), 1.0, [kept])
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


@pytest.mark.parametrize("activation", ["sigmoid", "relu"])
def test_what_the_closures_pass_left_saves_work_and_changes_nothing(activation, monkeypatch):
    """With the layers' outputs at hand, the pass makes no product W a of its own."""
    monkeypatch.setattr("kronfac.fisher_products.perceptron", lambda *_: None)
    model, x = mlp(WIDTHS, activation), normal(12, 4)
    layers, flat = find_layers(model), vectors(model, 2)
    with torch.no_grad(), capture(layers) as captured:
        for p in model.parameters():
            p.requires_grad_()
        with torch.enable_grad():
            model(x)
    kept = batch(x, 2).with_activations(captured.activations())
    directions = [dense.unflatten(v, dense.shapes(model)) for v in flat]
    args = (model, layers, LIKELIHOODS["bernoulli"]())
    for fraction in (1.0, 0.5):
        plain, reused = (
            fisher_gram(*args, rows.first(fraction), 1.0, directions)
            for rows in (batch(x, 2), kept)
        )
        assert_relative(reused, plain)
    # They are really used: with others in their place the result is another.
    wrong = {name: s + 1 for name, s in captured.activations().items()}
    assert not torch.allclose(
        fisher_gram(*args, batch(x, 2).with_activations(wrong), 1.0, directions),
        fisher_gram(*args, batch(x, 2), 1.0, directions),
    )


def test_activations_that_were_overwritten_are_not_kept():
    model = mlp(WIDTHS, lambda: nn.ReLU(inplace=True))
    with capture(find_layers(model)) as captured:
        model(normal(12, 4))
    assert captured.activations() is None


def test_directions_see_the_same_dropout_masks():
    """Then the Gram matrix of v, v and 2v is that of one number, to rounding; the RNG is restored."""
    model = nn.Sequential(nn.Linear(4, 20), nn.Tanh(), nn.Dropout(0.5), nn.Linear(20, 3)).double()
    V = (normal(20, 5, seed=1), normal(3, 21, seed=2))
    directions = [V, V, tuple(2 * v for v in V)]
    rows = batch(normal(12, 4), 3)
    before = torch.get_rng_state()
    gram = fisher_gram(model, find_layers(model), Gaussian(), rows, 1.0, directions)
    assert torch.equal(torch.get_rng_state(), before)
    pattern = torch.tensor([[1, 1, 2], [1, 1, 2], [2, 2, 4]], dtype=torch.float64)
    assert_relative(gram, gram[0, 0] * pattern)


def test_layers_get_their_own_forward_back():
    """Also when the model raises in the middle of the pass."""

    class Broken(nn.Module):
        def forward(self, x):
            raise RuntimeError("broken")

    model = nn.Sequential(nn.Linear(4, 3), Broken()).double()
    with pytest.raises(RuntimeError, match="broken"):
        gram_of_rows(model)
    assert "forward" not in model[0].__dict__


def gram_of_rows(model):
    directions = [(normal(3, 5),)]
    return fisher_gram(
        model, find_layers(model), Gaussian(), batch(normal(6, 4), 3), 1.0, directions
    )
