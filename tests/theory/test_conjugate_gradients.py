"""Re-scaling and momentum as preconditioned conjugate gradients [MG15 §6.4, §7]."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from kronfac import KFAC, Bernoulli, FixedDamping, FixedGamma, Gaussian, QuadraticModel
from kronfac.extend import BlockDiagonalInverse, BlockTridiagonalInverse, ExactFisher
from kronfac.model import find_units
from tests.reference.dense import flatten
from tests.theory.networks import (
    Network,
    curvature,
    dense,
    fisher,
    gradient,
    homogeneous,
    random_invertible,
    random_network,
)


def conjugate_gradients(
    B: Tensor, b: Tensor, precondition: Callable[[Tensor], Tensor], start: Tensor, steps: int
) -> list[Tensor]:
    """Textbook preconditioned CG on ½ xᵀBx − bᵀx: all its iterates, the start included."""
    x = start
    residual = b - B @ x
    z = precondition(residual)
    p = z
    iterates = [x]
    for _ in range(steps):
        curved = B @ p
        alpha = (residual @ z) / (p @ curved)
        x = x + alpha * p
        old = residual @ z
        residual = residual - alpha * curved
        z = precondition(residual)
        p = z + (residual @ z) / old * p
        iterates.append(x)
    return iterates


# -------------------------------------------------------------------------------- §7, many iterations


class TwoBranches(nn.Module):
    """z = C W₁x̄ + W₂ tanh(Mx), linear in its parameters: F is constant, F̆ leaves out a part of it.

    Which part is the correlation between the branches, that is, between the layers.
    """

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()
        self.mix = 3 * torch.randn(2, 2, generator=generator, dtype=torch.float64)
        self.C = random_invertible(2, generator)
        self.first = nn.Linear(3, 2, bias=False, dtype=torch.float64)
        self.second = nn.Linear(2, 2, bias=False, dtype=torch.float64)
        with torch.no_grad():
            for layer in (self.first, self.second):
                shape = layer.weight.shape
                layer.weight.copy_(torch.randn(shape, generator=generator, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return self.first(homogeneous(x)) @ self.C.mT + self.second(torch.tanh(x @ self.mix.mT))


def one_layer(generator: torch.Generator) -> Network:
    """z = Φ W x̄: F̆ = F, so that only damping makes the preconditioner inexact."""
    network = random_network((3, 2), torch.tanh, generator)
    return network.transformed(network.Omega, [random_invertible(2, generator)])


# γ = 0 leaves F̆ itself; with one layer that would be F, and CG done after one iteration.
QUADRATICS = [
    pytest.param(TwoBranches, 0.0, id="two branches"),
    pytest.param(TwoBranches, 0.3, id="two branches, γ"),
    pytest.param(one_layer, 0.3, id="one layer, γ"),
]


def parameters(model: nn.Module) -> Tensor:
    return flatten([unit.join(unit.parameters) for unit in find_units(model).units]).detach()


@pytest.mark.parametrize("weight_decay", [0.0, 0.05])
@pytest.mark.parametrize(("build", "gamma"), QUADRATICS)
def test_momentum_is_conjugate_gradients_on_a_quadratic(build, gamma, weight_decay):
    """§7: if h is quadratic, δ = αΔ + μδ₀ is preconditioned linear CG, iterate by iterate.

    λ = 0, for h = M at every iteration; the weight decay's term is quadratic too and may stay. The
    statistics of a model that is linear in θ do not change, so neither does the preconditioner.
    """
    generator = torch.Generator().manual_seed(2)
    model = build(generator)
    x = torch.randn(30, 2 if build is TwoBranches else 3, generator=generator, dtype=torch.float64)
    y = torch.randn(30, 2, generator=generator, dtype=torch.float64)
    loss = Gaussian(0.8)
    shapes = [unit.shape for unit in find_units(model).units]

    theta = parameters(model)
    B = fisher(model, loss, x)
    B = B + weight_decay * torch.eye(len(B), dtype=B.dtype)
    grad = flatten(gradient(model, loss, x, y)) + weight_decay * theta
    preconditioner = dense(
        BlockDiagonalInverse().prepare(curvature(model, loss, x)).damped(gamma), shapes
    )
    expected = conjugate_gradients(
        B, B @ theta - grad, lambda r: preconditioner @ r, theta, steps=len(theta)
    )
    minimum = torch.linalg.solve(B, B @ theta - grad)

    optimizer = KFAC(
        model,
        loss,
        weight_decay=weight_decay,
        fisher=ExactFisher(),
        damping=FixedDamping(0.0),
        gamma=FixedGamma(gamma),
        step_rule=QuadraticModel(bounded=False, memory=None),
    )
    distances = []
    for iterate in expected[1:]:
        distances.append(float((parameters(model) - minimum).norm()))
        optimizer.step(optimizer.closure(x, y))
        assert_close(parameters(model), iterate, rtol=0, atol=1e-10)
    # It took several iterations, and no more than there are parameters.
    assert distances[2] > 1e-4
    assert_close(parameters(model), minimum, rtol=0, atol=1e-10)


def test_without_momentum_it_is_not_conjugate_gradients():
    """§7: re-scaling alone is steepest descent in the preconditioned space, and slower."""
    distances = {}
    for momentum in (True, False):
        generator = torch.Generator().manual_seed(2)
        model = TwoBranches(generator)
        x = torch.randn(30, 2, generator=generator, dtype=torch.float64)
        y = torch.randn(30, 2, generator=generator, dtype=torch.float64)
        loss = Gaussian(0.8)
        theta, F = parameters(model), fisher(model, loss, x)
        minimum = theta - torch.linalg.solve(F, flatten(gradient(model, loss, x, y)))
        optimizer = KFAC(
            model,
            loss,
            fisher=ExactFisher(),
            damping=FixedDamping(0.0),
            gamma=FixedGamma(0.0),
            step_rule=QuadraticModel(momentum=momentum, bounded=False, memory=None),
        )
        for _ in range(len(theta)):
            optimizer.step(optimizer.closure(x, y))
        distances[momentum] = float((parameters(model) - minimum).norm())
    assert distances[True] < 1e-10
    assert distances[False] > 1e-4


# ------------------------------------------------------------------------------------ §6.4, one iteration


@pytest.mark.parametrize(("lambda_", "weight_decay"), [(0.0, 0.0), (0.5, 0.0), (0.5, 0.1)])
@pytest.mark.parametrize(
    "inverse",
    [
        pytest.param(BlockDiagonalInverse(), id="block-diagonal"),
        pytest.param(BlockTridiagonalInverse(), id="block-tridiagonal"),
    ],
)
def test_rescaling_is_one_step_of_conjugate_gradients(inverse, lambda_, weight_decay):
    """§6.4: α minimises M(αΔ), and αΔ is the first iterate of CG on M from 0, preconditioned by F⁰."""
    generator = torch.Generator().manual_seed(1)
    network = random_network((3, 4, 3, 2), torch.tanh, generator)
    x = torch.randn(40, 3, generator=generator, dtype=torch.float64)
    y = torch.rand(40, 2, generator=generator, dtype=torch.float64)
    loss, gamma = Bernoulli(), 0.2
    shapes = [W.shape for W in network.weights]

    theta = flatten(network.weights)
    grad = flatten(gradient(network, loss, x, y)) + weight_decay * theta
    F = fisher(network, loss, x)
    B = F + (lambda_ + weight_decay) * torch.eye(len(F), dtype=F.dtype)
    moments = curvature(network, loss, x, coupled=inverse.couples)
    preconditioner = dense(inverse.prepare(moments).damped(gamma), shapes)
    _, expected = conjugate_gradients(
        B, -grad, lambda r: preconditioner @ r, torch.zeros_like(theta), steps=1
    )

    optimizer = KFAC(
        network,
        loss,
        inverse=inverse,
        weight_decay=weight_decay,
        fisher=ExactFisher(),
        damping=FixedDamping(lambda_),
        gamma=FixedGamma(gamma),
        step_rule=QuadraticModel(momentum=False, bounded=False, memory=None),
    )
    optimizer.step(optimizer.closure(x, y))
    delta = flatten(network.weights) - theta
    assert_close(delta, expected, rtol=1e-8, atol=1e-10)

    # M along Δ, by autodiff: its derivative vanishes at the step, its value is the one reported.
    direction = -preconditioner @ grad

    def model_change(alpha: Tensor) -> Tensor:
        step = alpha * direction
        return step @ B @ step / 2 + grad @ step

    alpha = torch.tensor(optimizer.report.alpha, dtype=torch.float64)
    value, slope = torch.func.grad_and_value(model_change)(alpha)[::-1]
    assert abs(float(slope)) < 1e-8 * abs(float(grad @ direction))
    assert optimizer.report.predicted_change == pytest.approx(float(value), rel=1e-8)
    # For the optimal δ, M(δ) − M(0) = ½ ∇hᵀδ  [§6.5].
    assert float(value) == pytest.approx(float(grad @ delta) / 2, rel=1e-8)
    assert all(float(model_change(alpha * c)) > float(value) for c in (0.9, 1.1))
