"""F̃, F̆, F̂ and their inverses against their dense definitions."""

import pytest
import torch
from torch.testing import assert_close

from kronfac import Categorical
from kronfac.errors import NotPositiveDefiniteError
from kronfac_experiments.diagnostics import BlockMatrix, Examples, compare, kronecker_fisher
from tests.conftest import ALGEBRA, LIKELIHOODS, mlp, normal
from tests.reference import dense

WIDTHS = (3, 4, 2, 3, 2)
GAMMA = 0.2


@pytest.fixture(params=list(LIKELIHOODS))
def problem(request):
    """F̃ by kronfac, and Ā and G by the reference."""
    model, x = mlp(WIDTHS), normal(60, 3, seed=5)
    F_tilde = kronecker_fisher(Examples(model, LIKELIHOODS[request.param](), x, chunk=17))
    return F_tilde, dense.moments(model, x, request.param)


def test_blocks_are_the_moments(problem):
    F_tilde, (A, G) = problem
    for i in range(4):
        for j in range(4):
            assert_close(F_tilde.A[i][j], A[i][j], **ALGEBRA)
            assert_close(F_tilde.G[i][j], G[i][j], **ALGEBRA)
    assert_close(F_tilde.dense().dense, dense.kron_fisher(A, G), **ALGEBRA)
    assert F_tilde.sizes == (16, 10, 9, 8)


def test_approximations(problem):
    F_tilde, (A, G) = problem
    assert_close(F_tilde.block_diagonal().dense, dense.block_diagonal_fisher(A, G), **ALGEBRA)
    damped, damped_blocks = F_tilde.damped(GAMMA), dense.factored_tikhonov(A, G, GAMMA)
    assert_close(damped.dense().dense, dense.kron_fisher(*damped_blocks), **ALGEBRA)
    F_hat = damped.block_tridiagonal()
    assert_close(F_hat.dense, dense.block_tridiagonal_fisher(*damped_blocks), **ALGEBRA)
    # Figure 5: it agrees with F̃ on the tridiagonal blocks, to the last bit, and nowhere else.
    difference = (damped.dense() - F_hat).block_sums()
    for i in range(4):
        for j in range(4):
            assert (float(difference[i, j]) == 0) == (abs(i - j) <= 1)


def test_inverses(problem):
    F_tilde, (A, G) = problem
    damped, blocks = F_tilde.damped(GAMMA), dense.factored_tikhonov(A, G, GAMMA)
    for inverse, matrix in (
        (damped.inverse(), dense.kron_fisher(*blocks)),
        (damped.block_diagonal_inverse(), dense.block_diagonal_fisher(*blocks)),
        (damped.block_tridiagonal_inverse(), dense.block_tridiagonal_fisher(*blocks)),
    ):
        assert_close(inverse.dense, torch.linalg.inv(matrix), rtol=1e-9, atol=1e-10)
        assert_close(inverse.dense, inverse.dense.mT, rtol=1e-14, atol=1e-14)
    assert damped.block_diagonal_inverse().mass_beyond(0) == 0
    assert damped.block_tridiagonal_inverse().mass_beyond(1) == 0


def test_of_the_middle_layers_is_the_middle_of_the_whole():
    model, x = mlp(WIDTHS), normal(60, 3, seed=5)
    whole = kronecker_fisher(Examples(model, Categorical(), x))
    part = kronecker_fisher(Examples(model, Categorical(), x, ("2", "4")))
    middle = slice(16, 16 + 10 + 9)
    assert_close(part.dense().dense, whole.dense().dense[middle, middle], **ALGEBRA)
    # Two neighbours: the tridiagonal blocks are all there is.
    damped = part.damped(GAMMA)
    assert compare(damped.inverse(), damped.block_tridiagonal_inverse()).relative_frobenius < 1e-10


def test_a_singular_matrix_has_no_inverse_rather_than_a_wrong_one():
    # Three cases: the factors have rank three at most. One more than that is left to rounding.
    F_tilde = kronecker_fisher(Examples(mlp((3, 4, 2)), Categorical(), normal(3, 3)))
    for method in (
        "inverse",
        "block_diagonal_inverse",
        "block_tridiagonal",
        "block_tridiagonal_inverse",
    ):
        with pytest.raises(NotPositiveDefiniteError, match="Damp it"):
            getattr(F_tilde, method)()
        getattr(F_tilde.damped(1e-3), method)()


def test_block_matrix_and_comparison():
    values = torch.tensor([[1.0, -2.0, 3.0], [-2.0, 4.0, 0.0], [3.0, 0.0, -5.0]])
    M = BlockMatrix(values, ("a", "b"), (2, 1))
    assert M.edges == (0, 2, 3)
    assert torch.equal(M.block(0, 1), torch.tensor([[3.0], [0.0]]))
    assert torch.equal(M.block_sums(), torch.tensor([[9.0, 3.0], [3.0, 5.0]]))
    assert torch.equal(M.block_means(), torch.tensor([[9 / 4, 3 / 2], [3 / 2, 5.0]]))
    assert M.mass_beyond(0) == pytest.approx(6 / 20)
    assert M.mass_beyond(1) == 0
    N = BlockMatrix(torch.block_diag(values[:2, :2], values[2:, 2:]), M.names, M.sizes)
    comparison = compare(M, N)
    assert comparison.absolute == 6
    assert comparison.relative_absolute == pytest.approx(6 / 20)
    assert comparison.relative_frobenius == pytest.approx((18 / 68) ** 0.5)
    with pytest.raises(ValueError, match="same layers"):
        M - BlockMatrix(values, ("c",), (3,))
