"""A second opinion: curvlinops' GGN, K-FAC and EKFAC, written by others."""

import pytest
import torch
from torch import nn

from kronfac.curvature import EigenvalueCorrectedInverse, ExactFisher, ExactTikhonov
from kronfac.linalg import KroneckerProduct
from kronfac.linearize import Linearizer
from tests.conformance import assert_relative
from tests.conftest import batch, mlp, network_of, normal, random_targets
from tests.curvature.test_estimate import curvature_of, estimate_on
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
    return network_of(model).split(matrices)


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
    network = network_of(model, module)
    gram = Linearizer(network).fisher_gram(batch(network, X, y, chunk=4), vectors)
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
    curvature = curvature_of(model, module, X, ExactFisher(), y, neighbours=False)
    (V,) = directions(model, 1)
    ours = [KroneckerProduct(b.A, b.G).mv(v) for b, v in zip(curvature.blocks, V, strict=True)]
    theirs = kfac @ as_parameters(model, V)
    for left, right in zip(as_parameters(model, ours), theirs, strict=True):
        assert_relative(left, right.detach())


@each_loss
@each_reduction
def test_eigenvalue_corrected_blocks_are_theirs(model, loss, likelihood, reduction):
    module = loss(reduction=reduction)
    y = targets(model, likelihood)
    ekfac = curvlinops.EKFACLinearOperator(
        model,
        module,
        list(model.parameters()),
        [(X, y)],
        fisher_type=curvlinops.FisherType.TYPE2,
        separate_weight_and_bias=False,
    )
    network = network_of(model, module)
    rows, strategy = batch(network, X, y), EigenvalueCorrectedInverse(ExactTikhonov())
    gamma = 0.3
    inverse = strategy.prepare(estimate_on(network, rows, ExactFisher())).damped(gamma)
    update = strategy.between_refreshes(inverse, 0.0)
    estimate_on(network, rows, ExactFisher(), update=update)
    (V,) = directions(model, 1)
    # (F + γ²I)⁻¹ of ours, then F + γ²I of theirs.
    U = update.value().mv(V)
    theirs = [
        F_u + gamma**2 * u
        for F_u, u in zip(ekfac @ as_parameters(model, U), as_parameters(model, U), strict=True)
    ]
    for left, right in zip(as_parameters(model, V), theirs, strict=True):
        assert_relative(right.detach(), left, 1e-8)
