"""A second opinion: curvlinops' GGN and K-FAC, written by others."""

import pytest
import torch
from torch import nn

from kronfac.fisher_products import fisher_gram
from kronfac.layers import find_layers
from kronfac.linalg import KroneckerProduct
from kronfac.objective import objective_of
from kronfac.statistics import ExactFisher, estimate
from tests.conformance import assert_relative
from tests.conftest import batch, mlp, normal, random_targets, seeded
from tests.reference import dense

curvlinops = pytest.importorskip("curvlinops")

LOSSES = [
    (nn.MSELoss, "gaussian"),
    (nn.BCEWithLogitsLoss, "bernoulli"),
    (nn.CrossEntropyLoss, "categorical"),
]
each_loss = pytest.mark.parametrize(
    ("loss", "likelihood"), LOSSES, ids=lambda v: getattr(v, "__name__", v)
)
each_reduction = pytest.mark.parametrize("reduction", ["mean", "sum"])


@pytest.fixture
def model():
    return mlp([4, 5, 4, 3])


X = normal(11, 4)


def targets(model, likelihood):
    """Curvlinops takes binary targets only with the binary cross-entropy."""
    y = random_targets(model(X), likelihood)
    return y.round() if likelihood == "bernoulli" else y


def directions(model, count):
    return [
        dense.unflatten(normal(len(dense.theta(model)), seed=seed), dense.shapes(model))
        for seed in range(count)
    ]


def as_parameters(model, matrices):
    """Tensors like `model.parameters()`."""
    return [
        part
        for layer, V in zip(find_layers(model), matrices, strict=True)
        for part in layer.split(V)
    ]


@each_loss
@each_reduction
def test_fisher_gram_is_that_of_their_gauss_newton_matrix(model, loss, likelihood, reduction):
    module = loss(reduction=reduction)
    y = targets(model, likelihood)
    parameters = list(model.parameters())
    ggn = curvlinops.GGNLinearOperator(model, module, parameters, [(X, y)])
    vectors = directions(model, 2)
    expected = torch.zeros(2, 2, dtype=torch.float64)
    for j, v in enumerate(vectors):
        product = ggn @ as_parameters(model, v)
        for i, u in enumerate(vectors):
            pairs = zip(as_parameters(model, u), product, strict=True)
            expected[i, j] = sum((a * b).sum() for a, b in pairs)
    objective = objective_of(module)
    rows = batch(X, 3, chunk=4)
    gram = fisher_gram(
        model,
        find_layers(model),
        objective.likelihood,
        rows,
        objective.case_weight(rows.cases, rows.outputs),
        vectors,
    )
    assert_relative(gram, expected)


@each_loss
@each_reduction
def test_kronecker_blocks_are_theirs(model, loss, likelihood, reduction):
    module = loss(reduction=reduction)
    y = targets(model, likelihood)
    kfac = curvlinops.KFACLinearOperator(
        model,
        module,
        list(model.parameters()),
        [(X, y)],
        fisher_type=curvlinops.FisherType.TYPE2,
        separate_weight_and_bias=False,
    )
    objective = objective_of(module)
    rows = batch(X, 3)
    factors = estimate(
        model,
        find_layers(model),
        objective,
        rows,
        objective.case_weight(rows.cases, rows.outputs),
        ExactFisher(),
        seeded(),
        neighbours=False,
    )
    (V,) = directions(model, 1)
    ours = [KroneckerProduct(A, G).mv(v) for A, G, v in zip(factors.A, factors.G, V, strict=True)]
    theirs = kfac @ as_parameters(model, V)
    for left, right in zip(as_parameters(model, ours), theirs, strict=True):
        assert_relative(left, right.detach())
