"""Derivatives that go through the layers, against autograd's, and what K-FAC sees of them."""

import itertools

import pytest
import torch
from torch import Tensor, nn
from torch.func import hessian, jacrev, vmap
from torch.testing import assert_close

import kronfac
from kronfac.errors import UnsupportedModelError
from kronfac.objective.likelihoods import Residual
from kronfac.physics import Sin, WithDerivatives
from kronfac.testing import check_likelihood
from tests.conftest import normal

ACTIVATIONS = [nn.Tanh, nn.Sigmoid, nn.SiLU, nn.GELU, nn.Softplus, nn.Identity, Sin]


class Cube(nn.Module):
    def forward(self, s: Tensor) -> Tensor:
        return s**3

    def slopes(self, s: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return s**3, 3 * s**2, 6 * s


def perceptron(
    *widths: int, activation: type[nn.Module] = nn.Tanh, bias: bool = True
) -> nn.Sequential:
    torch.manual_seed(0)
    modules: list[nn.Module] = []
    for inputs, outputs in itertools.pairwise(widths):
        modules += [nn.Linear(inputs, outputs, bias=bias, dtype=torch.float64), activation()]
    return nn.Sequential(*modules[:-1])


def by_autograd(network: nn.Module, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Values, first derivatives (points, inputs, outputs) and all second ones (points, i, j, outputs)."""
    first = vmap(jacrev(network))(x).mT
    second = vmap(hessian(network))(x).movedim(1, -1)
    return network(x), first, second


def assert_same(network: nn.Sequential, x: Tensor, second, expected_second) -> None:
    value, first, all_second = by_autograd(network, x)
    jet = WithDerivatives(network, second)(x)
    assert_close(jet.value, value, rtol=1e-10, atol=1e-12)
    assert_close(jet.first, first, rtol=1e-10, atol=1e-12)
    assert_close(jet.second, expected_second(all_second), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("activation", [*ACTIVATIONS, Cube])
def test_all_derivatives_are_autograds(activation):
    network = perceptron(3, 5, 4, 2, activation=activation)
    pairs = [(i, j) for i in range(3) for j in range(3)]
    assert_same(network, normal(6, 3), pairs, lambda H: H.flatten(1, 2))


def test_the_laplacian():
    network = perceptron(5, 6, 6, 1)
    assert_same(
        network, normal(7, 5), "laplacian", lambda H: H.diagonal(dim1=1, dim2=2).sum(-1)[:, None]
    )


@pytest.mark.parametrize("i", [0, 1])
def test_the_second_derivative_by_one_input(i):
    network, x = perceptron(2, 5, 4, 3), normal(6, 2)
    assert_same(network, x, [(i, i)], lambda d: d[:, i, i].unsqueeze(1))


def test_weighted_sums_of_second_derivatives():
    C = normal(2, 3, 3, seed=3)
    assert_same(perceptron(3, 4, 2), normal(5, 3), C, lambda H: torch.einsum("kij,nijo->nko", C, H))


def test_without_biases_and_with_an_activation_at_the_end():
    network = nn.Sequential(*perceptron(2, 4, 3, bias=False), nn.Tanh())
    assert_same(network, normal(4, 2), [(1, 1)], lambda H: H[:, 1:, 1])


def test_what_is_linear_has_no_second_derivatives():
    jet = WithDerivatives(perceptron(2, 3))(normal(4, 2))
    assert jet.second.shape == (4, 1, 3)
    assert not jet.second.any()


def test_the_gradient_of_a_residual_is_autograds():
    network, x = perceptron(2, 5, 1), normal(6, 2)
    parameters = list(network.parameters())
    jet = WithDerivatives(network)(x)
    ours = (jet.second[:, 0] + jet.value).square().sum()
    laplacian = vmap(hessian(network))(x).diagonal(dim1=2, dim2=3).sum(-1)
    theirs = (laplacian + network(x)).square().sum()
    found, expected = (torch.autograd.grad(h, parameters) for h in (ours, theirs))
    assert_close(found, expected, rtol=1e-8, atol=1e-10)


def test_it_follows_its_perceptron_to_another_dtype():
    jet = WithDerivatives(perceptron(2, 3, 1)).float()(normal(4, 2).float())
    assert jet.second.dtype == torch.float32


def residual_closure(u: WithDerivatives, optimizer: kronfac.KFAC, x: Tensor, b: Tensor):
    def closure() -> Tensor:
        optimizer.zero_grad()
        inside = kronfac.least_squares(u(x).second[:, 0] + 1)
        loss = inside + kronfac.least_squares(u.perceptron(b), 10.0)
        loss.backward()
        return loss

    return closure


def test_kfac_sees_every_weight_at_its_places():
    """A of the first layer by hand: means over x and, without a bias, the unit vectors; zeros nowhere."""
    u = WithDerivatives(perceptron(2, 4, 1))
    optimizer = kronfac.KFAC(
        u, nn.MSELoss(), fisher="exact", intervals=kronfac.Intervals(statistics_fraction=1.0)
    )
    x = normal(20, 2)

    def closure() -> Tensor:
        optimizer.zero_grad()
        jet = u(x)
        loss = kronfac.least_squares(jet.second[:, 0] + jet.value)
        loss.backward()
        return loss

    optimizer.step(closure)
    a = torch.cat([x, x.new_ones(20, 1)], dim=1)
    units = torch.cat([torch.eye(2, dtype=x.dtype), x.new_zeros(2, 1)], dim=1)
    expected = (a.mT @ a + 20 * units.mT @ units) / 60
    moments = optimizer._state.curvature.blocks[0]
    assert_close(moments.A, expected, rtol=1e-10, atol=1e-12)


def test_exact_products_are_those_of_the_residuals_jacobian():
    """One step of steepest descent by the exact Gauss–Newton matrix 2 Σ w JᵀJ / n, λ = 0."""
    u, x, b = WithDerivatives(perceptron(2, 4, 1)), normal(20, 2), normal(6, 2, seed=4)
    optimizer = kronfac.KFAC(
        u, nn.MSELoss(), damping=kronfac.FixedDamping(1e-3), gamma=kronfac.FixedGamma(0.1),
        step_rule=kronfac.QuadraticModel(momentum=False, bounded=False, memory=None),
        intervals=kronfac.Intervals(fisher_fraction=1.0),
    )  # fmt: skip
    before = [p.detach().clone() for p in u.parameters()]
    rows = []
    for r in (*(u(x).second[:, 0, 0] / 20**0.5), *(u.perceptron(b)[:, 0] * (10 / 6) ** 0.5)):
        grads = torch.autograd.grad(r, list(u.parameters()), retain_graph=True, allow_unused=True)
        zeros = (torch.zeros_like(p) for p in before)
        rows.append(
            torch.cat(
                [(z if g is None else g).flatten() for g, z in zip(grads, zeros, strict=True)]
            )
        )
    J = torch.stack(rows)
    r = torch.cat([(u(x).second[:, 0, 0] + 1) / 20**0.5, u.perceptron(b)[:, 0] * (10 / 6) ** 0.5])
    gradient = 2 * J.mT @ r.detach()
    optimizer.step(residual_closure(u, optimizer, x, b))
    delta = torch.cat(
        [(p.detach() - old).flatten() for p, old in zip(u.parameters(), before, strict=True)]
    )
    curvature = 2 * (J @ delta).square().sum() + 1e-3 * delta.square().sum()
    # At the best multiple of its direction the slope of M along the step is 0.
    assert_close(gradient @ delta + curvature, gradient.new_zeros(()), atol=1e-9, rtol=0)
    assert optimizer.report.predicted_change == pytest.approx(float(gradient @ delta) / 2, rel=1e-8)


def test_an_equation_is_solved():
    """u″ = −π² sin πx on (0, 1) with u = 0 at both ends: u = sin πx."""
    torch.manual_seed(0)
    u = WithDerivatives(perceptron(1, 16, 1, activation=Sin), [(0, 0)])
    optimizer = kronfac.KFAC(u, nn.MSELoss(), fisher="exact")
    x = torch.linspace(0, 1, 50, dtype=torch.float64)[:, None]
    f = torch.pi**2 * (torch.pi * x).sin()

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = kronfac.least_squares(u(x).second[:, 0] + f)
        loss = loss + kronfac.least_squares(u.perceptron(x[[0, -1]]), 100.0)
        loss.backward()
        return loss

    for _ in range(40):
        optimizer.step(closure)
    error = (u.perceptron(x) - (torch.pi * x).sin()).norm() / (torch.pi * x).sin().norm()
    assert float(error.detach()) < 1e-3


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (nn.Linear(2, 1), "needs an nn.Sequential"),
        (nn.Sequential(nn.Tanh()), "got none"),
        (nn.Sequential(nn.Linear(2, 2), nn.ReLU()), "'1' is ReLU"),
        (nn.Sequential(nn.Linear(2, 2), nn.GELU(approximate="tanh")), "usual arguments"),
        (nn.Sequential(nn.Linear(2, 2), nn.Softplus(beta=2)), "usual arguments"),
    ],
)
def test_what_it_can_not_differentiate_is_refused(module, message):
    with pytest.raises(UnsupportedModelError, match=message):
        WithDerivatives(module)


@pytest.mark.parametrize(
    ("second", "message"),
    [
        ("hessian", "got 'hessian'"),
        ([(0, 2)], r"inputs 0 to 1; got \(0, 2\)"),
        (torch.eye(2), r"got \(2, 2\)"),
    ],
)
def test_second_derivatives_that_there_are_not_are_refused(second, message):
    with pytest.raises(ValueError, match=message):
        WithDerivatives(nn.Sequential(nn.Linear(2, 1)), second)


def test_residuals_of_one_number_have_the_exact_fisher_as_it_comes():
    """Targets are drawn as z ± σ, and the second moment of one number's score is 1/σ² by either sign."""
    x, b = normal(20, 2), normal(6, 2, seed=4)
    found = []
    for fisher in ("sampled", "exact"):
        u = WithDerivatives(perceptron(2, 4, 1))
        optimizer = kronfac.KFAC(u, nn.MSELoss(), fisher=fisher)
        closure = residual_closure(u, optimizer, x, b)
        for _ in range(3):
            optimizer.step(closure)
        found.append([V for block in optimizer._state.curvature.blocks for V in (block.A, block.G)])
    for V, expected in zip(*found, strict=True):
        assert_close(V, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("variance", [0.5, 2.0])
def test_draws_by_signs_have_the_fisher_of_normal_ones(variance):
    check_likelihood(Residual(variance), normal(5, 3))
