"""Networks for which the Kronecker-factored Fisher is the Fisher [MG15 §3].

F̃_ij = F_ij wherever ā_{i−1}ā_{j−1}ᵀ and g_i g_jᵀ are uncorrelated, the second in its expectation over y:
where either does not vary from case to case.
"""

from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from kronfac import KFAC, Bernoulli, Categorical, FixedDamping, FixedGamma, Gaussian
from kronfac.control import RawStep
from kronfac.extend import ExactFisher
from kronfac.objective import Likelihood
from tests.reference.dense import flatten, kron, kron_fisher, moments, shapes
from tests.theory.networks import (
    biased,
    block_slices,
    curvature,
    fisher,
    gradient,
    linear,
    random_network,
)

SIZES = (3, 4, 3, 2)
LIKELIHOODS = {"gaussian": Gaussian(), "bernoulli": Bernoulli(), "categorical": Categorical()}


def full_kronecker_fisher(model: nn.Module, likelihood: str, x: Tensor) -> Tensor:
    """F̃, all its blocks Ā_{i−1,j−1} ⊗ G_ij; kronfac keeps those on and next to the diagonal."""
    return kron_fisher(*moments(model, x, likelihood))


def problem(nonlinearity: type[nn.Module], cases: int) -> tuple[nn.Sequential, Tensor]:
    generator = torch.Generator().manual_seed(0)
    model = biased(random_network(SIZES, linear, generator), nonlinearity)
    return model, torch.randn(cases, SIZES[0], generator=generator, dtype=torch.float64)


def assert_kronfac_blocks(model: nn.Module, loss: Likelihood, x: Tensor, F: Tensor) -> None:
    """The blocks that kronfac estimates are those of F."""
    estimated = curvature(model, loss, x, coupled=True)
    blocks = block_slices(shapes(model))
    for s, block in zip(blocks, estimated.blocks, strict=True):
        assert_close(kron(block.A, block.G), F[s, s], rtol=0, atol=1e-10)
    for (s, t), link in zip(pairwise(blocks), estimated.links, strict=True):
        assert_close(kron(link.A_next, link.G_next), F[s, t], rtol=0, atol=1e-10)


def test_deep_linear_networks_with_squared_error():
    """§3: F̃ = F, off-diagonal blocks included, as the Jacobians ∂z/∂s_i and F_R = I/σ² are constant."""
    model, x = problem(nn.Identity, cases=30)
    F = fisher(model, Gaussian(), x)
    assert_close(full_kronecker_fisher(model, "gaussian", x), F, rtol=0, atol=1e-10)
    assert_kronfac_blocks(model, Gaussian(), x, F)


@pytest.mark.parametrize("likelihood", LIKELIHOODS)
def test_a_single_case(likelihood):
    """§3: on one input F̃ = F for any network, as ā ā′ᵀ ⊗ E[g g′ᵀ] is a Kronecker product already."""
    model, x = problem(nn.Tanh, cases=1)
    loss = LIKELIHOODS[likelihood]
    F = fisher(model, loss, x)
    assert_close(full_kronecker_fisher(model, likelihood, x), F, rtol=0, atol=1e-10)
    assert_kronfac_blocks(model, loss, x, F)


@pytest.mark.parametrize(
    ("nonlinearity", "likelihood"),
    [
        pytest.param(nn.Tanh, "gaussian", id="nonlinear units"),
        pytest.param(nn.Identity, "bernoulli", id="F_R that varies"),
    ],
)
def test_elsewhere_it_is_an_approximation(nonlinearity, likelihood):
    """§3: "a major approximation to make"; linear units or a constant F_R alone are not enough."""
    model, x = problem(nonlinearity, cases=30)
    F = fisher(model, LIKELIHOODS[likelihood], x)
    F_tilde = full_kronecker_fisher(model, likelihood, x)
    assert float((F_tilde - F).norm()) > 0.01 * float(F.norm())


def test_last_layer_with_squared_error():
    """§3: F̃_ℓℓ = F_ℓℓ for squared error whatever the units below, as g_ℓ's moments are constant."""
    model, x = problem(nn.Tanh, cases=30)
    F = fisher(model, Gaussian(), x)
    last = block_slices(shapes(model))[-1]
    estimated = curvature(model, Gaussian(), x).blocks[-1]
    assert_close(kron(estimated.A, estimated.G), F[last, last], rtol=0, atol=1e-10)


def test_block_steps_are_natural_gradients_where_the_blocks_are_exact():
    """§2.2: with one layer trained at a time, a deep linear network's step is −F_ii⁻¹ ∇_i h, Newton's."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(30, 3, generator=generator, dtype=torch.float64)
    y = torch.randn(30, 2, generator=generator, dtype=torch.float64)
    loss = Gaussian(0.7)
    # No unit without a say of its own in the outputs: every F_ii is regular.
    network = random_network((3, 2, 2), linear, generator)
    for trained in network.layers:
        for layer in network.layers:
            layer.requires_grad_(layer is trained)
        F, grad = fisher(network, loss, x), flatten(gradient(network, loss, x, y))
        before = flatten([trained.weight.detach()]).clone()
        optimizer = KFAC(
            network,
            loss,
            fisher=ExactFisher(),
            damping=FixedDamping(0.0),
            gamma=FixedGamma(0.0),
            step_rule=RawStep(1.0),
        )
        optimizer.step(optimizer.closure(x, y))
        step = flatten([trained.weight.detach()]) - before
        assert_close(step, -torch.linalg.solve(F, grad), rtol=1e-8, atol=1e-10)
        # Newton: the objective is quadratic in one layer's weights, so its gradient is now 0.
        left = flatten(gradient(network, loss, x, y))
        assert_close(left, torch.zeros_like(left), rtol=0, atol=1e-10)
