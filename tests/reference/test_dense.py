"""The truth itself, against other definitions of the same things."""

import itertools

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.testing import assert_close

from tests.conftest import ALGEBRA, AUTODIFF, mlp, normal
from tests.reference import dense


def test_vec_stacks_columns():
    V = torch.tensor([[1.0, 3.0], [2.0, 4.0]])
    assert dense.vec(V).tolist() == [1, 2, 3, 4]
    assert torch.equal(dense.unvec(dense.vec(V[:1]), (1, 2)), V[:1])


def test_kron_is_defined_by_vec_of_a_product():
    A, G, V = normal(4, 4), normal(3, 3, seed=1), normal(3, 4, seed=2)
    assert_close(dense.kron(A, G) @ dense.vec(V), dense.vec(G @ V @ A.mT), **ALGEBRA)
    assert_close(dense.kron(A, G), torch.kron(A, G), **ALGEBRA)


@pytest.mark.parametrize("bias", [True, False])
def test_network_function_and_theta_are_the_model(bias):
    model = nn.Sequential(mlp([3, 4], bias=bias), nn.Tanh(), mlp([4, 2], bias=bias, seed=1))
    x = normal(5, 3)
    assert_close(dense.network_function(model, dense.theta(model), x), model(x), **ALGEBRA)
    assert len(dense.theta(model)) == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("likelihood", ["bernoulli", "categorical"])
def test_fisher_is_the_second_moment_of_the_score_over_all_targets(likelihood):
    """F = E_x E_{y|x}[Dθ Dθᵀ] [MG15 §2.2], one case and one target at a time, by `backward`."""
    model, x = mlp([3, 3, 2]), normal(4, 3)
    size = len(dense.theta(model))
    F = torch.zeros(size, size, dtype=torch.float64)
    for case in x:
        z = model(case)
        if likelihood == "categorical":
            log_p = [functional.log_softmax(z, dim=0)[k] for k in range(2)]
        else:
            log_p = [
                sum(
                    functional.logsigmoid(z_j if y_j else -z_j)
                    for z_j, y_j in zip(z, y, strict=True)
                )
                for y in itertools.product([0, 1], repeat=2)
            ]
        for value in log_p:
            grads = torch.autograd.grad(value, list(model.parameters()), retain_graph=True)
            matrices = [
                torch.cat([W, b.unsqueeze(1)], dim=1)
                for W, b in zip(grads[::2], grads[1::2], strict=True)
            ]
            score = dense.flatten(matrices)
            F += value.exp().detach() * torch.outer(score, score) / len(x)
    assert_close(dense.exact_fisher(model, x, likelihood), F, **AUTODIFF)


@pytest.mark.parametrize("likelihood", ["gaussian", "bernoulli", "categorical"])
def test_fisher_is_the_gauss_newton_matrix(likelihood):
    """The output Fisher is the Hessian of the loss in natural parameters [MG15 §6.1]."""
    z = normal(1, 4)[0]
    losses = {
        "gaussian": lambda z: (z - 0.3).square().sum() / (2 * 0.7),
        "bernoulli": lambda z: functional.binary_cross_entropy_with_logits(
            z, torch.full_like(z, 0.2), reduction="sum"
        ),
        "categorical": lambda z: functional.cross_entropy(z, torch.tensor(1)),
    }
    hessian = torch.func.hessian(losses[likelihood])(z)
    assert_close(dense.output_fisher(z[None], likelihood, variance=0.7)[0], hessian, **AUTODIFF)


def test_one_case_makes_the_kronecker_approximation_exact():
    """With one case E[a aᵀ ⊗ g gᵀ] = E[a aᵀ] ⊗ E[g gᵀ], so F̃ = F: ties `moments` to `exact_fisher`."""
    model, x = mlp([3, 4, 3, 2]), normal(1, 3)
    A, G = dense.moments(model, x, "bernoulli", scale=0.5)
    F = dense.exact_fisher(model, x, "bernoulli", scale=0.5)
    assert_close(dense.kron_fisher(A, G), F, **AUTODIFF)


def test_block_tridiagonal_fisher_meets_its_definition():
    """F̂ agrees with F̃ on the tridiagonal blocks and F̂⁻¹ vanishes off them [MG15 §4.3]."""
    model, x = mlp([3, 4, 3, 3, 2]), normal(30, 3)
    A, G = dense.factored_tikhonov(*dense.moments(model, x, "gaussian"), gamma=0.3)
    F_hat = dense.block_tridiagonal_fisher(A, G)
    F_tilde = dense.kron_fisher(A, G)
    inverse = torch.linalg.inv(F_hat)
    sizes = [rows * columns for rows, columns in dense.shapes(model)]
    for i, hat_row in enumerate(F_hat.split(sizes)):
        for j, block in enumerate(hat_row.split(sizes, dim=1)):
            if abs(i - j) <= 1:
                assert_close(block, F_tilde.split(sizes)[i].split(sizes, dim=1)[j], **ALGEBRA)
            else:
                off = inverse.split(sizes)[i].split(sizes, dim=1)[j]
                assert off.abs().max() < 1e-10 * inverse.abs().max()
    assert torch.linalg.eigvalsh(F_hat)[0] > 0


def test_both_edge_directions_give_the_same_inverse():
    model, x = mlp([3, 4, 3, 2]), normal(30, 3)
    A, G = dense.factored_tikhonov(*dense.moments(model, x, "categorical"), gamma=0.3)
    inverse = torch.linalg.inv(dense.block_tridiagonal_fisher(A, G))
    upwards = dense.block_tridiagonal_inverse_upwards(A, G)
    assert_close(upwards, inverse, rtol=0, atol=1e-10 * float(inverse.abs().max()))


def test_minimise_over_span_beats_its_neighbours_and_ignores_dependent_directions():
    H, g = normal(6, 6), normal(6, seed=1)
    H = H @ H.mT + torch.eye(6, dtype=torch.float64)
    u, v = normal(6, seed=2), normal(6, seed=3)
    best = dense.minimise_over_span(H, g, [u, v])
    # A minimum over the span: the gradient of M is orthogonal to it.
    assert_close((H @ best + g) @ torch.stack([u, v], 1), torch.zeros_like(best[:2]), **AUTODIFF)
    assert_close(dense.minimise_over_span(H, g, [u, v, u - 2 * v]), best, **AUTODIFF)
    assert torch.equal(dense.minimise_over_span(H, g, [0 * u]), torch.zeros_like(u))
