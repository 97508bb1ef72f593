"""Heskes' interpretation: the block-diagonal Fisher as the curvature of a distance [MG15 §12]."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.testing import assert_close

from kronfac import Bernoulli, Gaussian
from kronfac.objective import Likelihood
from tests.reference.dense import flatten, unflatten
from tests.theory.networks import (
    Network,
    activities_and_gradients,
    block_diagonal_fisher,
    block_slices,
    curvature,
    fisher,
    homogeneous,
    random_network,
)

SIZES = (2, 3, 2, 2)
LIKELIHOODS = [
    pytest.param(Gaussian(0.7), id="gaussian"),
    pytest.param(Bernoulli(), id="bernoulli"),
]


def problem() -> tuple[Network, Tensor]:
    generator = torch.Generator().manual_seed(0)
    network = random_network(SIZES, torch.tanh, generator)
    return network, torch.randn(12, SIZES[0], generator=generator, dtype=torch.float64)


def activities(network: Network, x: Tensor) -> list[Tensor]:
    """ā_0 … ā_{ℓ−1}, which θ determines and θ′ does not."""
    found, _ = activities_and_gradients(network, Gaussian(), x, network(x).detach())
    return [a.detach() for a in found]


@pytest.mark.parametrize("loss", LIKELIHOODS)
def test_block_diagonal_fisher_is_the_hessian_of_a_distance(loss):
    """§12: F̆ is the Hessian w.r.t. θ′ of D(θ′, θ) = ½ Σ_i E[(s_i − s′_i)ᵀ G_ii (s_i − s′_i)]."""
    network, x = problem()
    moments = curvature(network, loss, x)
    inputs = activities(network, x)
    shapes = [W.shape for W in network.weights]
    theta = flatten(network.weights)

    def distance(theta_prime: Tensor) -> Tensor:
        total = theta_prime.new_zeros(())
        for W, W_prime, a, block in zip(
            network.weights, unflatten(theta_prime, shapes), inputs, moments.blocks, strict=True
        ):
            difference = a @ (W - W_prime).mT
            total = total + ((difference @ block.G) * difference).sum() / (2 * len(a))
        return total

    F_breve = block_diagonal_fisher(moments)
    # D is quadratic in θ′: its Hessian is the same everywhere, and D(θ, θ) its minimum, 0.
    for point in (theta, theta + 1):
        hessian = torch.func.hessian(distance)(point)
        assert_close(hessian, F_breve, rtol=1e-8, atol=1e-8)
    assert_close(torch.func.grad(distance)(theta), torch.zeros_like(theta), rtol=0, atol=1e-10)
    assert float(distance(theta)) == 0


def divergence(loss: Likelihood, z: Tensor, z_prime: Tensor) -> Tensor:
    """E[KL(R_{y|z} ‖ R_{y|z′})], summed over independent outputs, averaged over cases."""
    if isinstance(loss, Gaussian):
        return (z - z_prime).square().sum() / (2 * loss.variance * len(z))
    p = z.sigmoid()
    bce = functional.binary_cross_entropy_with_logits
    return (bce(z_prime, p, reduction="sum") - bce(z, p, reduction="sum")) / len(z)


@pytest.mark.parametrize("reverse", [False, True], ids=["KL(P|P')", "KL(P'|P)"])
@pytest.mark.parametrize("loss", LIKELIHOODS)
def test_exact_blocks_are_the_hessian_of_divergences(loss, reverse):
    """§12: with F_{P(y|s_i)} for G_ii, D's Hessian is the exact blocks F_ii, that of Σ_i E[KL(P ‖ P′)]."""
    network, x = problem()
    inputs = activities(network, x)
    shapes = [W.shape for W in network.weights]
    outputs = network(x).detach()

    def from_layer(i: int, s: Tensor) -> Tensor:
        """The network's output as a function of s_i."""
        for j in range(i, len(shapes) - 1):
            s = homogeneous(torch.tanh(s)) @ network.weights[j + 1].mT
        return s

    def total(theta_prime: Tensor) -> Tensor:
        result = theta_prime.new_zeros(())
        for i, W_prime in enumerate(unflatten(theta_prime, shapes)):
            z_prime = from_layer(i, inputs[i] @ W_prime.mT)
            pair = (z_prime, outputs) if reverse else (outputs, z_prime)
            result = result + divergence(loss, *pair)
        return result

    F = fisher(network, loss, x)
    exact_blocks = torch.block_diag(*(F[s, s] for s in block_slices(shapes)))
    hessian = torch.func.hessian(total)(flatten(network.weights))
    assert_close(hessian, exact_blocks, rtol=1e-8, atol=1e-8)


def test_G_is_the_average_fisher_of_what_follows_the_layer():
    """§12: G_ii = E[g_i g_iᵀ] = E[F_{P(y|s_i)}], by the Jacobian of the rest of the network."""
    network, x = problem()
    loss = Bernoulli()
    moments = curvature(network, loss, x)
    inputs = activities(network, x)
    p = network(x).detach().sigmoid()
    for i, block in enumerate(moments.blocks):

        def rest(s: Tensor, i: int = i) -> Tensor:
            for W in network.weights[i + 1 :]:
                s = torch.cat([torch.tanh(s), s.new_ones(1)]) @ W.mT
            return s

        J = torch.func.vmap(torch.func.jacrev(rest))(inputs[i] @ network.weights[i].mT)
        averaged = torch.einsum("coi,co,coj->ij", J, p * (1 - p), J) / len(x)
        assert_close(block.G, averaged, rtol=1e-8, atol=1e-10)
