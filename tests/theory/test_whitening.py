"""K-FAC as gradient descent in a centered and whitened network [MG15 §10, Corollary 3]."""

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from kronfac import KFAC, Bernoulli, FixedDamping, FixedGamma, Gaussian, RawStep
from kronfac.extend import ExactFisher
from kronfac.objective import Likelihood
from tests.reference.dense import flatten
from tests.theory.networks import (
    Network,
    activities_and_gradients,
    curvature,
    gradient,
    random_network,
)

SIZES = (3, 4, 3, 2)
LIKELIHOODS = [
    pytest.param(Gaussian(0.7), id="gaussian"),
    pytest.param(Bernoulli(), id="bernoulli"),
]


def inverse_root(M: Tensor) -> Tensor:
    """M^{-1/2}, the root that the paper's proof takes."""
    values, vectors = torch.linalg.eigh(M)
    return vectors @ torch.diag(values.rsqrt()) @ vectors.mT


def triangular_root(M: Tensor) -> Tensor:
    """Upper-triangular Ω with Ω M Ωᵀ = I, by Cholesky from the last coordinate up.

    Its last row is (0, …, 0, M_nn^{-1/2}): of M = E[ā āᵀ] it leaves the homogeneous coordinate as it is.
    """
    L = torch.linalg.cholesky(M.flip(0, 1))
    identity = torch.eye(len(M), dtype=M.dtype)
    return torch.linalg.solve_triangular(L, identity, upper=False).flip(0, 1)


ROOTS = [pytest.param(inverse_root, id="symmetric"), pytest.param(triangular_root, id="cholesky")]


def problem() -> tuple[Network, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    network = random_network(SIZES, torch.tanh, generator)
    x = torch.randn(60, SIZES[0], generator=generator, dtype=torch.float64)
    y = torch.rand(60, SIZES[-1], generator=generator, dtype=torch.float64)
    return network, x, y


def whitened(network: Network, loss: Likelihood, x: Tensor, root) -> Network:
    """The equivalent network with Ω_i Ā_ii Ω_iᵀ = I and Φ_iᵀ G_ii Φ_i = I."""
    moments = curvature(network, loss, x)
    return network.transformed(
        [root(block.A) for block in moments.blocks],
        [root(block.G).mT.contiguous() for block in moments.blocks],
    )


@pytest.mark.parametrize("loss", LIKELIHOODS)
@pytest.mark.parametrize("root", ROOTS)
def test_the_transformed_network_is_whitened(root, loss):
    """Corollary 3, proof: Ā† = I, G† = I, and therefore F̆† = I, by kronfac's own statistics."""
    network, x, _ = problem()
    moments = curvature(whitened(network, loss, x, root), loss, x)
    for M in (M for block in moments.blocks for M in (block.A, block.G)):
        assert_close(M, torch.eye(len(M), dtype=M.dtype), rtol=0, atol=1e-10)


@pytest.mark.parametrize("alpha", [1.0, 0.1])
@pytest.mark.parametrize("loss", LIKELIHOODS)
@pytest.mark.parametrize("root", ROOTS)
def test_kfac_is_gradient_descent_in_the_whitened_network(root, loss, alpha):
    """Corollary 3: θ − αF̆⁻¹∇h = ζ(θ† − α∇h†), F̆⁻¹∇h being a step of the real optimizer."""
    network, x, y = problem()
    dagger = whitened(network, loss, x, root)
    moved_dagger = [
        W - alpha * V for W, V in zip(dagger.weights, gradient(dagger, loss, x, y), strict=True)
    ]
    optimizer = KFAC(
        network,
        loss,
        fisher=ExactFisher(),
        damping=FixedDamping(0.0),
        gamma=FixedGamma(0.0),
        step_rule=RawStep(alpha),
    )
    optimizer.step(optimizer.closure(x, y))
    expected = flatten(dagger.zeta(moved_dagger))
    scale = float(expected.abs().max())
    assert_close(flatten(network.weights), expected, rtol=0, atol=1e-10 * scale)


def test_activities_and_gradients_are_centered():
    """Corollary 3: E[a†_i] = 0 and E[g†_i] = 0 w.r.t. the model's distribution.

    The proof reads E[a†] off the last column of Ā† = I, which takes a last coordinate of ā† that is
    still 1. The Cholesky factor keeps it so; the symmetric root of the proof whitens all of ā as one
    vector, its constant coordinate included, and centers nothing.
    """
    network, x, _ = problem()
    loss = Bernoulli()
    dagger = whitened(network, loss, x, triangular_root)
    # The score is affine in y, so its expectation over y is the score at the mean.
    mean = dagger(x).detach().sigmoid()
    activities, gradients = activities_and_gradients(dagger, loss, x, mean)
    for a in activities:
        expected = a.new_zeros(a.shape[1])
        expected[-1] = 1
        assert_close(a.detach().mean(dim=0), expected, rtol=0, atol=1e-10)
        assert_close(a.detach()[:, -1], torch.ones_like(a[:, -1]), rtol=0, atol=1e-10)
    for g in gradients:
        assert_close(g.mean(dim=0), torch.zeros_like(g[0]), rtol=0, atol=1e-10)

    symmetric = whitened(network, loss, x, inverse_root)
    activities, _ = activities_and_gradients(symmetric, loss, x, mean)
    assert all(float(a.detach()[:, :-1].mean(dim=0).norm()) > 0.01 for a in activities)
