"""Invariance to transformations of the network [MG15 §10, App. D]."""

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from kronfac import (
    KFAC,
    Bernoulli,
    FixedDamping,
    FixedGamma,
    Gaussian,
    Intervals,
    QuadraticModel,
    RawStep,
)
from kronfac.control import StepRule
from kronfac.curvature import ApproximateInverse
from kronfac.extend import BlockDiagonalInverse, BlockTridiagonalInverse, ExactFisher
from kronfac.objective import Likelihood
from tests.reference.dense import flatten, kron
from tests.theory.networks import (
    Network,
    biased,
    block_diagonal_fisher,
    curvature,
    dense,
    fisher,
    gradient,
    linear,
    random_invertible,
    random_network,
)

SIZES = (3, 4, 3, 2)
CASES = 60
INVERSES = [
    pytest.param(BlockDiagonalInverse(), id="block-diagonal"),
    pytest.param(BlockTridiagonalInverse(), id="block-tridiagonal"),
]
# The Fisher of a softmax is singular, and with it the last G: without damping there is no update to
# speak of. So the theorem is about these two.
LIKELIHOODS = [
    pytest.param(Gaussian(0.7), id="gaussian"),
    pytest.param(Bernoulli(), id="bernoulli"),
]


def problem(seed: int) -> tuple[Network, Tensor, Tensor]:
    """A default network with inputs and targets; targets in [0, 1] suit both likelihoods."""
    generator = torch.Generator().manual_seed(seed)
    network = random_network(SIZES, torch.tanh, generator)
    x = torch.randn(CASES, SIZES[0], generator=generator, dtype=torch.float64)
    y = torch.rand(CASES, SIZES[-1], generator=generator, dtype=torch.float64)
    return network, x, y


def transformation(seed: int) -> tuple[list[Tensor], list[Tensor]]:
    """Arbitrary invertible Ω_0 … Ω_{ℓ−1} and Φ_1 … Φ_ℓ."""
    generator = torch.Generator().manual_seed(1000 + seed)
    Omega = [random_invertible(n + 1, generator) for n in SIZES[:-1]]
    Phi = [random_invertible(n, generator) for n in SIZES[1:]]
    return Omega, Phi


def update(
    network: Network,
    loss: Likelihood,
    x: Tensor,
    y: Tensor,
    inverse: ApproximateInverse,
    gamma: float,
) -> tuple[Tensor, ...]:
    """−F⁻¹ ∇h with kronfac's statistics and inverse."""
    moments = curvature(network, loss, x, coupled=inverse.couples)
    damped = inverse.prepare(moments).damped(gamma)
    return tuple(-U for U in damped.mv(gradient(network, loss, x, y)))


@pytest.mark.parametrize("seed", [0, 2, 3])
@pytest.mark.parametrize("loss", LIKELIHOODS)
@pytest.mark.parametrize("inverse", INVERSES)
def test_updates_do_not_depend_on_the_transformation(inverse, loss, seed):
    """Theorem 1: ζ(θ† + δ†) = θ + δ for δ = −F̆⁻¹∇h and δ = −F̂⁻¹∇h, whatever Ω and Φ."""
    network, x, y = problem(seed)
    dagger = network.transformed(*transformation(seed))
    assert_close(dagger(x), network(x), rtol=1e-10, atol=1e-12)

    delta = update(network, loss, x, y, inverse, gamma=0.0)
    delta_dagger = update(dagger, loss, x, y, inverse, gamma=0.0)
    moved = [W + V for W, V in zip(network.weights, delta, strict=True)]
    moved_dagger = [W + V for W, V in zip(dagger.weights, delta_dagger, strict=True)]
    scale = float(flatten(moved).abs().max())
    assert_close(dagger.zeta(moved_dagger), tuple(moved), rtol=0, atol=1e-10 * scale)


@pytest.mark.parametrize("inverse", INVERSES)
def test_damping_and_plain_gradients_depend_on_the_transformation(inverse):
    """Theorem 1 assumes that damping is absent, and is not true of the gradient itself."""
    network, x, y = problem(0)
    loss = Gaussian()
    dagger = network.transformed(*transformation(0))

    damped = flatten(update(network, loss, x, y, inverse, gamma=0.1))
    damped_dagger = flatten(dagger.zeta(update(dagger, loss, x, y, inverse, gamma=0.1)))
    assert (damped_dagger - damped).norm() > 0.01 * damped.norm()

    plain = flatten(gradient(network, loss, x, y))
    plain_dagger = flatten(dagger.zeta(gradient(dagger, loss, x, y)))
    assert (plain_dagger - plain).norm() > 0.1 * plain.norm()


@pytest.mark.parametrize("loss", LIKELIHOODS)
def test_curvatures_transform_as_the_exact_fisher_does(loss):
    """App. D: F̆† = JᵀF̆J and F̂† = JᵀF̂J for J = diag(Ω_{i−1}ᵀ ⊗ Φ_i), as for the exact F."""
    network, x, _ = problem(3)
    Omega, Phi = transformation(3)
    dagger = network.transformed(Omega, Phi)
    J = torch.block_diag(*(kron(omega.mT, phi) for omega, phi in zip(Omega, Phi, strict=True)))
    moments, moments_dagger = (curvature(net, loss, x, coupled=True) for net in (network, dagger))

    F_breve = block_diagonal_fisher(moments)
    assert_close(block_diagonal_fisher(moments_dagger), J.mT @ F_breve @ J, rtol=0, atol=1e-10)
    F = fisher(network, loss, x)
    assert_close(fisher(dagger, loss, x), J.mT @ F @ J, rtol=0, atol=1e-8)

    # F̂ is had by its inverse: J F̂†⁻¹ Jᵀ = F̂⁻¹.
    F_hat_inv, F_hat_inv_dagger = (
        dense(BlockTridiagonalInverse().prepare(m).damped(0.0), [W.shape for W in network.weights])
        for m in (moments, moments_dagger)
    )
    scale = float(F_hat_inv.abs().max())
    assert_close(J @ F_hat_inv_dagger @ J.mT, F_hat_inv, rtol=0, atol=1e-10 * scale)


# ------------------------------------------------------------------------------------ optimization paths

# The parameters of two equivalent networks agree to 1e-10 after one step. Each step multiplies what
# rounding left by the condition of its factors and passes it on to the next, hence the looser bound.
PATH_TOLERANCE = 1e-9
STEPS = 6
STEP_RULES = [
    pytest.param(RawStep(0.3), id="fixed-rate"),
    pytest.param(QuadraticModel(momentum=False, bounded=False, memory=None), id="rescaled"),
    # The corollary leaves momentum out. With λ + η = 0, M(αΔ + μδ₀) is a function of the changes of
    # the model's outputs alone, so that the rule of §7 is as good as the others.
    pytest.param(QuadraticModel(bounded=False, memory=None), id="momentum"),
]


def path(
    model: nn.Module,
    loss: Likelihood,
    x: Tensor,
    y: Tensor,
    inverse: ApproximateInverse,
    step_rule: StepRule,
    gamma: float = 0.0,
) -> Tensor:
    """The model's outputs before and after each step of the real optimizer, (steps + 1, cases, outputs)."""
    optimizer = KFAC(
        model,
        loss,
        inverse=inverse,
        fisher=ExactFisher(ema_decay=0.6),
        damping=FixedDamping(0.0),
        gamma=FixedGamma(gamma),
        step_rule=step_rule,
        intervals=Intervals(inverse_interval=1),
    )
    outputs = [model(x).detach()]
    for _ in range(STEPS):
        optimizer.step(optimizer.closure(x, y))
        assert optimizer.report.events == ()
        outputs.append(model(x).detach())
    return torch.stack(outputs)


def assert_same_path(first: Tensor, second: Tensor) -> None:
    assert_close(second, first, rtol=0, atol=PATH_TOLERANCE)
    # A path that goes nowhere would be the same for all networks.
    moves = (first[1:] - first[:-1]).flatten(1).norm(dim=1)
    assert float(moves.min()) > 1e-3


@pytest.mark.parametrize("step_rule", STEP_RULES)
@pytest.mark.parametrize("inverse", INVERSES)
def test_paths_do_not_depend_on_the_transformation(inverse, step_rule):
    """Corollary 2: the path through the predictive distributions is the same for any fixed Ω and Φ."""
    network, x, y = problem(5)
    dagger = network.transformed(*transformation(5))
    loss = Bernoulli()
    assert_same_path(
        path(network, loss, x, y, inverse, step_rule), path(dagger, loss, x, y, inverse, step_rule)
    )


@pytest.mark.parametrize("step_rule", STEP_RULES)
@pytest.mark.parametrize("inverse", INVERSES)
def test_sigmoid_and_tanh_networks_take_the_same_path(inverse, step_rule):
    """Corollary 2: logistic or tanh units are the same to K-FAC, as tanh(s) = 2σ(2s) − 1."""
    generator = torch.Generator().manual_seed(8)
    # σ has a quarter of tanh's slope.
    sigmoid = random_network(SIZES, torch.sigmoid, generator, scale=4.0)
    _, x, y = problem(8)
    # tanh(s) of the one is 2σ(Φs) − 1 of the other, Φ = 2; the outputs are not transformed.
    Omega = [torch.eye(n + 1, dtype=torch.float64) for n in SIZES[:-1]]
    Phi = [torch.eye(n, dtype=torch.float64) for n in SIZES[1:]]
    for i, n in enumerate(SIZES[1:-1]):
        Omega[i + 1][:n, :n] *= 2
        Omega[i + 1][:n, n] = -1
        Phi[i] *= 2
    tanh = sigmoid.transformed(Omega, Phi)

    loss = Gaussian()
    assert_same_path(
        path(biased(sigmoid, nn.Sigmoid), loss, x, y, inverse, step_rule),
        path(biased(tanh, nn.Tanh), loss, x, y, inverse, step_rule),
    )


@pytest.mark.parametrize("step_rule", STEP_RULES)
@pytest.mark.parametrize("inverse", INVERSES)
def test_affine_transformations_of_the_inputs_do_not_change_the_path(inverse, step_rule):
    """Corollary 2: so it does not matter how the inputs were centered, scaled or mixed."""
    network, x, y = problem(7)
    generator = torch.Generator().manual_seed(7)
    mix = random_invertible(SIZES[0], generator)
    shift = torch.randn(SIZES[0], generator=generator, dtype=torch.float64)
    Omega_0 = torch.eye(SIZES[0] + 1, dtype=torch.float64)
    Omega_0[:-1, :-1], Omega_0[:-1, -1] = mix, shift
    dagger = network.transformed([Omega_0, *network.Omega[1:]], network.Phi)

    loss = Bernoulli()
    assert_same_path(
        path(biased(network, nn.Tanh), loss, x, y, inverse, step_rule),
        path(biased(dagger, nn.Tanh), loss, x @ mix.mT + shift, y, inverse, step_rule),
    )


def test_damping_bends_the_path():
    """Corollary 2 assumes that damping is negligible: with it, mixing the inputs shows."""
    network, x, y = problem(8)
    dagger = network.transformed(*transformation(8))
    paths = [
        path(
            net,
            Bernoulli(),
            x,
            y,
            BlockDiagonalInverse(),
            QuadraticModel(momentum=False, bounded=False, memory=None),
            0.1,
        )
        for net in (network, dagger)
    ]
    assert float((paths[0] - paths[1]).abs().max()) > 1e-3


def test_one_layer_is_newton_on_least_squares():
    """Theorem 1 with ℓ = 1, where F̆ = F is the Hessian: one step solves least squares, whatever Ω and Φ."""
    generator = torch.Generator().manual_seed(9)
    x = torch.randn(20, 3, generator=generator, dtype=torch.float64)
    y = torch.randn(20, 2, generator=generator, dtype=torch.float64)
    network = random_network((3, 2), linear, generator)
    dagger = network.transformed(
        [random_invertible(4, generator)], [random_invertible(2, generator)]
    )
    outputs = path(dagger, Gaussian(), x, y, BlockDiagonalInverse(), RawStep(1.0))[1]
    design = torch.cat([x, x.new_ones(len(x), 1)], dim=1)
    assert_close(outputs, design @ torch.linalg.lstsq(design, y).solution, rtol=0, atol=1e-10)
