import pytest
import torch
from torch.testing import assert_close

from kronfac.errors import NonFiniteError, NotPositiveDefiniteError
from kronfac.factors import KroneckerFactors
from kronfac.inverses import BlockDiagonalInverse, ExactTikhonov, FactoredTikhonov
from tests.conformance import as_matrix, assert_relative
from tests.conftest import ALGEBRA, mlp, normal, psd, spd
from tests.reference import dense

SHAPES = [(6, 9), (4, 7)]  # (out, in+1)


def factors() -> KroneckerFactors:
    return KroneckerFactors(
        A=tuple(spd(d_in, seed=i) for i, (_, d_in) in enumerate(SHAPES)),
        G=tuple(spd(d_out, seed=7 + i) for i, (d_out, _) in enumerate(SHAPES)),
    )


@pytest.mark.parametrize("weight_decay", [0.0, 0.2])
@pytest.mark.parametrize("cases", [1, 2, 3, 50])
def test_low_rank_route_equals_the_plain_one(cases, weight_decay):
    """F̆⁻¹(𝒢ᵀ𝒜 + ηθ): from 1 case all layers take the short way, from 50 none, between some."""
    damped = BlockDiagonalInverse(low_rank=True).prepare(factors()).damped(0.3)
    rows = [
        (normal(cases, d_out, seed=i), normal(cases, d_in, seed=9 + i))
        for i, (d_out, d_in) in enumerate(SHAPES)
    ]
    theta = tuple(normal(*shape, seed=20 + i) for i, shape in enumerate(SHAPES))
    gradient = tuple(g.mT @ a + weight_decay * W for (g, a), W in zip(rows, theta, strict=True))
    decayed = tuple(weight_decay * U for U in damped.mv(theta)) if weight_decay else None
    actual = damped.mv_low_rank(gradient, rows, decayed)
    for left, right in zip(actual, damped.mv(gradient), strict=True):
        assert_close(left, right, **ALGEBRA)


def test_without_damping_it_is_the_inverse_of_the_blocks():
    damped = BlockDiagonalInverse().prepare(factors()).damped(0.0)
    blocks = [dense.kron(A, G) for A, G in zip(factors().A, factors().G, strict=True)]
    assert_relative(as_matrix(damped.mv, SHAPES), torch.block_diag(*blocks).inverse())


@pytest.mark.parametrize("gamma", [0.5, 0.05])
def test_exact_tikhonov_of_a_deep_linear_network_inverts_the_damped_exact_fisher_blocks(gamma):
    """K-FAC's blocks are exact there, so this is (F_ii + γ² I)⁻¹ for the Fisher's own blocks."""
    model, x = mlp([4, 5, 3, 2], "identity"), normal(20, 4)
    A, G = dense.moments(model, x, "gaussian")
    damped = (
        BlockDiagonalInverse(ExactTikhonov())
        .prepare(
            KroneckerFactors(tuple(A[i][i] for i in range(3)), tuple(G[i][i] for i in range(3)))
        )
        .damped(gamma)
    )
    shapes = dense.shapes(model)
    sizes = [rows * columns for rows, columns in shapes]
    F = dense.exact_fisher(model, x, "gaussian")
    blocks = [F.split(sizes)[i].split(sizes, dim=1)[i] for i in range(3)]
    expected = torch.block_diag(
        *((block + gamma**2 * torch.eye(len(block)).double()).inverse() for block in blocks)
    )
    assert_relative(as_matrix(damped.mv, shapes), expected, 1e-9)


def test_singular_factors_without_damping_name_the_factor():
    singular = KroneckerFactors(A=(spd(3), torch.zeros(4, 4)), G=(spd(2), psd(3, 1)))
    with pytest.raises(NotPositiveDefiniteError, match=r"A\[1\]"):
        BlockDiagonalInverse(FactoredTikhonov("one")).prepare(singular).damped(0.0)


@pytest.mark.parametrize(
    "strategy", [BlockDiagonalInverse(), BlockDiagonalInverse(ExactTikhonov())]
)
def test_nan_in_the_statistics_names_the_factor(strategy):
    G = spd(3).clone()
    G[1, 1] = float("nan")
    bad = KroneckerFactors(A=(spd(3), spd(4)), G=(spd(2), G))
    with pytest.raises(NonFiniteError, match=r"[AG]\[1\]"):
        strategy.prepare(bad).damped(0.3)


def test_low_rank_needs_a_factored_inverse():
    with pytest.raises(ValueError, match="low_rank=True"):
        BlockDiagonalInverse(ExactTikhonov(), low_rank=True)


def test_a_vector_of_another_network_is_refused():
    damped = BlockDiagonalInverse().prepare(factors()).damped(0.3)
    with pytest.raises(ValueError, match="zip"):
        damped.mv([normal(6, 9)])
