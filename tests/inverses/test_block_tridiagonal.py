"""F̂⁻¹: its definition, and float32 with the rank-deficient statistics of a first mini-batch."""

import functools

import pytest
import torch
from torch.testing import assert_close

from kronfac.factors import KroneckerFactors
from kronfac.inverses import BlockDiagonalInverse, BlockTridiagonalInverse, ExactTikhonov
from kronfac.layers import find_layers
from kronfac.objective import Bernoulli, objective_of
from kronfac.statistics import SampledFisher, estimate
from tests.conformance import as_matrix, assert_relative
from tests.conftest import ALGEBRA, batch, mlp, normal, seeded
from tests.inverses.problems import factors_from, network
from tests.reference import dense

SOLVERS = ["decomposition", "smith"]
each_solver = pytest.mark.parametrize("solver", SOLVERS)
GAMMA = 0.2


def dense_inverse(solver, net="deep"):
    A, G, shapes = network(net)
    damped = BlockTridiagonalInverse(solver=solver).prepare(factors_from(A, G)).damped(GAMMA)
    return as_matrix(damped.mv, shapes), [rows * columns for rows, columns in shapes]


@each_solver
def test_its_inverse_agrees_with_the_kronecker_fisher_on_the_tridiagonal_blocks(solver):
    inverse, sizes = dense_inverse(solver)
    F_hat = inverse.inverse()
    F_tilde = dense.kron_fisher(*dense.factored_tikhonov(*network("deep")[:2], GAMMA))
    scale = F_tilde.abs().max()
    for i, row in enumerate(F_hat.split(sizes)):
        for j, block in enumerate(row.split(sizes, dim=1)):
            if abs(i - j) <= 1:
                expected = F_tilde.split(sizes)[i].split(sizes, dim=1)[j]
                assert_close(block, expected, rtol=0, atol=float(1e-10 * scale))


@each_solver
def test_it_is_block_tridiagonal(solver):
    inverse, sizes = dense_inverse(solver)
    for i, row in enumerate(inverse.split(sizes)):
        for j, block in enumerate(row.split(sizes, dim=1)):
            if abs(i - j) > 1:
                assert torch.equal(block, torch.zeros_like(block))


@each_solver
def test_edges_from_lower_to_higher_layers_would_give_the_same(solver):
    inverse, _ = dense_inverse(solver)
    A, G = dense.factored_tikhonov(*network("deep")[:2], GAMMA)
    assert_relative(inverse, dense.block_tridiagonal_inverse_upwards(A, G))


@each_solver
def test_one_layer_is_block_diagonal(solver):
    A, G, shapes = network("one_layer")
    damped = BlockDiagonalInverse().prepare(factors_from(A, G)).damped(GAMMA)
    assert_relative(dense_inverse(solver, "one_layer")[0], as_matrix(damped.mv, shapes))


@each_solver
def test_two_layers_are_the_whole_kronecker_fisher(solver):
    """With two layers there is nothing off the tridiagonal blocks: F̂ = F̃."""
    inverse, _ = dense_inverse(solver, "two_layers")
    A, G = dense.factored_tikhonov(*network("two_layers")[:2], GAMMA)
    assert_relative(inverse, dense.kron_fisher(A, G).inverse())


@each_solver
def test_uncorrelated_layers_are_block_diagonal(solver):
    A, G, shapes = network("deep")
    plain = factors_from(A, G)
    apart = KroneckerFactors(
        plain.A,
        plain.G,
        tuple(torch.zeros_like(M) for M in plain.A_next),
        tuple(torch.zeros_like(M) for M in plain.G_next),
    )
    tridiagonal = BlockTridiagonalInverse(solver=solver).prepare(apart).damped(GAMMA)
    diagonal = BlockDiagonalInverse().prepare(plain).damped(GAMMA)
    assert_relative(as_matrix(tridiagonal.mv, shapes), as_matrix(diagonal.mv, shapes))


def test_xi_is_the_matrix_of_the_paper_and_its_transpose():
    A, G, shapes = network("deep")
    damped = BlockTridiagonalInverse().prepare(factors_from(A, G)).damped(GAMMA)
    A, G = dense.factored_tikhonov(A, G, GAMMA)
    tilde = dense.kron_blocks(A, G)
    sizes = [len(tilde[i][i]) for i in range(len(tilde))]
    blocks = [
        [
            torch.eye(a).double() if i == j else torch.zeros(a, b).double()
            for j, b in enumerate(sizes)
        ]
        for i, a in enumerate(sizes)
    ]
    for i in range(len(sizes) - 1):
        blocks[i][i + 1] = -tilde[i][i + 1] @ tilde[i + 1][i + 1].inverse()
    Xi = dense.assemble(blocks)
    assert_close(as_matrix(damped.Xi, shapes), Xi, **ALGEBRA)
    assert_close(as_matrix(damped.Xi_transposed, shapes), Xi.mT, **ALGEBRA)


# ------------------------------------------------------------------------- float32, rank-deficient

WIDTHS = [784, 1000, 500, 250, 30]
CASES = 125


@functools.cache
def image_statistics() -> KroneckerFactors:
    """One mini-batch of 125 sparse non-negative 'images': every factor but the last G is singular."""
    model = mlp(WIDTHS, "sigmoid", dtype=torch.float32)
    x = 5 * (torch.rand(CASES, WIDTHS[0], generator=seeded(3)) - 0.8).clamp(min=0)
    rows = batch(x, WIDTHS[-1])
    objective = objective_of(Bernoulli())
    return estimate(
        model, find_layers(model), objective, rows, 1.0, SampledFisher(), seeded(4), neighbours=True
    )


def in_float64(factors: KroneckerFactors) -> KroneckerFactors:
    names = ("A", "G", "A_next", "G_next")
    return KroneckerFactors(*(tuple(M.double() for M in getattr(factors, n)) for n in names))


def vector(seed: int) -> tuple[torch.Tensor, ...]:
    factors = image_statistics()
    return tuple(
        normal(len(G), len(A), seed=seed, dtype=torch.float32)
        for A, G in zip(factors.A, factors.G, strict=True)
    )


@functools.cache
def truth(gamma: float):
    damped = BlockTridiagonalInverse().prepare(in_float64(image_statistics())).damped(gamma)
    return damped.mv([V.double() for V in vector(0)])


@each_solver
@pytest.mark.parametrize("gamma", [1.0, 1e-5**0.5])
def test_float32_with_rank_deficient_statistics(solver, gamma):
    """λ₀ = 1 and the paper's η = 1e-5 as γ²: finite, positive, and close to the float64 inverse."""
    factors = image_statistics()
    assert torch.linalg.matrix_rank(factors.A[0]) <= CASES
    damped = BlockTridiagonalInverse(solver=solver).prepare(factors).damped(gamma)
    for seed in range(3):
        V = vector(seed)
        U = damped.mv(V)
        assert all(u.isfinite().all() for u in U)
        assert sum((u.double() * v.double()).sum() for u, v in zip(U, V, strict=True)) > 0
        if seed == 0:
            for u, expected in zip(U, truth(gamma), strict=True):
                assert (u - expected).norm() < 1e-2 * expected.norm()


def test_float32_at_the_smallest_gamma_stays_positive():
    """1e-4 is the floor of `GammaSearch`."""
    damped = BlockTridiagonalInverse().prepare(image_statistics()).damped(1e-4)
    for seed in range(3):
        V = vector(seed)
        U = damped.mv(V)
        assert all(u.isfinite().all() for u in U)
        assert sum((u.double() * v.double()).sum() for u, v in zip(U, V, strict=True)) > 0


# ---------------------------------------------------------------------------------------- refusals


def test_settings_are_checked():
    with pytest.raises(ValueError, match="solver is one of"):
        BlockTridiagonalInverse(solver="cg")
    with pytest.raises(ValueError, match="FactoredTikhonov only"):
        BlockTridiagonalInverse(ExactTikhonov())
