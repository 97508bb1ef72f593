"""Inverse covariances as regressions, and what a block-tridiagonal one says [MG15 §4.1, §4.3]."""

from itertools import pairwise

import torch
from torch import Tensor
from torch.testing import assert_close

from kronfac import Bernoulli
from kronfac.extend import BlockTridiagonalInverse
from tests.reference.dense import kron
from tests.theory.enumeration import enumerate_outcomes
from tests.theory.networks import (
    Network,
    block_slices,
    curvature,
    dense,
    fisher,
    random_network,
)


def problem(sizes: tuple[int, ...]) -> tuple[Network, Tensor]:
    generator = torch.Generator().manual_seed(0)
    # Weights that are not small: units that are close to linear make factors close to singular.
    network = random_network(sizes, torch.tanh, generator, scale=2.0)
    return network, torch.randn(60, sizes[0], generator=generator, dtype=torch.float64)


def regression(precision: Tensor) -> tuple[Tensor, Tensor]:
    """B_ij = −[Σ⁻¹]_ij / [Σ⁻¹]_ii, 0 on the diagonal, and D_ii = 1 / [Σ⁻¹]_ii."""
    diagonal = precision.diagonal()
    B = -precision / diagonal[:, None]
    B.fill_diagonal_(0)
    return B, 1 / diagonal


def test_rows_of_the_inverse_fisher_are_regressions():
    """§4.1: B and D from F⁻¹ are the coefficients and error variances of predicting each entry of Dθ.

    F is kronfac's exact Fisher, the covariance of Dθ; the predictions are least squares over the
    model's distribution of Dθ, all of it enumerated.
    """
    network, x = problem((2, 3, 2))
    outcomes = enumerate_outcomes(network, x)
    precision = torch.linalg.inv(fisher(network, Bernoulli(), x))
    B, D = regression(precision)

    weighted = outcomes.D_theta * outcomes.probabilities.sqrt()[:, None]
    for i in range(len(D)):
        others = [j for j in range(len(D)) if j != i]
        solution = torch.linalg.lstsq(weighted[:, others], weighted[:, i]).solution
        residual = weighted[:, i] - weighted[:, others] @ solution
        assert_close(B[i, others], solution, rtol=1e-8, atol=1e-8)
        assert_close(D[i], residual @ residual, rtol=1e-8, atol=0)
    identity = torch.eye(len(D), dtype=D.dtype)
    assert_close((identity - B) / D[:, None], precision, rtol=1e-10, atol=1e-10)


def test_a_variable_that_is_a_noisy_copy_is_of_no_use():
    """§4.1's example: x_j = x_k + noise predicts nothing but x_k, however correlated it is."""
    generator = torch.Generator().manual_seed(2)
    root = torch.randn(4, 4, generator=generator, dtype=torch.float64)
    Sigma = torch.zeros(5, 5, dtype=torch.float64)
    Sigma[:4, :4] = root @ root.mT
    Sigma[4, :4] = Sigma[:4, 4] = Sigma[3, :4]  # x_4 = x_3 + noise
    Sigma[4, 4] = Sigma[3, 3] + 0.5
    B, _ = regression(torch.linalg.inv(Sigma))
    assert_close(B[:3, 4], torch.zeros(3, dtype=torch.float64), rtol=0, atol=1e-10)
    assert float(Sigma[:3, 4].abs().min()) > 0.1
    assert float(B[3, 4].abs()) > 0.1


def test_block_tridiagonal_inverse_is_the_chain_with_the_right_neighbours():
    """§4.3: F̂⁻¹ is block-tridiagonal and F̂ agrees with F̃ on the tridiagonal blocks.

    So under F̂ an entry of DW_i is predicted by entries of its own and of the adjacent layers only.
    """
    network, x = problem((3, 4, 3, 2))
    loss = Bernoulli()
    shapes = [W.shape for W in network.weights]
    blocks = block_slices(shapes)
    moments = curvature(network, loss, x, coupled=True)
    F_hat_inv = dense(BlockTridiagonalInverse().prepare(moments).damped(0.0), shapes)
    scale = float(F_hat_inv.abs().max())
    assert_close(F_hat_inv, F_hat_inv.mT, rtol=0, atol=1e-10 * scale)

    B, _ = regression(F_hat_inv)
    for i, rows in enumerate(blocks):
        for j, columns in enumerate(blocks):
            if abs(i - j) > 1:
                assert not B[rows, columns].any()
            elif i != j:
                assert float(B[rows, columns].abs().max()) > 1e-3

    F_hat = torch.linalg.inv(F_hat_inv)
    for i, rows in enumerate(blocks):
        block = kron(moments.blocks[i].A, moments.blocks[i].G)
        assert_close(F_hat[rows, rows], block, rtol=0, atol=1e-8)
    for i, (rows, columns) in enumerate(pairwise(blocks)):
        block = kron(moments.links[i].A_next, moments.links[i].G_next)
        assert_close(F_hat[rows, columns], block, rtol=0, atol=1e-8)
    # What is left, F̂_13, follows from the chain: Ψ_12 F̃_23.
    first, second, third = blocks
    Psi = torch.linalg.solve(F_hat[second, second], F_hat[first, second], left=False)
    assert_close(F_hat[first, third], Psi @ F_hat[second, third], rtol=0, atol=1e-8)
